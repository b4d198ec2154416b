"""A loss as a numerator and a denominator, and the exact merging of such pairs.

A mean of means weighs a token by the accident of which part it landed in. A pair does not: parts are merged
by adding numerators and denominators, and the division happens once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tokennorm.errors import LossUsageError

__all__ = ["LossTerm", "RatioSum", "merge_ratios", "merge_terms", "reduce_ratios"]

# Integers up to here are exact in float64, the dtype in which pairs travel.
_LARGEST_EXACT_COUNT = 2**53


@dataclass(frozen=True, kw_only=True)
class LossTerm:
    """One term of the objective on one micro-batch: ``weight * numerator / denominator``.

    Attributes:
        numerator: 0-d floating-point tensor, the *sum* of the term over the micro-batch, with graph.
        denominator: what that sum is counted in: a number of tokens, or a sum of token weights. A number or a
            0-d tensor, without graph.
        weight: the term's factor in the objective (alpha in ``docs/exactness.md``).

    Raises:
        LossUsageError: a numerator that is not a 0-d floating-point tensor, a denominator with a graph, negative
            or not finite, a weight that is not finite.
    """

    numerator: Tensor
    denominator: int | float | Tensor
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.numerator, Tensor) or self.numerator.dim() != 0:
            raise LossUsageError(
                f"the numerator of a loss term must be a 0-d tensor, not {_describe(self.numerator)}",
                fix="pass the sum over the micro-batch, e.g. `per_token_loss.sum()`.",
            )
        if not self.numerator.is_floating_point():
            raise LossUsageError(f"the numerator of a loss term has dtype {self.numerator.dtype}")
        if isinstance(self.denominator, Tensor):
            if self.denominator.dim() != 0 or self.denominator.requires_grad:
                raise LossUsageError(
                    f"the denominator of a loss term must be a number or a 0-d tensor without graph, not "
                    f"{_describe(self.denominator)}",
                    why="the count is a constant of the objective; a gradient through it is another loss.",
                    fix="detach it, or pass a Python number.",
                )
        elif not math.isfinite(self.denominator) or self.denominator < 0:
            raise LossUsageError(f"the denominator of a loss term is {self.denominator}, not a finite count >= 0")
        if not math.isfinite(self.weight):
            raise LossUsageError(f"the weight of a loss term is {self.weight}")


def merge_terms(terms: Iterable[LossTerm]) -> LossTerm:
    """Merge one term's parts from several micro-batches: numerators add, denominators add.

    Numerators keep their graph and are added in float64 where the device has it, so that the order and number
    of parts does not show. Integer denominators stay exact integers.

    Raises:
        LossUsageError: no parts, or parts with different weights (those are different terms).
    """
    parts = list(terms)
    if not parts:
        raise LossUsageError("there is no loss term to merge", why="an empty sum has no device and no dtype.")
    weights = {part.weight for part in parts}
    if len(weights) > 1:
        raise LossUsageError(
            f"the parts have different weights: {sorted(weights)}",
            why="the weight multiplies the merged ratio once, so all parts of one term share it.",
            fix="give terms with different weights different names, and merge each by itself.",
        )
    numerators = [part.numerator for part in parts]
    wide = torch.float32 if numerators[0].device.type == "mps" else torch.float64
    numerator = torch.stack([value.to(wide) for value in numerators]).sum()
    denominator: int | float | Tensor = parts[0].denominator
    for part in parts[1:]:
        denominator = denominator + part.denominator
    return LossTerm(numerator=numerator, denominator=denominator, weight=parts[0].weight)


@dataclass(frozen=True)
class RatioSum:
    """A detached metric as an exact pair ``(num, den)`` of Python numbers or 0-d tensors.

    ``a + b`` merges two parts of the same metric. Read ``mean`` last.
    """

    num: float | Tensor
    den: int | float | Tensor

    def __post_init__(self) -> None:
        for value in (self.num, self.den):
            if isinstance(value, Tensor) and (value.dim() != 0 or value.requires_grad):
                raise LossUsageError(
                    "a metric's numerator and denominator must be numbers or detached 0-d tensors, not "
                    f"{_describe(value)}",
                    why="a metric that keeps its graph keeps every activation of the micro-batch alive.",
                    fix="call .detach() on it.",
                )

    def __add__(self, other: RatioSum) -> RatioSum:
        """Merge two parts: numerators add, denominators add (tensors in float64)."""
        return RatioSum(_widen(self.num) + _widen(other.num), _widen(self.den) + _widen(other.den))

    @property
    def mean(self) -> float | None:
        """``num / den`` as a Python float (a host sync for tensors); None when nothing was counted."""
        den = float(self.den)
        return float(self.num) / den if den != 0 else None


def merge_ratios(parts: Iterable[Mapping[str, RatioSum]]) -> dict[str, RatioSum]:
    """Merge metrics by name: for each name, numerators add and denominators add."""
    merged: dict[str, RatioSum] = {}
    for part in parts:
        for name, ratio in part.items():
            merged[name] = merged[name] + ratio if name in merged else ratio
    return merged


def reduce_ratios(
    ratios: Mapping[str, RatioSum],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
) -> dict[str, RatioSum]:
    """Sum every pair over the ranks of ``group`` in one float64 all-reduce.

    Args:
        ratios: name -> pair. Every rank passes the same names; a rank without data passes zeros.
        group: the ranks that hold different tokens. None is the default group; without an initialised
            ``torch.distributed`` nothing is communicated.
        device: where the message lives: the device of the group's backend (default: that of the first tensor
            among the pairs, else the CPU).

    Returns:
        name -> global pair, Python floats, the same on every rank.
    """
    names = sorted(ratios)
    if not names:
        return {}
    values = [value for name in names for value in (ratios[name].num, ratios[name].den)]
    if device is None:
        device = next((value.device for value in values if isinstance(value, Tensor)), torch.device("cpu"))
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGEST_EXACT_COUNT:
            raise LossUsageError(f"a count of {value} is not exact in float64 (limit 2**53)")
    message = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(message, group=group)
    flat = message.tolist()
    return {name: RatioSum(flat[2 * i], flat[2 * i + 1]) for i, name in enumerate(names)}


def _widen(value: float | Tensor) -> float | Tensor:
    """Running sums of losses are float64: 20,000 of them in float32 are off by 1e-6."""
    if isinstance(value, Tensor) and value.device.type != "mps":
        return value.to(torch.float64)
    return value


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}, dtype {value.dtype}, requires_grad={value.requires_grad}"
    return f"{type(value).__name__} {value!r}"
