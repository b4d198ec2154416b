"""A guarded engine on two ranks: DDP and a sharded model, the refusal of one rank's micro-batch on both."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.guard_toy import broken, error, guarded, reference_gradient, sound, toy
from tests.engine.toy import dummy, weights
from tokennorm.engine import Batch, RefusedFolder, Runtime, wrap_ddp
from tokennorm.testing import spawn_ranks

# (rank 0, rank 1) of each micro-batch index; rank 0 has run out of data at the last one.
PAIRS: list[tuple[Batch, Batch]] = [
    (sound(3, 9, 1), sound(20, 30, 2)),
    (sound(8, 9, 3), sound(1, 5, 4)),
    (sound(11, 14, 5), sound(2, 6, 6)),
    (dummy(), sound(6, 8, 7)),
]


def pairs_with(place: int, bad: Batch) -> list[tuple[Batch, Batch]]:
    """The window with ``bad`` on rank 1 at ``place``."""
    return [(zero, bad if index == place else one) for index, (zero, one) in enumerate(PAIRS)]


def without(place: int) -> list[Batch]:
    """What is left when an index is refused on both ranks."""
    return [batch for index, pair in enumerate(PAIRS) if index != place for batch in pair]


def ddp_gradients(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    # The last index is where DDP reduces; a spike needs a history, which a step of rate 0 gives.
    cases = {("nan", 0): broken(9, 12, 9), ("nan", 3): broken(9, 12, 9)}
    cases |= {
        ("spike", 1): {**sound(60, 62, 9), "factor": 40.0},
        ("spike", 3): {**sound(60, 62, 9), "factor": 40.0},
    }
    for (kind, place), bad in cases.items():
        model = toy()
        engine, kit = guarded(wrap_ddp(model, runtime), ranks=world_size, lr=0.0)
        engine.train_step([pair[rank] for pair in PAIRS])
        engine.optimizer.param_groups[0]["lr"] = 1.0
        before = weights(model)
        report = engine.train_step([pair[rank] for pair in pairs_with(place, bad)])
        (refused,) = report.refused
        assert kit.loss_guard is not None
        found[f"{kind} {place}"] = (
            before - weights(model),
            refused.index,
            refused.verdict.reason,
            refused.verdict.own_offence,
            report.effective_tokens,
            kit.loss_guard.state_dict(),
        )
    return found


def collectives(rank: int, world_size: int, guard: bool, window: list[tuple[Batch, Batch]]) -> int:
    """All-reduces of one window besides DDP's own."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    engine, _ = guarded(wrap_ddp(toy(), runtime), ranks=world_size, guard=guard)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
        engine.train_step([pair[rank] for pair in window])
    return spy.call_count


def sharded_gradient(rank: int, world_size: int) -> torch.Tensor:
    """The same with FSDP2, two units, reducing at the last micro-batch; NaN on rank 1 at the second."""
    model = toy()
    fully_shard(model.mix)
    fully_shard(model)
    engine, _ = guarded(model, ranks=world_size)
    before = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    engine.train_step([pair[rank] for pair in pairs_with(1, broken(9, 12, 9))])
    after = [p.full_tensor() for p in model.parameters() if isinstance(p, DTensor)]
    return torch.cat([(a - b).detach().flatten() for a, b in zip(before, after, strict=True)])


def emptied(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 has a NaN at every index, and the policy for empty windows is an error; then an ordinary window."""
    model = toy()
    engine, kit = guarded(wrap_ddp(model, Runtime(rank=rank, local_rank=rank, world_size=world_size)), ranks=2)
    before = weights(model)
    skipped = engine.train_step([(zero, broken(9, 12, 9))[rank] for zero, _ in PAIRS])
    kept = torch.equal(weights(model), before)
    trained = engine.train_step([pair[rank] for pair in PAIRS])
    assert kit.loss_guard is not None
    return {
        "reports": [(one.skipped, one.step, len(one.refused), one.effective_tokens) for one in (skipped, trained)],
        "kept": kept,
        "gradient": before - weights(model),
        "history": kit.loss_guard.state_dict(),
    }


def written(rank: int, world_size: int, folder: str) -> list[str]:
    """Files of a NaN on rank 1, seen by rank 1 after both have finished."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    files = RefusedFolder(Path(folder), runtime=runtime)
    engine, _ = guarded(wrap_ddp(toy(), runtime), ranks=world_size, on_refused=files)
    engine.train_step([pair[rank] for pair in pairs_with(2, broken(9, 12, 9))])
    dist.barrier()
    return sorted(os.listdir(folder))


def everything(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    nan = pairs_with(3, broken(9, 12, 9))
    return {
        "ddp": ddp_gradients(rank, world_size),
        "off": collectives(rank, world_size, False, PAIRS),
        "on": collectives(rank, world_size, True, PAIRS),
        "refusing": collectives(rank, world_size, True, nan),
        "sharded": sharded_gradient(rank, world_size),
        "emptied": emptied(rank, world_size),
        "written": written(rank, world_size, folder),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return [result.value for result in spawn_ranks(everything, 2, folder, timeout_s=100)]


@pytest.mark.parametrize("case", ["nan 0", "nan 3", "spike 1", "spike 3"])
def test_one_ranks_bad_micro_batch_leaves_both_ranks_with_the_gradient_of_the_rest(
    two_ranks: list[dict[str, Any]], case: str
) -> None:
    kind, place = case.split()[0], int(case.split()[1])
    left = without(place)
    for rank, found in enumerate(two_ranks):
        gradient, index, reason, own, tokens, _ = found["ddp"][case]
        assert (index, reason, own) == (place, "non-finite" if kind == "nan" else "spike", rank == 1)
        assert tokens == sum(batch["effective_tokens"] for batch in left)
        assert error(gradient, reference_gradient(left)) < 1e-12
        if place != 3:
            # Refused on the one rank only, the other's tokens would stay: another gradient, plainly.
            assert error(gradient, reference_gradient([*left, PAIRS[place][0]])) > 0.1
    assert two_ranks[0]["ddp"][case][-1] == two_ranks[1]["ddp"][case][-1], "histories stay equal"


def test_a_sharded_model_runs_the_dummy_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert error(found["sharded"], reference_gradient(without(1))) < 1e-12


def test_the_guard_costs_one_collective_per_micro_batch_and_none_when_off(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert (found["off"], found["on"], found["refusing"]) == (1, 5, 5)


def test_a_window_that_one_rank_empties_is_skipped_by_both(two_ranks: list[dict[str, Any]]) -> None:
    everyone = [batch for pair in PAIRS for batch in pair]
    tokens = sum(batch["effective_tokens"] for batch in everyone)
    for found in (one["emptied"] for one in two_ranks):
        assert found["reports"] == [("all refused", 0, len(PAIRS), 0), (None, 1, 0, tokens)]
        assert found["kept"]
        assert error(found["gradient"], reference_gradient(everyone)) < 1e-12
    assert two_ranks[0]["emptied"]["history"] == two_ranks[1]["emptied"]["history"]
    assert two_ranks[0]["emptied"]["history"]["refused_total"] == len(PAIRS)


def test_only_the_offending_rank_writes(two_ranks: list[dict[str, Any]]) -> None:
    for found in two_ranks:
        assert found["written"] == ["step-00000001-micro-002-rank-1.json"]
