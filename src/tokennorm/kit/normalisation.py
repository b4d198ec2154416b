"""The two ways to an exact mean over a window: rescale afterwards, or know the counts before."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from tokennorm.errors import KitUsageError
from tokennorm.kit.counts import Count, is_integral
from tokennorm.kit.microbatch import MicroBatch
from tokennorm.kit.window import Slot, WindowSums

__all__ = ["Counted", "Deferred", "next_default_divisor"]

# Sums of token weights are floats; the order of addition shows in their last digits.
_WEIGHT_SUM_TOLERANCE = 1e-6


def next_default_divisor(global_effective: Tensor, ranks: int, current: float | Tensor) -> float | Tensor:
    """The power of two at or just above the mean effective tokens of a rank, as a 0-d device tensor.

    Derived from the reduced count, so it is the same on every rank; computed on the device, so nobody waits:
    ``x / mantissa(x)`` is an exact power of two. ``current`` where the window was empty.
    """
    mean = global_effective / ranks
    power = mean / torch.frexp(mean).mantissa
    return torch.where(mean > 0, power, current)


class Deferred:
    """Backward on ``sum / divisor``, then one factor ``divisor * averaging_factor / tokens`` on all gradients."""

    mode = "deferred"

    def __init__(self, default_divisor: float | Tensor) -> None:
        self.divisor: float | Tensor = default_divisor
        self.given: float | None = None
        self._started = False

    def check(self, batch: MicroBatch, backward_divisor: float | None) -> None:
        """Everything the host can know, before anything is added.

        Raises:
            KitUsageError: the divisor is not positive and finite or has changed inside the window, or an extra
                term has another denominator than the effective tokens.
        """
        given = None if backward_divisor is None else _read_divisor(backward_divisor)
        if self._started and given != self.given:
            before, now = ("the kit's own" if value is None else value for value in (self.given, given))
            raise KitUsageError(
                f"backward_divisor changed inside a window: {before}, then {now}",
                why="gradients of micro-batches divided by different numbers add up to no mean of anything.",
                fix="choose one divisor per window (the same on every rank), or leave it to the kit.",
            )
        for name, term in batch.terms.items():
            values = (term.denominator, batch.effective)
            if not any(isinstance(value, Tensor) for value in values) and values[0] != values[1]:
                raise KitUsageError(
                    f"the extra term {name!r} has denominator {values[0]}, the micro-batch {values[1]} "
                    "effective tokens",
                    why="one rescale serves the whole window, so all its terms are means over the same count.",
                    fix="count the term in effective tokens, or announce the counts of the window: "
                    f'kit.begin_window({{"loss": ..., "{name}": ...}}).',
                )
        if given is not None:
            self.divisor, self.given = given, given
        self._started = True

    def loss(self, batch: MicroBatch, sums: WindowSums) -> Tensor:
        """The provisional loss of one micro-batch."""
        for term in batch.terms.values():
            differs = term.denominator != batch.effective
            if isinstance(differs, Tensor):
                sums.flag(Slot.DENOMINATOR_DIFFERS, differs)
        total = batch.weighted_sum()
        if isinstance(self.divisor, Tensor):
            return total / self.divisor.to(device=total.device, dtype=total.dtype, non_blocking=True)
        return total / self.divisor

    def close(self, sums: WindowSums) -> None:
        """What has to travel with the sums."""
        if self.given is not None:
            sums.agree(Slot.DIVISOR_AGREEMENT, self.given)

    def scale(self, message: Tensor, averaging_factor: float) -> Tensor:
        """0-d factor for every gradient; 0 for an empty window."""
        effective = message[Slot.EFFECTIVE]
        return torch.where(effective > 0, self.divisor * averaging_factor / effective, 0.0)


class Counted:
    """Backward on ``averaging_factor * sum_t weight_t * num_t / D_t``; no gradient is touched afterwards."""

    mode = "counted"
    divisor: float | Tensor = 1.0
    given: float | None = None

    def __init__(
        self, announced: Mapping[str, Count], totals: Mapping[str, Tensor], averaging_factor: float
    ) -> None:
        """``announced``: this rank's denominators; ``totals``: those of all ranks, 0-d float64."""
        self._announced = announced
        self._remaining: dict[str, Count] = dict(announced)
        # Without supervised tokens there is no step, hence nothing to learn from the other terms either.
        effective = totals["loss"]
        self._coefficients = {
            name: torch.where((total > 0) & (effective > 0), averaging_factor / total, 0.0)
            for name, total in totals.items()
        }

    def check(self, batch: MicroBatch, backward_divisor: float | None) -> None:
        """Raises KitUsageError for a divisor (there is none) or a term that was not announced."""
        if backward_divisor is not None:
            raise KitUsageError(
                f"backward_divisor={backward_divisor} in a counted window",
                why="begin_window already gave the counts, so the loss is divided by the right number at once.",
                fix="leave backward_divisor out.",
            )
        unknown = sorted(batch.terms.keys() - self._announced.keys())
        if unknown:
            raise KitUsageError(
                f"extra terms {unknown} were not announced; begin_window got {sorted(self._announced)}",
                fix="announce the window's denominator of every term, on every rank.",
            )

    def loss(self, batch: MicroBatch, sums: WindowSums) -> Tensor:  # noqa: ARG002
        """The exact loss of one micro-batch (there is nothing to add to ``sums``)."""
        self._take("loss", batch.effective)
        total = batch.loss_sum * self._coefficient("loss", batch.loss_sum)
        for name, term in batch.terms.items():
            self._take(name, term.denominator)
            part = term.weight * term.numerator * self._coefficient(name, term.numerator)
            total = total + part.to(total.device)
        return total

    def close(self, sums: WindowSums) -> None:
        """Flag, for all ranks to see, that this one accumulated something else than it announced."""
        for name, announced in self._announced.items():
            remaining = self._remaining[name]
            exact = is_integral(remaining)
            sums.flag(
                Slot.ANNOUNCED_DIFFERS,
                remaining != 0 if exact else abs(remaining) > _WEIGHT_SUM_TOLERANCE * announced,
            )

    def scale(self, message: Tensor, averaging_factor: float) -> Tensor:  # noqa: ARG002
        """1; 0 for an empty window (whose gradients are zero anyway)."""
        return (message[Slot.EFFECTIVE] > 0).to(message.dtype)

    def _coefficient(self, name: str, like: Tensor) -> Tensor:
        return self._coefficients[name].to(device=like.device, dtype=like.dtype, non_blocking=True)

    def _take(self, name: str, count: Count) -> None:
        self._remaining[name] = self._remaining[name] - count


def _read_divisor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise KitUsageError(
            f"backward_divisor is {value!r}, not a positive finite number",
            why="it only keeps gradients in range until the counts are known, so any fixed number will do.",
            fix="leave it out: the kit takes a power of two near a rank's tokens per window.",
        )
    return float(value)
