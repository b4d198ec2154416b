"""How well estimated probabilities agree with what happened: ECE, AUROC, Brier, reliability."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.errors import ConfigError

__all__ = [
    "DEFAULT_BINS",
    "CalibrationMetrics",
    "CalibrationReport",
    "bin_sums",
    "calibration_metrics",
    "calibration_report",
]

# An even number: 1/2, what a head says that knows nothing, is an edge and not the middle of a bin that hides both
# sides.
DEFAULT_BINS = 10


@dataclass(frozen=True, kw_only=True)
class CalibrationMetrics:
    """Agreement of ``n`` estimates ``p`` with their events ``y`` (0 or 1).

    The tuples and ``num_brier`` are sums: those of several ranks add up, and ``ece`` and ``brier`` are formed from
    the totals. AUROC alone does not add up: pairs across two ranks would be missing, so gather the rounds for it.

    Attributes:
        bin_count: estimates in each of ``B`` bins of equal width; bin ``b`` is ``b/B <= p < (b+1)/B``, the last
            one includes 1.
        bin_predicted_sum: sum of the estimates in each bin.
        bin_happened_sum: events that happened in each bin.
        bin_variance_sum: sum of ``p (1 - p)`` in each bin.
        num_brier: sum of ``(p - y)^2``.
        num_auroc: pairs of an event that happened and one that didn't where the former has the larger estimate; a
            tie counts one half.
        den_auroc: all such pairs.
    """

    bin_count: tuple[int, ...]
    bin_predicted_sum: tuple[float, ...]
    bin_happened_sum: tuple[int, ...]
    bin_variance_sum: tuple[float, ...]
    num_brier: float
    num_auroc: float
    den_auroc: int

    @property
    def count(self) -> int:
        """Number of estimates ``n``."""
        return sum(self.bin_count)

    @property
    def happened(self) -> int:
        """How many of the events happened."""
        return sum(self.bin_happened_sum)

    @property
    def num_ece(self) -> float:
        """``sum_b |sum of p in b - events in b|``."""
        pairs = zip(self.bin_predicted_sum, self.bin_happened_sum, strict=True)
        return sum(abs(predicted - happened) for predicted, happened in pairs)

    @property
    def ece(self) -> float | None:
        """Expected calibration error ``sum_b n_b/n |mean p in b - frequency in b|``; None without estimates.

        Source: Guo et al. 2017, arXiv 1706.04599, eq. 5, here for a binary event and its own probability.
        """
        return self.num_ece / self.count if self.count else None

    @property
    def ece_floor(self) -> float | None:
        """About the ECE that perfectly calibrated estimates would show on so few events; None without any.

        ``sum_b sqrt(2/pi sum_{b} p (1 - p)) / n``: the mean of ``|events - sum of p|`` where that difference is
        normal with the variance of independent events. An ECE near it can't be told from 0.
        """
        if not self.count:
            return None
        return sum(math.sqrt(2 / math.pi * variance) for variance in self.bin_variance_sum) / self.count

    @property
    def brier(self) -> float | None:
        """Mean of ``(p - y)^2``; None without estimates. Source: Brier 1950."""
        return self.num_brier / self.count if self.count else None

    @property
    def auroc(self) -> float | None:
        """How often an event that happened has the larger estimate than one that didn't; None with one class only.

        0.5: the estimate doesn't rank them at all.
        """
        return self.num_auroc / self.den_auroc if self.den_auroc else None

    @property
    def mean_predicted(self) -> float | None:
        """Mean estimate; None without estimates."""
        return sum(self.bin_predicted_sum) / self.count if self.count else None

    @property
    def frequency(self) -> float | None:
        """Share of the events that happened; None without estimates."""
        return self.happened / self.count if self.count else None

    def reliability(self) -> list[tuple[float, float, int]]:
        """``(mean estimate, observed frequency, count)`` of every bin that is not empty."""
        bins = zip(self.bin_predicted_sum, self.bin_happened_sum, self.bin_count, strict=True)
        return [(predicted / count, happened / count, count) for predicted, happened, count in bins if count]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the metrics and the sums they are made of."""
        names = ("count", "happened", "mean_predicted", "frequency", "ece", "ece_floor", "brier", "auroc")
        sums = ("bin_count", "bin_predicted_sum", "bin_happened_sum", "bin_variance_sum")
        content: dict[str, Any] = {name: getattr(self, name) for name in names}
        content |= {name: list(getattr(self, name)) for name in sums}
        return content | {name: getattr(self, name) for name in ("num_brier", "num_auroc", "den_auroc")}


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """Calibration of a confidence head.

    Attributes:
        positions: of the survival of the prefix, for each proposal ``k``.
        overall: of all proposals' survival estimates together. Errors of opposite sign at two positions can cancel
            in a bin here, so look at the positions too.
        conditional: for each proposal, of the estimate ``sigmoid(c_k / T_k)`` for the token alone, among the
            rounds whose prefix before it survived.
    """

    positions: tuple[CalibrationMetrics, ...]
    overall: CalibrationMetrics
    conditional: tuple[CalibrationMetrics, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "overall": self.overall.to_dict(),
            "positions": [each.to_dict() for each in self.positions],
            "conditional": [each.to_dict() for each in self.conditional],
        }


def calibration_report(
    outcomes: PrefixOutcomes, temperatures: Iterable[float] | None = None, *, num_bins: int = DEFAULT_BINS
) -> CalibrationReport:
    """Compare the confidence head's estimates with what was accepted; observed places only.

    Args:
        outcomes: of the decoding.
        temperatures: one for each proposal, from :func:`~tokennorm.draft.calibration.sts.fit_sts`; 1 by default.
        num_bins: bins of equal width over [0, 1].

    Raises:
        ConfigError: fewer than one bin, or temperatures that don't fit the outcomes.
    """
    given = None if temperatures is None else list(temperatures)
    survival, acceptance = outcomes.survival(given), outcomes.acceptance(given)
    observed, survived = outcomes.observed, outcomes.survived
    # The prefix before the first proposal is empty and survives.
    reached = observed.clone()
    reached[:, 1:] &= survived[:, :-1]

    def column(values: Tensor, places: Tensor, k: int) -> CalibrationMetrics:
        rows = places[:, k]
        return calibration_metrics(values[rows, k], survived[rows, k], num_bins=num_bins)

    return CalibrationReport(
        positions=tuple(column(survival, observed, k) for k in range(outcomes.num_proposals)),
        overall=calibration_metrics(survival[observed], survived[observed], num_bins=num_bins),
        conditional=tuple(column(acceptance, reached, k) for k in range(outcomes.num_proposals)),
    )


@torch.no_grad()
def calibration_metrics(
    predicted: Tensor, happened: Tensor, *, num_bins: int = DEFAULT_BINS
) -> CalibrationMetrics:
    """Metrics of ``predicted`` (``[n]``, in [0, 1]) for the events ``happened`` (``[n]`` bool).

    Raises:
        ConfigError: fewer than one bin, shapes that differ, or an estimate outside [0, 1].
    """
    predicted = predicted.to(torch.float64)
    if num_bins < 1 or predicted.ndim != 1 or predicted.shape != happened.shape or happened.dtype != torch.bool:
        raise ConfigError(
            f"{num_bins} bins, estimates {list(predicted.shape)}, events {list(happened.shape)} {happened.dtype}",
            fix="give at least one bin, and estimates and bool events of the same length.",
        )
    if not ((predicted >= 0) & (predicted <= 1)).all():
        raise ConfigError("an estimate lies outside [0, 1] or is NaN", why="it is no probability")
    weights = (torch.ones_like(predicted), predicted, happened.to(torch.float64), predicted * (1 - predicted))
    count, predicted_sum, happened_sum, variance_sum = (
        tuple(bin_sums(predicted[None], weight[None], num_bins)[0].tolist()) for weight in weights
    )
    num_auroc, den_auroc = _ranked_pairs(predicted, happened)
    return CalibrationMetrics(
        bin_count=tuple(map(int, count)),
        bin_predicted_sum=predicted_sum,
        bin_happened_sum=tuple(map(int, happened_sum)),
        bin_variance_sum=variance_sum,
        num_brier=float((predicted - happened.to(torch.float64)).square().sum()),
        num_auroc=num_auroc,
        den_auroc=den_auroc,
    )


def bin_sums(predicted: Tensor, values: Tensor, num_bins: int) -> Tensor:
    """``[G, B]`` float64: for each row of ``predicted`` and ``values`` (``[G, n]``), the sum of values by bin."""
    index = (predicted * num_bins).long().clamp_(max=num_bins - 1)
    sums = torch.zeros(len(predicted), num_bins, dtype=torch.float64)
    return sums.scatter_add_(1, index, values)


def _ranked_pairs(predicted: Tensor, happened: Tensor) -> tuple[float, int]:
    """Pairs that the estimate ranks rightly, and all pairs: the rank statistic of Mann and Whitney."""
    positives = int(happened.sum())
    pairs = positives * (len(happened) - positives)
    if not pairs:
        return 0.0, 0
    _, inverse, counts = predicted.unique(return_inverse=True, return_counts=True)
    # Equal estimates share the mean of their ranks (from 1), which counts a tie as one half.
    last = counts.cumsum(0).to(torch.float64)
    ranks = last - (counts.to(torch.float64) - 1) / 2
    return float(ranks[inverse][happened].sum()) - positives * (positives + 1) / 2, pairs
