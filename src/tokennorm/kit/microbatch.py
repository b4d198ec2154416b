"""One micro-batch as the kit takes it, validated before anything is added to the window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.errors import KitUsageError
from tokennorm.kit.counts import LARGEST_EXACT_COUNT, Count, is_integral, read_count
from tokennorm.kit.window import Slot
from tokennorm.loss.terms import LossTerm

__all__ = ["MicroBatch", "outside_count_range", "read_microbatch"]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sums and counts of one micro-batch.

    Attributes:
        loss_sum: 0-d, float32 or float64, with graph.
        effective: supervised tokens, or a sum of token weights.
        total: tokens that are not padding.
        terms: extra terms; numerators 0-d, float32 or float64, with graph.
    """

    loss_sum: Tensor
    effective: Count
    total: Count
    terms: dict[str, LossTerm]

    def device_checks(self) -> Iterator[tuple[Slot, Tensor]]:
        """Checks of counts that only the device knows: (flag, 0-d boolean tensor), no synchronisation."""
        for value in (self.effective, self.total, *(term.denominator for term in self.terms.values())):
            if isinstance(value, Tensor):
                yield Slot.BAD_COUNT, outside_count_range(value)
        if is_integral(self.effective) and is_integral(self.total):
            above = self.effective > self.total
            if isinstance(above, Tensor):
                yield Slot.EFFECTIVE_ABOVE_TOTAL, above

    def weighted_sum(self) -> Tensor:
        """``loss_sum + sum of weight * numerator``, with graph."""
        total = self.loss_sum
        for term in self.terms.values():
            total = total + (term.weight * term.numerator).to(total.device)
        return total


def outside_count_range(value: Tensor) -> Tensor:
    """0-d boolean: negative, NaN, infinite or above 2**53."""
    return ~((value >= 0) & (value <= LARGEST_EXACT_COUNT))


def read_microbatch(
    *,
    loss_sum: Tensor,
    effective_tokens: Count,
    total_tokens: Count,
    extra_terms: Mapping[str, LossTerm] | None,
    device: torch.device,
) -> MicroBatch:
    """Validate the arguments of ``accumulate_microbatch``.

    Raises:
        KitUsageError: see there.
    """
    _check_loss(loss_sum, "loss_sum", device)
    effective = read_count(effective_tokens, "effective_tokens", device)
    total = read_count(total_tokens, "total_tokens", device)
    if isinstance(effective, int) and not isinstance(total, Tensor) and effective > total:
        raise KitUsageError(
            f"effective_tokens is {effective}, above total_tokens {total}",
            why="supervised tokens are some of the tokens that are not padding.",
            fix="count both from the same micro-batch; pass a sum of token weights as a float, not as an int.",
        )
    terms: dict[str, LossTerm] = {}
    # Sorted, so that the order in which a loop builds its dict can't differ between ranks.
    for name, term in sorted((extra_terms or {}).items()):
        if name == "loss":
            raise KitUsageError('an extra term is named "loss"', fix='"loss" is loss_sum itself: rename the term.')
        # A term over no token may be a constant 0: some losses have no value there, and nothing is lost.
        needs_graph = term.weight != 0 and not (
            isinstance(term.denominator, int | float) and term.denominator == 0
        )
        _check_loss(term.numerator, f"the numerator of the extra term {name!r}", device, needs_graph=needs_graph)
        terms[name] = LossTerm(
            numerator=_at_least_float32(term.numerator),
            denominator=read_count(term.denominator, f"the denominator of the extra term {name!r}", device),
            weight=term.weight,
        )
    return MicroBatch(loss_sum=_at_least_float32(loss_sum), effective=effective, total=total, terms=terms)


def _check_loss(value: object, name: str, device: torch.device, *, needs_graph: bool = True) -> None:
    if not isinstance(value, Tensor):
        raise KitUsageError(f"{name} is a {type(value).__name__}, not a tensor", fix='pass outputs["loss"].sum().')
    if value.dim() != 0 or not value.is_floating_point():
        raise KitUsageError(
            f"{name} has shape {list(value.shape)} and dtype {value.dtype}, not one floating-point number",
            why="a window adds up sums; the mean is taken once, over all ranks and micro-batches.",
            fix='pass the sum of the per-token losses: outputs["loss"].sum().',
        )
    if needs_graph and torch.is_grad_enabled() and not value.requires_grad:
        raise KitUsageError(
            f"{name} has no graph although gradients are enabled",
            why="backward would give this micro-batch's tokens no gradient, while they are counted.",
            fix="pass the sum before .detach() or .item(); an empty micro-batch runs through the whole model too. "
            "To count without training, call under torch.no_grad().",
        )
    if value.device.type != device.type:
        raise KitUsageError(
            f"{name} is on {value.device}, the kit on {device}",
            why="every micro-batch would wait for a copy between the two.",
            fix="build the kit with the device of the loss.",
        )


def _at_least_float32(value: Tensor) -> Tensor:
    """A half-precision sum is widened before it is divided (exact, and autograd casts the gradient back)."""
    return value if value.dtype.itemsize >= 4 else value.to(torch.float32)
