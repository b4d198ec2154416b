"""A rank that is killed or stuck ends the others with a message; SIGTERM to torchrun saves on all of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tokennorm.engine import Runtime, all_ranks_or_none, distributed_session, evaluate, wrap_ddp
from tokennorm.errors import DistributedError
from tokennorm.testing import spawn_ranks

SCRIPT = """
import os
import signal
import sys
sys.path.insert(0, {root!r})
from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tokennorm.engine import CheckpointStore, DistributedConfig, ProgressPrinter, distributed_session
from tokennorm.engine import train, wrap_ddp
from tokennorm.engine.signals import RunStopped

with distributed_session(DistributedConfig(device="cpu")) as runtime:
    engine = build_engine(wrap_ddp(ToyLM(), runtime), dp_world_size=runtime.world_size)
    objective, calls = engine.objective, []

    def dying(model, batch):
        calls.append(batch)
        # A window has two micro-batches of each rank: the sixth is in the middle of the third.
        if {dies} and runtime.rank == 1 and len(calls) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return objective(model, batch)

    engine.objective = dying
    windows = ToyWindows(rank=runtime.rank, world_size=runtime.world_size, repeat=1_000)
    store = CheckpointStore({folder!r}, identity={{}}, runtime=runtime)
    progress = ProgressPrinter(4_000, enabled=runtime.is_main)
    try:
        train(engine, windows, total_steps=4_000, checkpoints=store, progress=progress)
    except RunStopped as stopped:
        os.write(1, f"rank {{runtime.rank}}: {{stopped}}\\n".encode())
        sys.exit(stopped.exit_code)
"""


@contextmanager
def torchrun(tmp_path: Path, *, dies: bool) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "script.py"
    root = str(Path(__file__).resolve().parents[2])
    script.write_text(SCRIPT.format(root=root, dies=dies, folder=str(tmp_path / "checkpoints")))
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    with subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(600)
def test_a_rank_killed_in_a_window_ends_the_other_with_a_message(tmp_path: Path) -> None:
    with torchrun(tmp_path, dies=True) as process:
        # The limit is the assertion: a peer that noticed nothing would wait ten minutes.
        output, errors = process.communicate(timeout=280)
    assert process.returncode != 0
    assert "step 2/4000" in output
    assert "step 3/4000" not in output
    assert "DistributedError: rank 0 of 2 stopped: a collective failed because another rank is gone" in errors
    # torchrun's own summary names who was first.
    assert re.search(r"Root Cause(.|\n)*rank +: 1 (.|\n)*Signal 9 \(SIGKILL\)", errors)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.timeout(600)
def test_sigterm_to_torchrun_saves_on_all_ranks_together(tmp_path: Path) -> None:
    with torchrun(tmp_path, dies=False) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGTERM)
                break
        output, _ = process.communicate(timeout=280)
    said = dict(re.findall(r"rank (\d): stopped by SIGTERM after step (\d+)/4000; the checkpoint is", output))
    assert sorted(said) == ["0", "1"]
    assert said["0"] == said["1"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{int(said['0']):08d}"]


def die_in_evaluation(rank: int, world_size: int) -> None:
    with distributed_session() as runtime:
        engine = build_engine(wrap_ddp(ToyLM(), runtime), dp_world_size=world_size)
        windows = ToyWindows(rank=rank, world_size=world_size)
        engine.train_step(windows.windows[0])

        def dying(model: Any, batch: Any) -> Any:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return engine.objective(model, batch)

        evaluate(engine.model, dying, windows.windows[0])


def test_a_rank_killed_in_an_evaluation_ends_the_other_without_torchrun() -> None:
    survivor, dead = spawn_ranks(die_in_evaluation, 2, check=False, timeout_s=240)
    assert "DistributedError: rank 0 of 2 stopped: a collective failed because another rank is gone" in str(
        survivor.error
    )
    assert dead.error == "died with exit code -9"


def work_alone(rank: int, session: Runtime) -> None:
    """Rank 0 takes longer than a collective may; where nobody waits patiently that is an error."""
    impatient = replace(session, group=dist.new_group(timeout=timedelta(seconds=3)))
    for runtime, fails in ((impatient, False), (replace(impatient, patient=None), True)):
        with pytest.raises(RuntimeError) if fails else nullcontext():
            all_ranks_or_none(lambda: time.sleep(0 if rank else 6), runtime)


def get_stuck(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=15))
    with distributed_session() as session:
        work_alone(rank, session)
        runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size, group=group)
        engine = build_engine(wrap_ddp(ToyLM(), runtime), dp_world_size=world_size, dp_group=group)
        window = ToyWindows(rank=rank, world_size=world_size).windows[0]
        engine.train_step(window)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        engine.train_step(window)


def test_work_alone_may_take_longer_and_a_stuck_rank_ends_the_other_when_the_time_of_a_collective_is_up() -> None:
    with pytest.raises(DistributedError, match="another rank is gone or stuck"):
        spawn_ranks(get_stuck, 2, timeout_s=240)
