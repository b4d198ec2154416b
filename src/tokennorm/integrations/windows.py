"""What Accelerate and Lightning share: windows of a loop that divides each loss by its accumulation steps.

Such a loop divides gradients by ``ranks * steps``, also in a short last window. The kit undoes that in one factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokennorm.errors import KitUsageError
from tokennorm.kit import TokenLossStats, TokenNormedLossKit
from tokennorm.kit.counts import Count, supports_float64
from tokennorm.kit.stats import EmptyWindow
from tokennorm.loss.terms import LossTerm, RatioSum

__all__ = ["AccumulationWindows", "refuse_unknown_averaging", "sum_of_samples"]

ROUTER = "router"


class AccumulationWindows:
    """A kit whose averaging factor follows the loop's number of accumulation steps.

    Args:
        device: where the losses are.
        ranks: number of processes, the default group.
        averaging_factor: what the gradients' reduction over ranks divides by; None: ``ranks``, as DDP does.
        empty_window: "raise" or "skip", as in :class:`TokenNormedLossKit`.
        extra_terms: names of the extra terms, as in :class:`TokenNormedLossKit`.
    """

    def __init__(
        self,
        device: torch.device,
        ranks: int,
        *,
        averaging_factor: float | None = None,
        empty_window: EmptyWindow = "raise",
        extra_terms: Sequence[str] | None = None,
    ) -> None:
        self._device, self._ranks = device, ranks
        self._reduction_divides_by = ranks if averaging_factor is None else averaging_factor
        self._empty_window: EmptyWindow = empty_window
        self._extra_terms = extra_terms
        self._steps = 1
        self._kit = self._make_kit()
        self.is_open = False

    def accumulate(
        self,
        *,
        steps: int,
        loss_sum: Tensor,
        effective_tokens: Count,
        total_tokens: Count,
        router_loss: Tensor | None = None,
        extra_terms: Mapping[str, LossTerm] | None = None,
    ) -> Tensor:
        """Add one micro-batch; the loss that the loop then divides by ``steps`` and calls backward on.

        Args:
            steps: what the loop divides this loss by.
            loss_sum: as in :meth:`TokenNormedLossKit.accumulate_microbatch`, like the counts and ``extra_terms``.
            effective_tokens: see there.
            total_tokens: see there.
            router_loss: 0-d, this micro-batch's own value, times its coefficient; weighted by effective tokens.
            extra_terms: see there.

        Raises:
            KitUsageError: ``steps`` changed inside a window, and whatever the kit raises.
        """
        if steps != self._steps:
            if self.is_open:
                raise KitUsageError(
                    f"the number of accumulation steps changed inside a window, from {self._steps} to {steps}",
                    why="its micro-batches were divided by different numbers; no one factor puts that right.",
                    fix="change it between two optimizer steps.",
                )
            self._steps = steps
            self._kit = self._make_kit()
        terms = dict(extra_terms or {})
        if router_loss is not None:
            if ROUTER in terms:
                raise KitUsageError(
                    f"router_loss was given, and extra_terms has a {ROUTER!r} too", fix="leave one of them out."
                )
            terms[ROUTER] = LossTerm(numerator=router_loss * effective_tokens, denominator=effective_tokens)
        loss = self._kit.accumulate_microbatch(
            loss_sum=loss_sum,
            effective_tokens=effective_tokens,
            total_tokens=total_tokens,
            extra_terms=terms or None,
        )
        self.is_open = True
        return loss

    def finish(self, parameters: Iterable[Tensor]) -> TokenLossStats:
        """Reduce the window over the ranks, rescale the gradients, open the next window.

        In a skipped window (``empty_window="skip"``, no supervised token on any rank) gradients become None, so
        that an optimizer step that is taken all the same moves nothing.
        """
        parameters = list(parameters)
        stats = self._kit.reduce_window()
        self._kit.rescale_gradients(parameters, stats)
        if self._empty_window == "skip" and stats.skipped:
            for parameter in parameters:
                parameter.grad = None
        self._kit.reset()
        self.is_open = False
        return stats

    def give_up(self) -> None:
        """Forget the open window: its gradients will not be used."""
        self._kit.reset(discard=True)
        self.is_open = False

    def _make_kit(self) -> TokenNormedLossKit:
        return TokenNormedLossKit(
            self._device,
            self._ranks,
            averaging_factor=self._reduction_divides_by * self._steps,
            empty_window=self._empty_window,
            extra_terms=self._extra_terms,
        )


def refuse_unknown_averaging(model: nn.Module, ranks: int, *, prepared_by: str) -> None:
    """Make sure that gradients are averaged by plain DDP.

    Args:
        model: what the loop runs forward on.
        ranks: number of processes.
        prepared_by: the call that should have wrapped it.

    Raises:
        KitUsageError: several ranks and no DDP, or a communication hook.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile
    if not isinstance(model, DistributedDataParallel):
        if ranks > 1 and any(parameter.requires_grad for parameter in model.parameters()):
            raise KitUsageError(
                f"the model is a {type(model).__name__} on {ranks} ranks, not in DistributedDataParallel",
                why="its gradients are not averaged by DDP, so what they were divided by is not known here.",
                fix=f"pass the model as {prepared_by} returned it; for another wrapper use TokenNormedLossKit.",
            )
        return
    if model._comm_hooks:
        names = ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook, _ in model._comm_hooks)
        raise KitUsageError(
            f"the model's DDP has a communication hook ({names})",
            why="the hook decides what gradients are divided by, and that can't be read off it.",
            fix="pass averaging_factor=: the number of ranks if the hook averages, 1 if it sums.",
        )


def sum_of_samples(loss_sums: Tensor, effective_tokens: Tensor, real: int | None = None) -> RatioSum:
    """One batch of an evaluation as a pair of sums, without samples that a sampler repeated.

    Args:
        loss_sums: ``[B]``, for each sample the sum of its supervised tokens' losses.
        effective_tokens: ``[B]``, how many these are.
        real: the first so many rows count; None: all.

    Raises:
        KitUsageError: not one number per sample.
    """
    if loss_sums.dim() != 1 or loss_sums.shape != effective_tokens.shape:
        raise KitUsageError(
            f"loss_sums has shape {list(loss_sums.shape)} and effective_tokens {list(effective_tokens.shape)}",
            why="a sample repeated to fill up the last batch is left out, so each needs a sum of its own.",
            fix="pass one number per sample [B]: losses [B, S].sum(1) and (labels[:, 1:] != -100).sum(1).",
        )
    loss_sums, effective_tokens = loss_sums.detach()[:real], effective_tokens.detach()[:real]
    wide = torch.float64 if supports_float64(loss_sums.device) else torch.float32
    return RatioSum(loss_sums.sum(dtype=wide), effective_tokens.sum())
