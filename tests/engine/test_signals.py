"""A signal ends the run after the step that is being made, on all ranks, and the run goes on as if nothing was."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_resume import IDENTITY, STEPS, fingerprint, numbers
from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tokennorm.engine import (
    CausalLMObjective,
    CheckpointStore,
    LoopConfig,
    RunFolder,
    Runtime,
    evaluate,
    seed_everything,
    train,
    wrap_ddp,
)
from tokennorm.engine.signals import RunStopped, StopRequest
from tokennorm.testing import spawn_ranks


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    """Who starts the tests as a shell's background job has interrupts ignored, and so would they."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    resume: bool = False,
    ask: tuple[str, int] | None = None,
    number: int = signal.SIGTERM,
) -> Any:
    """A run in which this rank gets a signal, within a training step or an evaluation."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    seed_everything(rank)
    model = wrap_ddp(ToyLM(dtype=torch.float32, dropout=0.3, seed=1), runtime)
    engine = build_engine(model, total_steps=STEPS, dp_world_size=world_size)
    windows = ToyWindows(rank=rank, world_size=world_size, repeat=STEPS // 4)
    run = RunFolder(folder, runtime=runtime, resume=resume)
    store = CheckpointStore(run.checkpoints, identity=IDENTITY, runtime=runtime)
    if resume:
        windows.load_state_dict(store.restore(engine))
        run.forget_after(engine.step)
    objective = CausalLMObjective()
    asked = []

    def asking(model: Any, batch: Any) -> Any:
        outputs = objective(model, batch)
        if ask == ("train" if model.training else "evaluate", engine.step) and not asked:
            asked.append(os.kill(os.getpid(), number))
        return outputs

    engine.objective = asking
    train(
        engine,
        windows,
        total_steps=STEPS,
        config=LoopConfig(eval_every=5),
        evaluate=lambda: evaluate(engine.model, asking, ToyWindows().windows[0]),
        run=run,
        checkpoints=store,
    )
    return engine


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("signals") / "whole"
    return fingerprint(start(folder)), numbers(folder)


@pytest.mark.parametrize(
    ("ask", "number", "stopped_at"),
    [(("train", 3), signal.SIGTERM, 4), (("evaluate", 5), signal.SIGINT, 5), (("train", 11), signal.SIGTERM, 12)],
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Any, ask: tuple[str, int], number: int, stopped_at: int
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(RunStopped, match=f"after step {stopped_at}/12; the checkpoint is") as caught:
        start(tmp_path / "run", ask=ask, number=number)
    assert signal.getsignal(number) is before
    assert caught.value.exit_code == 128 + number
    assert caught.value.folder == tmp_path / "run"
    assert caught.value.checkpoint == tmp_path / "run" / "checkpoints" / f"step-{stopped_at:08d}"
    resumed = start(tmp_path / "run", resume=True)
    assert (fingerprint(resumed), numbers(tmp_path / "run")) == undisturbed


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="stopped by SIGTERM after step 0/12; nothing was saved") as caught:
        start(tmp_path / "run", ask=("evaluate", 0))
    assert caught.value.checkpoint is None
    assert not (tmp_path / "run" / "checkpoints").exists()


def on_ranks(rank: int, world_size: int, folder: str) -> Any:
    whole = fingerprint(start(Path(folder) / "whole", rank=rank, world_size=world_size))
    # One rank only gets the signal.
    ask = ("train", 6) if rank == 1 else None
    try:
        start(Path(folder) / "cut", rank=rank, world_size=world_size, ask=ask)
        stopped = None
    except RunStopped as stop:
        stopped = (stop.exit_code, str(stop.checkpoint))
    resumed = fingerprint(start(Path(folder) / "cut", rank=rank, world_size=world_size, resume=True))
    return whole, stopped, resumed


def test_a_signal_to_one_rank_stops_all_of_them_after_the_same_step(tmp_path: Path) -> None:
    for result in spawn_ranks(on_ranks, 2, str(tmp_path), timeout_s=240):
        whole, stopped, resumed = result.value
        assert stopped == (143, str(tmp_path / "cut" / "checkpoints" / "step-00000007"))
        assert resumed == whole


def test_a_second_interrupt_ends_at_once_but_not_the_echo_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 100.5, 105.0])
    monkeypatch.setattr("tokennorm.engine.signals.time.monotonic", lambda: next(clock))
    with StopRequest(device=torch.device("cpu")) as stop:
        assert stop.agreed() == 0
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("SIGINT: the run ends after this step") == 1


def test_ignored_signals_stay_ignored_and_a_forked_worker_dies_of_its_own() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest(device=torch.device("cpu")) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() == 0
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
        assert stop.agreed() == 0
