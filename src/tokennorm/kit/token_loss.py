"""The accounting of one window: :class:`TokenNormedLossKit`.

A *window* is the micro-batches of one optimizer step on all ranks. The objective is

    L = sum_t  weight_t * ( sum over ranks and micro-batches of num_t ) / ( the same sum of den_t )

with the cross-entropy as the first term. ``docs/exactness.md`` derives what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokennorm.errors import KitUsageError
from tokennorm.kit.averaging import averaging_factor_or_default, measure_averaging
from tokennorm.kit.counts import Count, read_count, supports_float64
from tokennorm.kit.extra_loss import ExtraLossWatch
from tokennorm.kit.groups import counting_ranks
from tokennorm.kit.guard import PerTokenLossGuard
from tokennorm.kit.microbatch import read_microbatch
from tokennorm.kit.normalisation import Counted, next_default_divisor
from tokennorm.kit.open_window import CALL_ORDER, OpenWindow
from tokennorm.kit.patch import apply_chunked_token_loss_patch
from tokennorm.kit.rescale import scale_gradients
from tokennorm.kit.stats import EmptyWindow, TokenLossStats, WindowFacts
from tokennorm.kit.window import Slot, TermSlot, WindowSums
from tokennorm.loss.terms import LossTerm

__all__ = ["TokenNormedLossKit"]

ModelT = TypeVar("ModelT", bound=nn.Module)

# The provisional divisor of the first window: near a window's tokens on one rank, and a power of two.
_FIRST_DIVISOR = 1024.0


class TokenNormedLossKit:
    """Makes the gradient of a window that of the mean over all its supervised tokens, whatever the split.

    ::

        loss = kit.accumulate_microbatch(loss_sum=..., effective_tokens=..., total_tokens=...)
        loss.backward()                                   # for each micro-batch
        stats = kit.reduce_window()                       # after the last one: one all-reduce
        scaler.unscale_(optimizer)                        # fp16 only
        kit.rescale_gradients(model.parameters(), stats)  # then clip, step, schedule, log
        kit.reset()

    This is a *deferred* window. One that starts with :meth:`begin_window` is *counted*: the counts come first
    and no gradient is touched afterwards.

    No call waits for the device, except on a device without float64 (MPS): there the sums live on the CPU, and
    each micro-batch costs one copy. Between windows it keeps only its next divisor, a power of two, which rounds
    nothing. In fp16, where gradients may leave the range, give :meth:`accumulate_microbatch` a fixed one, or keep
    :meth:`state_dict` in checkpoints; otherwise nothing of the kit needs to be in one.

    Args:
        device: where the losses are. The window's message is reduced there, so it must fit the group's backend.
        dp_world_size: ranks over which gradients are averaged.
        dp_group: their group. None: the default group.
        count_group: the ranks that hold different tokens; counts are summed over these. Default ``dp_group``;
            with context parallelism the ranks of DP x CP.
        averaging_factor: what the wrapper divides gradients by. Default ``dp_world_size`` (DDP, FSDP); times the
            accumulation steps under Accelerate or Lightning; 1 where a hook sums. :meth:`measure_averaging`
            finds it.
        empty_window: what a window without any supervised token does: "raise" EmptyWindowError, or "skip": then
            ``stats.skipped`` is true on all ranks, gradients are scaled to 0, and the loop takes no step. A window
            whose supervised tokens were all refused by the loss guard is skipped in any case.
        extra_terms: names of the extra terms that may occur. Declared, a rank may leave them out (they count as
            zero) and any other name is an error. None: the names are those the window brings; ranks that bring
            different ones get an error.
        loss_guard: what :meth:`guard_loss` asks; :meth:`build_loss_guard` makes one for this kit's ranks. Only for
            deferred windows. None: no guard, and no cost.

    Raises:
        KitUsageError: ``dp_world_size`` contradicts the group, or an argument is out of range.
    """

    def __init__(
        self,
        device: torch.device | str,
        dp_world_size: int,
        dp_group: dist.ProcessGroup | None = None,
        *,
        count_group: dist.ProcessGroup | None = None,
        averaging_factor: float | None = None,
        empty_window: EmptyWindow = "raise",
        extra_terms: Sequence[str] | None = None,
        loss_guard: PerTokenLossGuard | None = None,
    ) -> None:
        if empty_window not in ("raise", "skip"):
            raise KitUsageError(f'empty_window is {empty_window!r}, neither "raise" nor "skip"')
        self.device = torch.device(device)
        self.dp_world_size = dp_world_size
        self.dp_group = dp_group
        self.count_group = dp_group if count_group is None else count_group
        self._ranks = counting_ranks(dp_world_size, dp_group, count_group)
        self._averaging_factor = averaging_factor_or_default(averaging_factor, dp_world_size)
        self._empty_window: EmptyWindow = empty_window
        self._declared = None if extra_terms is None else tuple(dict.fromkeys(extra_terms))
        self._sums_device = self.device if supports_float64(self.device) else torch.device("cpu")
        # On the CPU reading costs nothing, so faults are raised in reduce_window; elsewhere when stats are read.
        self._read_at_reduce = self._sums_device.type == "cpu"
        self._default_divisor: float | Tensor = _FIRST_DIVISOR
        self._watch = ExtraLossWatch()
        self.loss_guard = loss_guard
        self._open_window()

    @property
    def averaging_factor(self) -> float:
        """What the wrapper divides gradients by: declared, measured, or ``dp_world_size``."""
        return self._averaging_factor

    def apply_chunked_token_loss_patch(self, model: ModelT, **options: Any) -> ModelT:
        """Make a Hugging Face causal LM return per-token losses; see ``apply_chunked_token_loss_patch``.

        The kit also notices when the patched model adds a nonzero loss of its own (``outputs.extra_loss``) in a
        micro-batch that is then accumulated without any extra term.
        """
        patched = apply_chunked_token_loss_patch(model, **options)
        self._watch.watch(patched)
        return patched

    def measure_averaging(
        self, wrapped_model: nn.Module, *, backward: Callable[[Tensor], Any] | None = None
    ) -> float:
        """Measure the averaging factor over the counting ranks (a collective call) and use it from now on.

        See :func:`tokennorm.kit.measure_averaging` for the arguments and for what is refused.
        """
        self._require_unused("measure_averaging")
        self._averaging_factor = measure_averaging(wrapped_model, group=self.count_group, backward=backward)
        return self._averaging_factor

    def build_loss_guard(
        self,
        *,
        spike_multiplier: float,
        window_size: int,
        min_history: int,
        group: dist.ProcessGroup | None = None,
        group_world_size: int | None = None,
    ) -> PerTokenLossGuard:
        """Build a :class:`PerTokenLossGuard` (see there) for this kit's losses, install it, and return it.

        Args:
            spike_multiplier: a loss per token above this many times the recent median is a spike.
            window_size: micro-batch indices that the median is taken over.
            min_history: how many of them must be there first.
            group: the ranks that decide together. Default: those that counts are summed over.
            group_world_size: their number, checked when given.

        Raises:
            KitUsageError: an argument is out of range, or this is called inside a window.
        """
        self._require_unused("build_loss_guard")
        self.loss_guard = PerTokenLossGuard(
            self.device,
            spike_multiplier=spike_multiplier,
            window_size=window_size,
            min_history=min_history,
            group=self.count_group if group is None else group,
            group_world_size=group_world_size,
        )
        return self.loss_guard

    def guard_loss(self, loss_sum: Tensor, token_count: Count, *, step: int = 0) -> bool:
        """Whether this micro-batch takes part; asked before backward, the same answer on every rank.

        A collective call: every rank makes it for each of its micro-batches, dummy ones included. It costs one
        small all-reduce and one wait for the device; without a guard it is True at once and costs nothing.

        After False, drop the outputs (never call backward on them, not even times zero: that keeps the NaN), run
        a dummy micro-batch without supervised tokens through the whole model, and accumulate that one, on every
        rank. ``kit.loss_guard.last`` says why.

        Args:
            loss_sum: as for :meth:`accumulate_microbatch`.
            token_count: its ``effective_tokens``.
            step: kept in the verdict.

        Raises:
            KitUsageError: in a counted window, or after reduce_window.
        """
        if self.loss_guard is None:
            return True
        if self._window.stats is not None:
            raise KitUsageError(
                "guard_loss was called after reduce_window",
                why="this micro-batch belongs to no window.",
                fix="call reset() after the optimizer step. The order is " + CALL_ORDER,
            )
        admitted = self.loss_guard.check(loss_sum, token_count, step=step)
        self._window.owes_dummy = not admitted
        if not admitted:
            # The router loss of a forward that was thrown away is nobody's to accumulate.
            self._watch.take()
            assert self.loss_guard.last is not None
            self._window.lost_tokens |= self.loss_guard.last.tokens > 0
        return admitted

    def begin_window(self, counts: Mapping[str, Count]) -> dict[str, Tensor]:
        """Start a counted window: one all-reduce of all denominators, before its first backward.

        A counted window costs two all-reduces (this one, and :meth:`reduce_window`'s for the values to log), and
        its terms may have different denominators. No micro-batch of it may be left out afterwards.

        Args:
            counts: this rank's denominators, summed over all its micro-batches of the window: ``"loss"`` for
                the effective tokens, and one entry per extra term.

        Returns:
            The denominators of all ranks, 0-d float64 each, where the sums are.

        Raises:
            KitUsageError: the window has already begun, ``"loss"`` is missing, a name was not declared.
            EmptyWindowError: no rank has a supervised token (on the CPU; elsewhere when stats are read).
        """
        self._require_unused("begin_window")
        if self.loss_guard is not None:
            raise KitUsageError(
                "begin_window was called on a kit with a loss guard",
                why="a micro-batch that the guard refuses would leave its tokens in a count that is already used.",
                fix="use deferred windows (no begin_window), or build the kit without loss_guard=.",
            )
        if "loss" not in counts:
            raise KitUsageError(
                f'begin_window got counts for {sorted(counts)}, none for "loss"',
                fix='kit.begin_window({"loss": effective_tokens_of_the_window, ...}).',
            )
        announced = {
            name: read_count(value, f"the count of {name!r}", self.device) for name, value in counts.items()
        }
        self._window.check_names(announced.keys() - {"loss"})
        with torch.inference_mode(False), torch.no_grad():
            announcement = self._window.announcement(announced)
            facts = self._facts("announced")
            message = self._reduce(announcement, facts)
            message[Slot.GRADIENT_SCALE] = 1.0
            totals = {"loss": message[Slot.EFFECTIVE]}
            for name in facts.terms:
                totals[name] = message[self._window.sums.term_slot(name) + TermSlot.DEN]
            self._window.normalisation = Counted(announced, totals, self._averaging_factor)
        if self._read_at_reduce:
            _ = TokenLossStats(message, facts).is_empty
        return totals

    def accumulate_microbatch(
        self,
        *,
        loss_sum: Tensor,
        effective_tokens: Count,
        total_tokens: Count,
        backward_divisor: float | None = None,
        extra_terms: Mapping[str, LossTerm] | None = None,
    ) -> Tensor:
        """Add one micro-batch to the window; returns the loss to call backward on.

        Args:
            loss_sum: 0-d, with graph: the sum of the per-token losses (each times its token weight, if any).
            effective_tokens: what ``loss_sum`` is counted in: the number of supervised tokens (int), or the sum of
                their weights (float; may then exceed ``total_tokens``). A 0-d tensor stays on its device, and
                the dtype says which of the two it is.
            total_tokens: tokens that are not padding. Only logged.
            backward_divisor: what the loss is divided by until the counts are known; positive, the same in the
                whole window and on every rank. Default: a power of two near a rank's tokens in the window before.
            extra_terms: name -> term, e.g. ``{"router": LossTerm(numerator=..., denominator=..., weight=...)}``.
                In a deferred window each term's denominator must equal ``effective_tokens``. A weight is
                constant inside a window.

        Returns:
            0-d, float32 (float64 for a float64 loss): ``(loss_sum + sum of weight * numerator) / divisor``; in a
            counted window ``averaging_factor * sum of weight * numerator / global denominator``.

        Raises:
            KitUsageError: called after reduce_window; a loss that is no 0-d tensor, or without graph while
                gradients are enabled; a count that is negative, NaN, above 2**53; effective above total tokens;
                a divisor that changed; a term that was not declared, or with another denominator or weight.
        """
        if self._window.stats is not None:
            raise KitUsageError(
                "accumulate_microbatch was called after reduce_window",
                why="these tokens would be in no window's count.",
                fix="call reset() after the optimizer step. The order is " + CALL_ORDER,
            )
        batch = read_microbatch(
            loss_sum=loss_sum,
            effective_tokens=effective_tokens,
            total_tokens=total_tokens,
            extra_terms=extra_terms,
            device=self.device,
        )
        loss = self._window.accumulate(batch, backward_divisor)
        forgotten = self._watch.take()
        if forgotten is not None and not batch.terms:
            self._window.sums.flag(Slot.UNUSED_EXTRA_LOSS, forgotten != 0)
        return loss

    def reduce_window(self) -> TokenLossStats:
        """Sum the window over the counting ranks: one float64 all-reduce (none in a single process).

        Every rank calls it, also one whose micro-batches were all empty.

        Returns:
            The stats, the same on every rank. On the CPU their faults are raised here; on an accelerator when the
            first value is read, so that nothing waits for the device until then.

        Raises:
            KitUsageError: called twice without reset; ranks that disagree; counts that contradict each other.
            EmptyWindowError: no rank had a supervised token, with ``empty_window="raise"``.
        """
        if self._window.stats is not None:
            raise KitUsageError(
                "reduce_window was called twice without reset",
                why="the counts of two windows would be mixed up.",
                fix="call reset() after the optimizer step. The order is " + CALL_ORDER,
            )
        window, facts = self._window, self._facts(self._window.normalisation.mode)
        with torch.inference_mode(False), torch.no_grad():
            window.normalisation.close(window.sums)
            message = self._reduce(window.sums, facts)
            message[Slot.GRADIENT_SCALE] = window.normalisation.scale(message, self._averaging_factor)
            message[Slot.BACKWARD_DIVISOR] = window.normalisation.divisor
            self._default_divisor = next_default_divisor(
                message[Slot.EFFECTIVE], self._ranks, self._default_divisor
            )
        window.stats = TokenLossStats(message, facts)
        if self._read_at_reduce:
            _ = window.stats.is_empty
        return window.stats

    def rescale_gradients(self, parameters: Iterable[Tensor] | Tensor, stats: TokenLossStats) -> None:
        """Multiply the gradients by ``stats.gradient_scale``, in place, without waiting for the device.

        After ``scaler.unscale_`` and before clipping. May be called once per optimizer; a parameter given twice is
        scaled once. In a counted window there is nothing to multiply, but the same misuse is an error.

        Args:
            parameters: parameters (plain or DTensor) of the model that ran the window.
            stats: what :meth:`reduce_window` returned for this window.

        Raises:
            KitUsageError: before reduce_window; stats of another window; no parameters; every given parameter
                with a gradient was already scaled in this window.
        """
        if self._window.stats is None:
            raise KitUsageError(
                "rescale_gradients was called before reduce_window",
                why="the window's counts are not known yet.",
                fix="The order is " + CALL_ORDER,
            )
        if stats is not self._window.stats:
            raise KitUsageError(
                "rescale_gradients got the stats of another window",
                why="its token count would scale this window's gradients.",
                fix="pass what reduce_window returned for this window.",
            )
        unscaled = self._window.unscaled(parameters)
        if self._window.normalisation.mode == "deferred":
            scale_gradients(unscaled, stats.gradient_scale_tensor)

    def reset(self, *, discard: bool = False) -> None:
        """Close the window and open the next one, after the step.

        Args:
            discard: the window is given up on purpose: its gradients are not used (or you scaled them yourself).

        Raises:
            KitUsageError: the window ran backward on provisional losses but was never reduced and rescaled, so
                the step that was just taken had wrong gradients.
        """
        if not discard:
            self._window.check_finished()
        self._open_window()

    def state_dict(self) -> dict[str, float]:
        """What the next window's provisional gradients depend on, between two windows; waits for the device."""
        return {"default_divisor": float(self._default_divisor)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the divisor of a state.

        Raises:
            KitUsageError: inside a window.
        """
        self._require_unused("load_state_dict")
        self._default_divisor = float(state["default_divisor"])
        self._open_window()

    def _open_window(self) -> None:
        self._window = OpenWindow(self._sums_device, self._declared, self._default_divisor)
        self._watch.take()

    def _require_unused(self, call: str) -> None:
        if self._window.started or self._window.stats is not None or self._window.normalisation.mode == "counted":
            raise KitUsageError(
                f"{call} was called inside a window",
                why="the micro-batches before it were counted on other terms.",
                fix="call it before the window's first micro-batch (after reset()).",
            )

    def _facts(self, mode: str) -> WindowFacts:
        return WindowFacts(
            ranks=self._ranks,
            mode=mode,
            # What the guard refused says nothing about the data: the run goes on with the next window.
            empty_window="skip" if self._window.lost_tokens else self._empty_window,
            weighted=self._window.weighted,
            backward_divisor=self._window.normalisation.given,
            terms=self._window.sums.term_names,
        )

    def _reduce(self, sums: WindowSums, facts: WindowFacts) -> Tensor:
        setup = (facts.mode, facts.empty_window, facts.terms, self.dp_world_size, self._averaging_factor)
        sums.agree(Slot.SETUP_AGREEMENT, setup)
        message = sums.join()
        if self._ranks > 1:
            dist.all_reduce(message, group=self.count_group)
        return message
