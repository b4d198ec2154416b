"""Sequential temperature scaling: one temperature per proposal, for the servers' confidence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.calibration.metrics import DEFAULT_BINS, bin_sums
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.formats.files import partial_path
from tokennorm.errors import ConfigError

__all__ = ["fit_sts", "read_sts", "write_sts"]

_KEY = "sts_temperatures"
# Refinements of the search: each looks between the neighbours of the best so far.
_REFINEMENTS = 3
_REFINED_POINTS = 21


@torch.no_grad()
def fit_sts(
    outcomes: PrefixOutcomes,
    *,
    bounds: tuple[float, float] = (0.1, 10.0),
    grid: int = 81,
    num_bins: int = DEFAULT_BINS,
    noise: float = 0.5,
) -> list[float]:
    """Fit a temperature for each proposal, from left to right.

    ``T_k`` minimises the ECE of ``prod_{j<=k} sigmoid(c_j / T_j)`` over the rounds that observed proposal ``k``,
    with the temperatures before it fixed. Source: the DSpark paper, arXiv 2607.05147. The search is a logarithmic
    grid, with 1 always tried, and three finer grids around its best point; the same numbers always give the same
    temperatures.

    Ours beyond the paper: the ECE jumps where estimates change bins, so on few rounds its smallest value is partly
    luck. All temperatures whose ECE is within ``noise`` times the smallest one's
    :attr:`~tokennorm.draft.calibration.metrics.CalibrationMetrics.ece_floor` count as equally good, and the Brier
    score decides among them (then the distance to 1). ``noise=0`` is the paper's rule.

    Args:
        outcomes: of the decoding, at the sampling temperature of the service, without a schedule: a schedule
            verifies only confident prefixes, and the fit would know no others.
        bounds: smallest and largest temperature.
        grid: points of the first grid.
        num_bins: of the ECE.
        noise: see above.

    Returns:
        ``P`` temperatures; 1.0 where nothing was observed, or only survivors, or only rejections.

    Raises:
        ConfigError: bounds that don't hold 1, fewer than 3 points or one bin, or negative noise.
    """
    low, high = bounds
    if not 0 < low <= 1 <= high < math.inf or grid < 3 or num_bins < 1 or not 0 <= noise < math.inf:
        raise ConfigError(
            f"bounds {bounds}, {grid} grid points, {num_bins} bins, noise {noise}",
            fix="give positive bounds around 1, at least 3 points, at least one bin and noise from 0 on.",
        )
    # Unobserved places stand behind the observed ones of their round, so they enter no product that is read.
    logits = outcomes.confidence
    survival = torch.ones(len(logits), dtype=torch.float64)
    temperatures: list[float] = []
    for k in range(outcomes.num_proposals):
        rows = outcomes.observed[:, k]
        best = 1.0
        if len(outcomes.survived[rows, k].unique()) == 2:
            survived = outcomes.survived[rows, k].to(torch.float64)
            column = _Column(survival[rows], logits[rows, k], survived, num_bins)
            best = _search(column, math.log(low), math.log(high), grid, noise)
        temperatures.append(best)
        survival = survival * (logits[:, k] / best).sigmoid()
    return temperatures


@dataclass(frozen=True)
class _Column:
    """One proposal of ``n`` rounds: survival of the prefix before it, its logit, and whether it survived."""

    before: Tensor
    logits: Tensor
    survived: Tensor
    num_bins: int

    def judge(self, logarithm: float) -> tuple[float, float, float]:
        """ECE, its floor, and the Brier score at a temperature."""
        predicted = self.before * (self.logits / math.exp(logarithm)).sigmoid()
        values = torch.stack((predicted - self.survived, predicted * (1 - predicted)))
        difference, variance = bin_sums(predicted.expand_as(values), values, self.num_bins)
        floor = (2 / math.pi * variance).sqrt().sum()
        brier = (predicted - self.survived).square().mean()
        return float(difference.abs().sum()) / len(predicted), float(floor) / len(predicted), float(brier)


def _search(column: _Column, low: float, high: float, grid: int, noise: float) -> float:
    """Return the best temperature; ``low`` and ``high`` are logarithms."""
    judged: dict[float, tuple[float, float, float]] = {0.0: column.judge(0.0)}
    bottom, top, best = low, high, 0.0
    for points in (grid, *[_REFINED_POINTS] * _REFINEMENTS):
        candidates = torch.linspace(bottom, top, points, dtype=torch.float64).tolist()
        judged |= {candidate: column.judge(candidate) for candidate in candidates}
        least, floor, _ = min(judged.values())
        allowed = least + noise * floor
        good = {x: brier for x, (error, _, brier) in judged.items() if error <= allowed}
        _, _, best = min((brier, abs(x), x) for x, brier in good.items())
        step = (top - bottom) / (points - 1)
        bottom, top = max(low, best - step), min(high, best + step)
    return math.exp(best)


def write_sts(path: str | Path, temperatures: Sequence[float], extra: Mapping[str, Any] | None = None) -> None:
    """Write the file that servers read: JSON with ``sts_temperatures``; they use ``sigmoid(logit / T)``.

    The file appears complete or not at all.

    Args:
        path: of the file; one that exists is replaced.
        temperatures: one for each proposal.
        extra: further keys, such as the report before and after.

    Raises:
        ConfigError: a temperature that is not positive and finite, a key twice, values that are no JSON, or a file
            that can't be written.
    """
    target, extra = Path(path), dict(extra or {})
    values = _checked(list(temperatures), "the temperatures")
    if _KEY in extra:
        raise ConfigError(f"{_KEY!r} is among the extra keys of {target}", fix="give it as the temperatures only.")
    partial = partial_path(target)
    try:
        partial.write_text(json.dumps({_KEY: values} | extra, indent=2, allow_nan=False) + "\n")
        partial.replace(target)
    except (OSError, TypeError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{target} can't be written: {error}") from error


def read_sts(path: str | Path, *, num_proposals: int | None = None) -> list[float]:
    """Read the temperatures of a file that :func:`write_sts` wrote, or that has the same key.

    Raises:
        ConfigError: the file can't be read, is no JSON object, or its ``sts_temperatures`` are not positive finite
            numbers, ``num_proposals`` of them where that is given.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict) or _KEY not in content:
        raise ConfigError(f"{path} has no {_KEY!r}", fix="write it with write_sts.")
    values = _checked(content[_KEY], str(path))
    if num_proposals is not None and len(values) != num_proposals:
        raise ConfigError(
            f"{path} has {len(values)} temperatures, the drafter makes {num_proposals} proposals",
            why="each proposal has its own temperature",
            fix="fit them again with this drafter.",
        )
    return values


def _checked(values: Any, where: str) -> list[float]:
    def is_temperature(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf

    if not isinstance(values, list) or not values or not all(map(is_temperature, values)):
        raise ConfigError(
            f"{_KEY} of {where}: {values!r}",
            why="a logit is divided by its temperature",
            fix="give a list of positive, finite numbers, one for each proposal.",
        )
    return [float(value) for value in values]
