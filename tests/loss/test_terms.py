"""Terms and pairs: merged exactly, refused when they can't be right."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokennorm.errors import LossUsageError
from tokennorm.loss import LossTerm, RatioSum, merge_ratios, merge_terms, reduce_ratios
from tokennorm.testing import spawn_ranks


def test_merged_terms_are_one_ratio_and_not_a_mean_of_ratios() -> None:
    parts = [(6.0, 3), (10.0, 1), (0.0, 0)]
    leaves = [torch.tensor(num, requires_grad=True) for num, _ in parts]
    merged = merge_terms(
        LossTerm(numerator=leaf * 2, denominator=den, weight=0.5)
        for leaf, (_, den) in zip(leaves, parts, strict=True)
    )
    assert merged.denominator == 4
    assert isinstance(merged.denominator, int)
    assert merged.weight == 0.5
    assert (merged.numerator / merged.denominator).item() == 8.0
    merged.numerator.backward()
    assert [leaf.grad.item() for leaf in leaves] == [2.0, 2.0, 2.0]


def test_many_small_float32_parts_lose_nothing() -> None:
    part = LossTerm(numerator=torch.tensor(0.1), denominator=1)
    merged = merge_terms([part] * 20_000)
    assert merged.numerator.item() == pytest.approx(20_000 * torch.tensor(0.1).double().item(), rel=1e-12)


@given(st.lists(st.tuples(st.integers(-(2**20), 2**20), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_pairs_merge_in_any_grouping(parts: list[tuple[int, int]]) -> None:
    ratios = [{"loss": RatioSum(float(num), den)} for num, den in parts]
    cut = len(ratios) // 2
    whole = merge_ratios(ratios)["loss"]
    halves = merge_ratios([merge_ratios(ratios[:cut]), merge_ratios(ratios[cut:])])["loss"]
    assert (whole.num, whole.den) == (halves.num, halves.den)
    count = sum(den for _, den in parts)
    assert whole.den == count
    if count:
        assert whole.mean == pytest.approx(float(Fraction(sum(num for num, _ in parts), count)), rel=1e-12)
    else:
        assert whole.mean is None


def test_tensor_pairs_are_widened() -> None:
    total = RatioSum(torch.tensor(0.0), torch.tensor(0))
    for _ in range(1000):
        total = total + RatioSum(torch.tensor(0.1), torch.tensor(2**24 + 1))
    assert total.den == 1000 * (2**24 + 1)
    assert float(total.num) == pytest.approx(1000 * torch.tensor(0.1).double().item(), rel=1e-13)


@pytest.mark.parametrize(
    "bad",
    [
        {"numerator": torch.ones(2), "denominator": 1},
        {"numerator": 1.0, "denominator": 1},
        {"numerator": torch.tensor(1), "denominator": 1},
        {"numerator": torch.tensor(1.0), "denominator": -1},
        {"numerator": torch.tensor(1.0), "denominator": float("nan")},
        {"numerator": torch.tensor(1.0), "denominator": torch.ones(3)},
        {"numerator": torch.tensor(1.0), "denominator": torch.tensor(1.0, requires_grad=True)},
        {"numerator": torch.tensor(1.0), "denominator": 1, "weight": float("inf")},
    ],
)
def test_terms_that_cannot_be_right(bad: dict) -> None:
    with pytest.raises(LossUsageError):
        LossTerm(**bad)


def test_different_weights_do_not_merge() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(LossUsageError, match="different weights"):
        merge_terms([LossTerm(numerator=one, denominator=1), LossTerm(numerator=one, denominator=1, weight=2.0)])
    with pytest.raises(LossUsageError, match="no loss term"):
        merge_terms([])


def test_a_metric_with_a_graph_is_refused() -> None:
    with pytest.raises(LossUsageError, match="detach"):
        RatioSum(torch.tensor(1.0, requires_grad=True), 1)


def test_reduce_without_ranks_is_the_identity() -> None:
    assert reduce_ratios({}) == {}
    reduced = reduce_ratios({"b": RatioSum(torch.tensor(3.0), 2), "a": RatioSum(0.0, 0)})
    assert reduced == {"a": RatioSum(0.0, 0.0), "b": RatioSum(3.0, 2.0)}
    assert reduced["a"].mean is None
    with pytest.raises(LossUsageError, match=r"2\*\*53"):
        reduce_ratios({"n": RatioSum(0.0, 2**53 + 1)})


def _reduce(rank: int, world_size: int) -> tuple[float, float, int]:
    calls = []
    original = torch.distributed.all_reduce

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        # Rank 0 has 1 token of loss 12, rank 1 has 11 of loss 0: the mean is 1, the mean of means 6.
        mine = RatioSum(12.0, 1) if rank == 0 else RatioSum(0.0, 11)
        reduced = reduce_ratios({"loss": mine, "big": RatioSum(1.0, 2**40 + rank)})
    finally:
        torch.distributed.all_reduce = original
    return reduced["loss"].mean, reduced["big"].den, len(calls)


def test_reduce_over_ranks_is_a_ratio_of_sums_in_one_message() -> None:
    for result in spawn_ranks(_reduce, 2):
        assert result.value == (1.0, float(2**41 + 1), 1)
