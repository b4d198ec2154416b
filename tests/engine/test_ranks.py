"""Several ranks: the same weights as one, one reduction per window, and a failure that ends all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.engine.toy import ToyLM, ToyWindows, build_engine, dummy, micro_batch, weights
from tokennorm.engine import Runtime, check_ranks_agree, distributed_session, set_gradient_sync, wrap_ddp
from tokennorm.engine.distributed import all_ranks_or_none
from tokennorm.errors import DistributedError, EmptyWindowError
from tokennorm.testing import spawn_ranks


def run_windows(rank: int = 0, world_size: int = 1) -> tuple[list[float], list[int], list[float]]:
    model = wrap_ddp(ToyLM(router=0.4), Runtime(rank=rank, local_rank=rank, world_size=world_size))
    engine = build_engine(model, dp_world_size=world_size)
    reports = [engine.train_step(window) for window in ToyWindows(rank=rank, world_size=world_size)]
    inner = model.module if world_size > 1 else model
    return [r.loss or 0.0 for r in reports], [int(r.effective_tokens) for r in reports], weights(inner).tolist()


def count_reductions(rank: int, world_size: int) -> dict[str, int]:
    """Gradient reductions and other collectives of one window of four micro-batches."""
    counts = {"gradients": 0, "other": 0, "late": 0}
    kind = "gradients"

    def hook(state, bucket):  # without annotations: DDP compares them, and strings are not types
        counts[kind] += 1
        return allreduce_hook(dist.group.WORLD, bucket)

    all_reduce = dist.all_reduce

    def spy(*args: Any, **kwargs: Any) -> Any:
        counts["other"] += 1
        return all_reduce(*args, **kwargs)

    model = wrap_ddp(ToyLM(), Runtime(rank=rank, local_rank=rank, world_size=world_size))
    model.register_comm_hook(None, hook)
    engine = build_engine(model, dp_world_size=world_size)
    window = [micro_batch(3, 8, 10 * rank + index) for index in range(4)]
    with unittest.mock.patch.object(dist, "all_reduce", spy):
        engine.train_step(window)
    counts["other"] -= counts["gradients"]  # the hook's own went through it too
    # The planted mistake: the sync state set around backward only, after the forward has been prepared.
    kind = "late"
    set_gradient_sync(model, True)
    for batch in window:
        outputs = engine.forward_step(batch)
        set_gradient_sync(model, False)
        outputs.loss_sum.backward()
        set_gradient_sync(model, True)
    return counts


def empty_then_full(rank: int, world_size: int) -> Any:
    """All ranks skip an empty window together, and train on one that is empty on one rank only."""
    from tokennorm.kit import TokenNormedLossKit

    model = wrap_ddp(ToyLM(), Runtime(rank=rank, local_rank=rank, world_size=world_size))
    kit = TokenNormedLossKit(device="cpu", dp_world_size=world_size, empty_window="skip")
    engine = build_engine(model, dp_world_size=world_size, token_loss_kit=kit)
    before = weights(model.module)
    skipped = engine.train_step([micro_batch(0, 5, rank)])
    unmoved = torch.equal(weights(model.module), before)
    report = engine.train_step([micro_batch(6, 9, 1) if rank == 0 else dummy()])
    try:
        build_engine(model, dp_world_size=world_size).train_step([micro_batch(0, 5, rank)])
        raised = False
    except EmptyWindowError:
        raised = True
    final = weights(model.module).tolist()
    return skipped.skipped, unmoved, report.skipped, report.effective_tokens, raised, final


def disagree(rank: int, world_size: int) -> tuple[str, str]:
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    check_ranks_agree({"windows": 7}, runtime)
    messages = []
    for action in (
        lambda: check_ranks_agree({"windows": 7, "data": f"v{rank}"}, runtime),
        lambda: all_ranks_or_none(lambda: 1 // (1 - rank), runtime),
    ):
        try:
            action()
        except (DistributedError, ZeroDivisionError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages[0], messages[1]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """One spawn for all checks: starting processes is what costs."""
    return {
        "run": run_windows(rank, world_size),
        "counts": count_reductions(rank, world_size),
        "empty": empty_then_full(rank, world_size),
        "disagree": disagree(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return [result.value for result in spawn_ranks(everything, 2)]


def test_two_ranks_train_the_same_weights_as_one(two_ranks: list[dict[str, Any]]) -> None:
    losses, tokens, final = run_windows()
    assert (weights(ToyLM(router=0.4)) - torch.tensor(final)).norm() > 0.1
    for result in two_ranks:
        assert result["run"][1] == tokens
        assert result["run"][0] == pytest.approx(losses, rel=1e-12)
        assert result["run"][2] == pytest.approx(final, rel=1e-9, abs=1e-11)


def test_one_gradient_reduction_and_one_message_per_window(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["counts"] == {"gradients": 1, "other": 1, "late": 4}


def test_ranks_skip_together_and_an_empty_rank_takes_part(two_ranks: list[dict[str, Any]]) -> None:
    one = build_engine()
    one.train_step([micro_batch(6, 9, 1)])
    for skipped, unmoved, trained, tokens, raised, final in (result["empty"] for result in two_ranks):
        assert (skipped, unmoved, trained, tokens, raised) == ("empty window", True, None, 6, True)
        assert final == pytest.approx(weights(one.model).tolist(), rel=1e-9, abs=1e-11)


def test_what_ranks_disagree_about_is_named_on_each(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert "disagree about data: rank 0 has 'v0', rank 1 has 'v1'" in result["disagree"][0]
    assert "rank 1 of 2 failed: integer division or modulo by zero" in two_ranks[0]["disagree"][1].replace(
        "R", "r"
    )
    assert two_ranks[1]["disagree"][1].startswith("ZeroDivisionError")


def test_alone_there_is_no_group_and_nothing_to_leave() -> None:
    with distributed_session() as runtime:
        assert runtime == Runtime(device=runtime.device)
        assert not dist.is_initialized()


FAILING_SCRIPT = """
import os
import sys
sys.path.insert(0, {root!r})
from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tokennorm.engine import DistributedConfig, distributed_session, wrap_ddp

with distributed_session(DistributedConfig(device="cpu")) as runtime:
    engine = build_engine(wrap_ddp(ToyLM(), runtime), dp_world_size=runtime.world_size)
    objective = engine.objective
    calls = []

    def failing(model, batch):
        calls.append(batch)
        if runtime.rank == 1 and len(calls) == 4:
            raise ValueError("planted in the middle of a window")
        return objective(model, batch)

    engine.objective = failing
    for window in ToyWindows(rank=runtime.rank, world_size=runtime.world_size, repeat=100):
        engine.train_step(window)
        # One write: print's own goes out in pieces, and another rank's may come between them.
        os.write(1, f"rank {{runtime.rank}} finished {{engine.step}}\\n".encode())
"""


def test_a_rank_that_raises_ends_all_ranks_with_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING_SCRIPT.format(root=str(Path(__file__).resolve().parents[2])))
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script)]
    # The limit is the assertion: without an abort the other rank waits ten minutes.
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "rank 0 finished 1\n" in done.stdout
    assert "finished 3" not in done.stdout
    assert "ValueError: planted in the middle of a window" in done.stderr
    assert "(raised on rank 1 of 2)" in done.stderr
    assert 'raise ValueError("planted' in done.stderr, "the traceback shows the line"
