"""ECE, AUROC, Brier and reliability against their definitions, written out."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draft.calibrate_toy import known_outcomes, known_rounds
from tokennorm.draft.calibration.metrics import CalibrationMetrics, calibration_metrics, calibration_report
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.errors import ConfigError


def metrics(pairs: list[tuple[float, bool]], num_bins: int) -> CalibrationMetrics:
    predicted = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    return calibration_metrics(predicted, torch.tensor([y for _, y in pairs], dtype=torch.bool), num_bins=num_bins)


def naive_bins(pairs: list[tuple[float, bool]], num_bins: int) -> list[list[tuple[Fraction, int]]]:
    bins = []
    for b in range(num_bins):
        low, high = Fraction(b, num_bins), Fraction(b + 1, num_bins)
        last = b == num_bins - 1
        bins.append([(Fraction(p), int(y)) for p, y in pairs if low <= Fraction(p) < high or (last and p == 1)])
    return bins


def naive_ece(pairs: list[tuple[float, bool]], num_bins: int) -> Fraction:
    total = Fraction(0)
    for inside in filter(None, naive_bins(pairs, num_bins)):
        mean = sum(p for p, _ in inside) / len(inside)
        frequency = Fraction(sum(y for _, y in inside), len(inside))
        total += Fraction(len(inside), len(pairs)) * abs(mean - frequency)
    return total


def naive_auroc(pairs: list[tuple[float, bool]]) -> Fraction | None:
    won, count = Fraction(0), 0
    for p, _ in filter(lambda pair: pair[1], pairs):
        for q, _ in filter(lambda pair: not pair[1], pairs):
            won += Fraction(1) if p > q else Fraction(1, 2) if p == q else Fraction(0)
            count += 1
    return won / count if count else None


# Thirty-seconds: exact in binary, with many ties, and on edges of bins.
estimates = st.lists(st.tuples(st.integers(0, 32).map(lambda i: i / 32), st.booleans()), min_size=1, max_size=30)


@given(estimates, st.integers(1, 12))
@settings(max_examples=150, deadline=None)
def test_against_the_definitions(pairs: list[tuple[float, bool]], num_bins: int) -> None:
    found = metrics(pairs, num_bins)
    bins = naive_bins(pairs, num_bins)
    assert found.bin_count == tuple(map(len, bins))
    assert found.bin_happened_sum == tuple(sum(y for _, y in inside) for inside in bins)
    assert found.bin_predicted_sum == tuple(float(sum(p for p, _ in inside)) for inside in bins)
    assert found.ece == pytest.approx(float(naive_ece(pairs, num_bins)), abs=1e-14)
    assert found.brier == pytest.approx(
        float(sum((Fraction(p) - y) ** 2 for p, y in pairs) / len(pairs)), abs=1e-14
    )
    auroc = naive_auroc(pairs)
    assert found.auroc == (None if auroc is None else pytest.approx(float(auroc), abs=1e-14))
    means = [(float(sum(p for p, _ in b)) / len(b), sum(y for _, y in b) / len(b), len(b)) for b in bins if b]
    assert found.reliability() == means
    assert (found.count, found.happened) == (len(pairs), sum(y for _, y in pairs))
    assert found.mean_predicted == pytest.approx(sum(p for p, _ in pairs) / len(pairs))
    assert found.frequency == pytest.approx(sum(y for _, y in pairs) / len(pairs))


@given(estimates, estimates)
@settings(max_examples=40, deadline=None)
def test_sums_of_two_ranks_add_up(one: list[tuple[float, bool]], other: list[tuple[float, bool]]) -> None:
    parts, whole = (metrics(one, 5), metrics(other, 5)), metrics(one + other, 5)
    for name in ("bin_count", "bin_predicted_sum", "bin_happened_sum", "bin_variance_sum"):
        added = [a + b for a, b in zip(*(getattr(part, name) for part in parts), strict=True)]
        assert added == pytest.approx(getattr(whole, name), abs=1e-12), name
    assert parts[0].num_brier + parts[1].num_brier == pytest.approx(whole.num_brier, abs=1e-12)


def test_worked_values() -> None:
    # Bin [0.2, 0.4): mean 0.25, 1 of 2; bin [0.8, 1]: mean 0.95, 1 of 2. The pair 0.25, 0.25 is a tie.
    found = metrics([(0.25, True), (0.25, False), (0.9, True), (1.0, False)], 5)
    assert found.bin_count == (0, 2, 0, 0, 2)
    assert found.ece == pytest.approx(0.5 * 0.25 + 0.5 * 0.45)
    assert found.brier == pytest.approx((0.75**2 + 0.25**2 + 0.1**2 + 1) / 4)
    # 0.25 against 0.25: half, against 1: no; 0.9 against 0.25: yes, against 1: no.
    assert (found.num_auroc, found.den_auroc, found.auroc) == (1.5, 4, 0.375)


def test_without_estimates_and_with_one_class() -> None:
    nothing = metrics([], 4)
    assert nothing.count == 0
    assert {nothing.ece, nothing.ece_floor, nothing.brier, nothing.auroc, nothing.frequency} == {None}
    assert nothing.reliability() == []
    for happened in (True, False):
        single = metrics([(0.25, happened), (0.5, happened)], 4)
        assert single.auroc is None
        assert single.ece == pytest.approx(0.625 if happened else 0.375)


def test_the_floor_is_what_chance_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(300, generator=generator, dtype=torch.float64) ** 2
    draws = []
    for _ in range(150):
        happened = torch.rand(300, generator=generator, dtype=torch.float64) < predicted
        draws.append(calibration_metrics(predicted, happened))
    mean = sum(each.ece for each in draws) / len(draws)
    assert mean == pytest.approx(draws[0].ece_floor, rel=0.05)
    assert mean > 0.03


@pytest.mark.parametrize(
    ("predicted", "happened", "num_bins"),
    [
        (torch.tensor([0.5]), torch.tensor([True]), 0),
        (torch.tensor([1.5]), torch.tensor([True]), 2),
        (torch.tensor([-0.1]), torch.tensor([True]), 2),
        (torch.tensor([float("nan")]), torch.tensor([True]), 2),
        (torch.tensor([0.5, 0.5]), torch.tensor([True]), 2),
        (torch.tensor([0.5]), torch.tensor([1.0]), 2),
    ],
)
def test_what_is_refused(predicted: torch.Tensor, happened: torch.Tensor, num_bins: int) -> None:
    with pytest.raises(ConfigError):
        calibration_metrics(predicted, happened, num_bins=num_bins)


def test_report_takes_the_right_rounds() -> None:
    rounds = known_rounds(rounds=300, proposals=3, end=0.2, seed=1)
    temperatures = [0.5, 2.0, 3.0]
    report = calibration_report(PrefixOutcomes.of(rounds), temperatures, num_bins=7)
    pooled: list[tuple[float, bool]] = []
    for k in range(3):
        prefix, token = [], []
        for each in rounds:
            if each.ended and k >= each.accepted:
                continue
            logits = torch.tensor(each.confidence, dtype=torch.float64) / torch.tensor(temperatures).double()
            prefix.append((float(logits[: k + 1].sigmoid().prod()), each.accepted > k))
            if each.accepted >= k:
                token.append((float(logits[k].sigmoid()), each.accepted > k))
        pooled += prefix
        for found, pairs in ((report.positions[k], prefix), (report.conditional[k], token)):
            assert found.count == len(pairs)
            assert found.ece == pytest.approx(float(naive_ece(pairs, 7)), abs=1e-12)
            assert found.auroc == pytest.approx(float(naive_auroc(pairs)), abs=1e-12)
    assert report.overall.count == len(pooled)
    assert report.overall.ece == pytest.approx(float(naive_ece(pooled, 7)), abs=1e-12)
    assert report.overall.auroc == pytest.approx(float(naive_auroc(pooled)), abs=1e-12)


def test_report_as_json() -> None:
    report = calibration_report(known_outcomes(rounds=50, proposals=2), num_bins=4)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert len(content["positions"]) == len(content["conditional"]) == 2
    assert content["positions"][1]["ece"] == report.positions[1].ece
    assert content["overall"]["bin_count"] == list(report.overall.bin_count)
