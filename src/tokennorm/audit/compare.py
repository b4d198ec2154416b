"""By how much a window's gradient is off, and how much each token counted in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.audit.evidence import Evidence, expected_after_clipping

__all__ = ["SampleWeight", "WindowResult", "compare_window"]

# Above this the gradient is no weighting of the samples' gradients at all, and the solved weights mean nothing.
_MAX_SPAN_RESIDUAL = 0.1
# A parameter's error is relative to its own gradient, but to no less than this part of the whole.
_SMALLEST_SHARE = 1e-3


@dataclass(frozen=True, kw_only=True)
class SampleWeight:
    """How much the tokens of one sample counted, relative to their due (1)."""

    rank: int
    micro_batch: int
    sample: int
    segment: int
    tokens: float
    weight: float


@dataclass(frozen=True, kw_only=True)
class WindowResult:
    """The comparison of one window.

    Args:
        supervised_tokens: of the window (the sum of their weights).
        error: relative L2 error of all gradients before clipping, of the worst rank.
        error_after_clipping: the same of what the optimizer read, against the clipped reference.
        worst_parameter: its name, and ``worst_parameter_error``, relative to its own gradient.
        cosine: between the loop's gradient and the reference.
        factor: the scalar that best maps the reference to the loop's gradient.
        rank_disagreement: largest relative difference between the gradients of two ranks.
        weights: of each sample; empty if the gradient is no weighting of the samples at all.
        span_residual: relative part of the gradient that no weighting of the samples explains.
        logged_loss: what rank 0's step returned; right is ``reference_loss``, or ``reference_token_loss``, which
            leaves out the extras.
        logged_grad_norm: what rank 0's step returned, and ``reference_grad_norm`` (before clipping).
        logged_tokens: what rank 0's step returned.
    """

    supervised_tokens: float
    error: float
    error_after_clipping: float
    worst_parameter: str
    worst_parameter_error: float
    cosine: float
    factor: float
    rank_disagreement: float
    weights: tuple[SampleWeight, ...]
    span_residual: float
    reference_loss: float
    reference_token_loss: float
    reference_grad_norm: float
    logged_loss: float | None
    logged_grad_norm: float | None
    logged_tokens: float | None


def compare_window(evidence: Evidence, shapes: dict[str, tuple[int, ...]]) -> WindowResult:
    """Compare what the loop did in one window with the reference."""
    reference, observed = evidence.reference, evidence.observed
    errors = [relative(row, reference) for row in observed]
    worst_rank = max(range(len(errors)), key=lambda rank: (math.isnan(errors[rank]), errors[rank]))
    row = observed[worst_rank]
    expected = expected_after_clipping(reference, evidence.clip)
    name, parameter_error = _worst_parameter(row, reference, shapes)
    dot, square = float(row @ reference), float(reference @ reference)
    weights, residual = solve_weights(evidence)
    logged = evidence.logged[0]
    return WindowResult(
        supervised_tokens=evidence.due,
        error=errors[worst_rank],
        error_after_clipping=max(relative(r, expected) for r in evidence.optimizer_read),
        worst_parameter=name,
        worst_parameter_error=parameter_error,
        cosine=dot / (float(row.norm()) * math.sqrt(square)) if square and row.any() else math.nan,
        factor=dot / square if square else math.nan,
        rank_disagreement=evidence.disagreement,
        weights=weights,
        span_residual=residual,
        reference_loss=evidence.reference_loss,
        reference_token_loss=evidence.reference_token_loss,
        reference_grad_norm=math.sqrt(square),
        logged_loss=logged.get("loss"),
        logged_grad_norm=logged.get("grad_norm"),
        logged_tokens=logged.get("tokens"),
    )


def relative(value: Tensor, reference: Tensor) -> float:
    """``|value - reference| / |reference|``; where the reference is zero, the norm of the value itself."""
    norm = float(reference.norm())
    return float((value - reference).norm()) / (norm or 1.0)


def _worst_parameter(row: Tensor, reference: Tensor, shapes: dict[str, tuple[int, ...]]) -> tuple[str, float]:
    worst, largest, place = next(iter(shapes)), -1.0, 0
    floor = _SMALLEST_SHARE * float(reference.norm())
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        mine, due = row[place : place + size], reference[place : place + size]
        error = float((mine - due).norm()) / (max(float(due.norm()), floor) or 1.0)
        if error > largest or math.isnan(error):
            worst, largest = name, error
        place += size
    return worst, largest


def solve_weights(evidence: Evidence) -> tuple[tuple[SampleWeight, ...], float]:
    """The weights that the loop gave to the tokens of each sample, by least squares.

    The gradient is taken as ``sum_i c_i g_i`` over the samples' own gradients (and those of extras); a token of
    sample i then counted ``c_i D`` times its due.
    """
    if not evidence.finite or not evidence.groups:
        return (), math.nan
    columns = [evidence.gradients]
    columns += [extra.gradient[None] for rows in evidence.extras.values() for row in rows for extra in row]
    basis = torch.cat(columns)
    norms = basis.norm(dim=1).clamp_min(1e-300)
    observed = evidence.observed[0]
    solution = torch.linalg.lstsq((basis / norms[:, None]).T, observed[:, None], driver="gelsd").solution[:, 0]
    residual = relative((basis / norms[:, None]).T @ solution, observed) if observed.any() else 0.0
    if residual > _MAX_SPAN_RESIDUAL:
        return (), residual
    weights = (solution / norms)[: len(evidence.groups)] * evidence.due
    return tuple(
        SampleWeight(
            rank=group.rank,
            micro_batch=group.micro_batch,
            sample=group.sample,
            segment=group.segment,
            tokens=float(count),
            weight=float(weight),
        )
        for group, count, weight in zip(evidence.groups, evidence.counts, weights, strict=True)
    ), residual


def spread(results: Sequence[WindowResult]) -> tuple[float, float] | None:
    """Smallest and largest weight of any token in any window, or None if none could be solved."""
    weights = [w.weight for result in results for w in result.weights]
    return (min(weights), max(weights)) if weights else None
