"""The window in progress: what has been added to it, and what has been done with it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from tokennorm.errors import KitUsageError, TokenNormError
from tokennorm.kit.counts import Count, is_integral
from tokennorm.kit.microbatch import MicroBatch, outside_count_range
from tokennorm.kit.normalisation import Counted, Deferred
from tokennorm.kit.stats import TokenLossStats
from tokennorm.kit.window import Slot, TermSlot, WindowSums

__all__ = ["CALL_ORDER", "OpenWindow"]

CALL_ORDER = "accumulate_microbatch (each micro-batch) -> reduce_window -> rescale_gradients -> step -> reset."


class OpenWindow:
    """State between two resets; see ``TokenNormedLossKit`` for what the calls mean.

    Args:
        device: where the sums live (float64).
        declared: names of the extra terms, or None to take what comes.
        default_divisor: the kit's own provisional divisor for this window.
    """

    def __init__(
        self, device: torch.device, declared: tuple[str, ...] | None, default_divisor: float | Tensor
    ) -> None:
        # A window opened inside inference mode (after an evaluation) has to serve training too.
        with torch.inference_mode(False):
            self.sums = WindowSums(device)
        for name in declared or ():
            self.sums.term_slot(name)
        self.normalisation: Deferred | Counted = Deferred(default_divisor)
        self.weighted = False
        self.started = False
        self.stats: TokenLossStats | None = None
        # The guard refused the latest micro-batch: what comes next must be its dummy.
        self.owes_dummy = False
        # It has refused supervised tokens of this window, on all ranks together.
        self.lost_tokens = False
        self._device = device
        self._declared = declared
        self._weights: dict[str, float] = {}
        self._has_graph = False
        self._rescaled = False
        # Holds the parameters, so that an id can't be reused by another one inside the window.
        self._scaled: dict[int, Tensor] = {}

    def check_names(self, names: Collection[str]) -> None:
        """Raises KitUsageError for an extra term that was not declared."""
        unknown = [] if self._declared is None else sorted(set(names) - set(self._declared))
        if unknown:
            raise KitUsageError(
                f"extra terms {unknown} were not declared; the kit was built with extra_terms={self._declared}",
                why="the ranks agree beforehand on what their message holds.",
                fix="add the names to extra_terms= where the kit is built, on every rank.",
            )

    def accumulate(self, batch: MicroBatch, backward_divisor: float | None) -> Tensor:
        """Check and add one micro-batch; the loss for backward. Adds all of it, or raises and adds nothing."""
        if self.owes_dummy and not isinstance(batch.effective, Tensor) and batch.effective > 0:
            raise KitUsageError(
                f"a micro-batch of {batch.effective} supervised tokens was accumulated in place of one that the "
                "loss guard refused",
                why="the refused micro-batch's tokens would be in the count, or its NaN in the gradient.",
                fix="after guard_loss returned False, accumulate a dummy of 0 effective tokens, on all ranks.",
            )
        self.owes_dummy = False
        self.check_names(batch.terms)
        for name, term in batch.terms.items():
            if self._weights.get(name, term.weight) != term.weight:
                raise KitUsageError(
                    f"the weight of the extra term {name!r} changed inside a window: {self._weights[name]}, then "
                    f"{term.weight}",
                    why="the weight is one factor of the objective, the same for every token of the window.",
                    fix="change it between windows only.",
                )
        self.normalisation.check(batch, backward_divisor)
        loss = self.normalisation.loss(batch, self.sums)
        self.started = True
        self.weighted = self.weighted or not is_integral(batch.effective)
        self._has_graph = self._has_graph or loss.requires_grad
        self._add(batch)
        return loss

    def _add(self, batch: MicroBatch) -> None:
        sums = self.sums
        sums.add(Slot.LOSS_SUM, batch.loss_sum)
        sums.add(Slot.EFFECTIVE, batch.effective)
        sums.add(Slot.TOTAL, batch.total)
        for name, term in batch.terms.items():
            slot = sums.term_slot(name)
            sums.add(slot + TermSlot.NUM, term.numerator)
            sums.add(slot + TermSlot.DEN, term.denominator)
            if name not in self._weights:
                self._weights[name] = term.weight
                sums.agree(slot + TermSlot.WEIGHT_AGREEMENT, term.weight)
        for flag, offence in batch.device_checks():
            sums.flag(flag, offence)

    def announcement(self, announced: Mapping[str, Count]) -> WindowSums:
        """A counted window's denominators, in a message with the terms in the same slots as the window's."""
        message = WindowSums(self._device)
        message.add(Slot.EFFECTIVE, announced["loss"])
        # Each once: a term may be declared and announced.
        for name in dict.fromkeys((*self.sums.term_names, *sorted(announced.keys() - {"loss"}))):
            slot = self.sums.term_slot(name)
            assert message.term_slot(name) == slot
            message.add(slot + TermSlot.DEN, announced.get(name, 0))
        for count in announced.values():
            if isinstance(count, Tensor):
                message.flag(Slot.BAD_COUNT, outside_count_range(count))
        return message

    def unscaled(self, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """The given parameters that have a gradient not yet rescaled in this window, each once."""
        if isinstance(parameters, nn.Module):
            raise KitUsageError("rescale_gradients got a module", fix="pass its .parameters().")
        given = {id(p): p for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        if not given:
            raise KitUsageError(
                "rescale_gradients got no parameters",
                why="the gradients of the window would stay unscaled.",
                fix="pass model.parameters() itself; a generator that was used before is empty.",
            )
        having = {key: p for key, p in given.items() if p.grad is not None}
        fresh = {key: p for key, p in having.items() if key not in self._scaled}
        if having and not fresh:
            raise KitUsageError(
                f"all {len(having)} parameters with a gradient were already rescaled in this window",
                why="scaling twice multiplies every gradient by the factor again.",
                fix="rescale once per window and optimizer, and call reset() between windows.",
            )
        self._scaled.update(fresh)
        self._rescaled = True
        return list(fresh.values())

    def check_finished(self) -> None:
        """Raises KitUsageError when backward ran on provisional losses and nobody rescaled the gradients."""
        if not self._has_graph or self._rescaled or self._failed_or_empty():
            return
        missing = "reduce_window and rescale_gradients" if self.stats is None else "rescale_gradients"
        raise KitUsageError(
            f"reset was called on a window without {missing}",
            why="its gradients still carry the provisional divisor instead of the number of tokens.",
            fix=f"The order is {CALL_ORDER} To give a window up on purpose: reset(discard=True).",
        )

    def _failed_or_empty(self) -> bool:
        """Whether the window ended without a step: nothing had to be rescaled then."""
        if self.stats is None:
            return False
        try:
            return self.stats.is_empty
        except TokenNormError:
            return True
