"""A window of uneven micro-batches on 1, 2 and 4 ranks has the gradient of the mean over all its slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.draft.case import LOSS_OPTIONS
from tests.draft.window_toy import (
    ToyDrafter,
    gradients,
    micro,
    reference,
    relative_error,
    run_window,
    window,
)
from tokennorm.draft import compute_dspark_loss
from tokennorm.kit import TokenNormedLossKit
from tokennorm.testing import spawn_ranks

FLOOR = {torch.float64: 1e-13, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("counted", "separate"), [(False, False), (True, False), (False, True), (True, True)])
def test_one_process(dtype: torch.dtype, first: int, counted: bool, separate: bool) -> None:
    loss, expected = reference(window(first))
    kit, model = TokenNormedLossKit(device="cpu", dp_world_size=1), ToyDrafter(dtype)
    run_window(kit, model, window(first), counted=counted, separate=separate)
    stats = kit.reduce_window()
    kit.rescale_gradients(model.parameters(), stats)
    kit.reset()
    assert relative_error(gradients(model), expected) < FLOOR[dtype]
    weights = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
    means = {name: pair.mean for name, pair in stats.extra.items()}
    assert sum(weight * (means[name] or 0.0) for name, weight in weights.items()) == pytest.approx(loss, rel=1e-6)
    if not separate:
        assert stats.mean_loss == pytest.approx(loss, rel=1e-6)


def mean_of_ratios(model: ToyDrafter, first: int) -> None:
    for case in window(first):
        loss = compute_dspark_loss(outputs=model.output(case), **LOSS_OPTIONS)
        assert isinstance(loss, torch.Tensor)
        (loss / len(window(first))).backward()


def counted_in_slots(model: ToyDrafter, first: int) -> None:
    kit = TokenNormedLossKit(device="cpu", dp_world_size=1)
    for case in window(first):
        slots = int(case.plan().supervised.sum())
        kit.accumulate_microbatch(
            loss_sum=model.sums(case).loss_sum, effective_tokens=slots, total_tokens=slots
        ).backward()
    kit.rescale_gradients(model.parameters(), kit.reduce_window())


@pytest.mark.parametrize("fault", [mean_of_ratios, counted_in_slots])
def test_a_planted_mistake_is_seen(fault: Callable[[ToyDrafter, int], None]) -> None:
    model = ToyDrafter()
    fault(model, 0)
    assert relative_error(gradients(model), reference(window(0))[1]) > 1e-2


def one_rank(rank: int, world: int) -> dict[str, Any]:
    """All checks of one rank, so that processes are started once per world size."""
    found: dict[str, Any] = {}
    for first in (0, 1):
        # Rank r takes micro-batches r, r + world, ...; dummies make their number equal.
        cases = window(first)
        own = cases[rank::world]
        own += [micro(1, 0, first=first, empty=True)] * (-(-len(cases) // world) - len(own))
        for dtype in (torch.float64, torch.float32):
            kit, model = TokenNormedLossKit(device="cpu", dp_world_size=world), ToyDrafter(dtype)
            run_window(kit, model, own)
            for gradient in gradients(model):
                # What DDP does at the last micro-batch.
                dist.all_reduce(gradient)
                gradient /= world
            stats = kit.reduce_window()
            kit.rescale_gradients(model.parameters(), stats)
            kit.reset()
            found[f"{first} {dtype}"] = (stats.mean_loss, [g.tolist() for g in gradients(model)])
        found[f"{first} loss"] = _drop_in(rank, world, first)
    return found


def _drop_in(rank: int, world: int, first: int) -> dict[str, Any]:
    """compute_dspark_loss on one micro-batch per rank: its terms, gradients and number of all-reduces."""
    model, case = ToyDrafter(), window(first)[rank]
    calls: list[int] = []
    real = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, *args, **options)

    dist.all_reduce = counting
    try:
        result = compute_dspark_loss(
            outputs=model.output(case), process_group=dist.group.WORLD, return_terms=True, **LOSS_OPTIONS
        )
        with_group = list(calls)
        alone = compute_dspark_loss(outputs=model.output(case), **LOSS_OPTIONS)
    finally:
        dist.all_reduce = real
    assert isinstance(result, tuple)
    assert isinstance(alone, torch.Tensor)
    loss, terms = result
    loss.backward()
    total = [gradient.clone() for gradient in gradients(model)]
    for gradient in total:
        dist.all_reduce(gradient)
    return {
        "all_reduces": with_group,
        "without_group": len(calls) - len(with_group),
        "terms": {name: float(terms[name]) for name in ("loss", "ce_loss", "l1_loss", "confidence_loss")},
        "gradients": [gradient.tolist() for gradient in total],
        "alone": float(alone.detach()),
    }


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int) -> None:
    results = [result.value for result in spawn_ranks(one_rank, world)]
    for first in (0, 1):
        loss, expected = reference(window(first))
        for dtype, floor in FLOOR.items():
            for found in results:
                mean, values = found[f"{first} {dtype}"]
                assert mean == pytest.approx(loss, rel=1e-6)
                assert relative_error([torch.tensor(v, dtype=torch.float64) for v in values], expected) < floor

        cases = window(first)[:world]
        loss, expected = reference(cases)
        drop_in = [found[f"{first} loss"] for found in results]
        for found in drop_in:
            assert found["all_reduces"] == [3], "one all-reduce of the three denominators"
            assert found["without_group"] == 0
            values = [torch.tensor(value, dtype=torch.float64) for value in found["gradients"]]
            assert relative_error(values, expected) < 1e-13
        # Summed over the ranks, the logged scalars are the global means.
        assert sum(found["terms"]["loss"] for found in drop_in) == pytest.approx(loss, rel=1e-12)
        model = ToyDrafter()
        parts = [case.reference(model.leaves(case)) for case in cases]
        den = sum(part.den for part in parts)
        for name in ("ce", "l1", "confidence"):
            want = sum(float(part.nums[name].detach()) for part in parts) / den
            assert sum(found["terms"][f"{name}_loss"] for found in drop_in) == pytest.approx(want, rel=1e-12)
        own = [float(part.loss_sum().detach()) / part.den if part.den else 0.0 for part in parts]
        assert [found["alone"] for found in drop_in] == pytest.approx(own, rel=1e-12)
