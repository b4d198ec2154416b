"""Hugging Face Accelerate: the division by accumulation steps and ranks undone, exactly.

Tested with accelerate 1.15 and torch 2.13: one process and DDP (gloo), float32, also with a loss scaler. Nothing
is imported from Accelerate; the :class:`accelerate.Accelerator` of the loop is all that is needed.

Accelerate averages: ``accelerator.backward`` divides by ``gradient_accumulation_steps`` (also in the short window
at the end of an epoch), DDP by the number of ranks. A loop whose loss is a mean weighs each micro-batch alike,
however many tokens it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tokennorm.errors import ConfigError, KitUsageError
from tokennorm.integrations.windows import AccumulationWindows, refuse_unknown_averaging, sum_of_samples
from tokennorm.kit import TokenLossStats
from tokennorm.kit.counts import Count
from tokennorm.kit.stats import EmptyWindow
from tokennorm.loss.terms import LossTerm, RatioSum, reduce_ratios

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["TokenNormedBackward", "TokenNormedEvaluation"]

_USE_KIT = "write the loop with TokenNormedLossKit (docs/integrations.md has one for FSDP2)."
_REASONS = {
    "DEEPSPEED": "DeepSpeed's engine divides, clips and steps by itself, inside one call.",
    "MEGATRON_LM": "Megatron-LM runs forward and backward by itself; there is no loss to hand over.",
    "FSDP": "Accelerate runs its FSDP plugin on accelerators only, where it was not shown to be exact.",
    "XLA": "XLA averages gradients inside the optimizer step and the clipping, after the rescale.",
}


class TokenNormedBackward:
    """In place of ``accelerator.backward(loss)``: the gradient of the mean over the window's supervised tokens.

    ::

        token_normed = TokenNormedBackward(accelerator, model)        # after accelerator.prepare
        for batch in loader:
            with accelerator.accumulate(model):
                losses = model(**batch).loss                          # per token
                stats = token_normed.backward(loss_sum=losses.sum(), effective_tokens=n, total_tokens=t)
                if accelerator.sync_gradients:                        # stats is None in the other micro-batches
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    accelerator.log({"loss": stats.mean_loss})
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    With a loss scaler the gradients are rescaled while they still carry its factor, because Accelerate unscales in
    ``clip_grad_norm_`` or in the step, and only once. The two factors commute; an infinity that the rescale makes
    is seen by the scaler.

    Args:
        accelerator: of the loop; single process or DDP.
        models: every model whose gradients the loop trains, as ``accelerator.prepare`` returned them.
        averaging_factor: what the reduction over ranks divides by, where a DDP communication hook decides that.
            Default: the number of ranks. (The accumulation steps come on top.)
        empty_window: what a window without any supervised token does: "raise" EmptyWindowError, or "skip": on all
            ranks ``stats.skipped`` is true and gradients are None. ``optimizer.step()`` then moves nothing; leave
            it out where there is a loss scaler, and leave out ``scheduler.step()``.
        extra_terms: names of the extra terms, for loops where a rank may leave one out.

    Raises:
        ConfigError: DeepSpeed, Megatron-LM, FSDP, XLA, tensor or context parallelism, LOMO.
        KitUsageError: no model, or one that is not in DDP although there are several ranks, or has a communication
            hook and no declared ``averaging_factor``.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *models: nn.Module,
        averaging_factor: float | None = None,
        empty_window: EmptyWindow = "raise",
        extra_terms: Sequence[str] | None = None,
    ) -> None:
        _refuse_unsupported(accelerator)
        if not models:
            raise KitUsageError(
                "TokenNormedBackward was given no model",
                fix="TokenNormedBackward(accelerator, model), with the model that accelerator.prepare returned.",
            )
        if averaging_factor is None:
            for model in models:
                refuse_unknown_averaging(model, accelerator.num_processes, prepared_by="accelerator.prepare")
        self._accelerator = accelerator
        self._models = models
        self._windows = AccumulationWindows(
            accelerator.device,
            accelerator.num_processes,
            averaging_factor=averaging_factor,
            empty_window=empty_window,
            extra_terms=extra_terms,
        )
        self._left: list[tuple[Tensor, tuple[int, int]]] = []

    def backward(
        self,
        *,
        loss_sum: Tensor,
        effective_tokens: Count,
        total_tokens: Count,
        router_loss: Tensor | None = None,
        extra_terms: Mapping[str, LossTerm] | None = None,
    ) -> TokenLossStats | None:
        """Backward of one micro-batch, once per ``accelerator.accumulate``; at the last one also the rescale.

        Every rank calls it for each of its micro-batches, empty ones too (their loss is a zero that went through
        the whole model).

        Args:
            loss_sum: 0-d, with graph: the sum of the supervised tokens' losses in this micro-batch.
            effective_tokens: how many these are (or the sum of their weights, a float).
            total_tokens: tokens that are not padding. Only logged.
            router_loss: 0-d, the router loss of this micro-batch, times its coefficient. Such a loss is no sum
                over tokens: what is optimised is the mean over micro-batches, weighted by their effective tokens.
            extra_terms: further terms, as in :meth:`TokenNormedLossKit.accumulate_microbatch`.

        Returns:
            The window's stats, the same on every rank, when this micro-batch completed it (that is, when
            ``accelerator.sync_gradients``); else None. Reading a value of them waits for the device, and on an
            accelerator it is what raises the faults of a window.

        Raises:
            KitUsageError: the gradients of the last window are still there; the accumulation steps changed inside
                a window; whatever the kit raises.
            EmptyWindowError: no rank had a supervised token, with ``empty_window="raise"``.
        """
        if not self._windows.is_open:
            self._check_cleared()
        loss = self._windows.accumulate(
            steps=self._accelerator.gradient_accumulation_steps,
            loss_sum=loss_sum,
            effective_tokens=effective_tokens,
            total_tokens=total_tokens,
            router_loss=router_loss,
            extra_terms=extra_terms,
        )
        self._accelerator.backward(loss)
        if not self._accelerator.sync_gradients:
            return None
        parameters = [parameter for model in self._models for parameter in model.parameters()]
        stats = self._windows.finish(parameters)
        self._left = [(p, _state_of(p.grad)) for p in parameters if p.grad is not None]
        return stats

    def _check_cleared(self) -> None:
        """Between two windows somebody clears the gradients; what nobody touched would be scaled again."""
        left, self._left = self._left, []
        if left and all(p.grad is not None and _state_of(p.grad) == state for p, state in left):
            raise KitUsageError(
                f"all {len(left)} gradients of the last window are still there, as the rescale left them",
                why="this window's rescale would scale them a second time.",
                fix="call backward once per micro-batch, inside `with accelerator.accumulate(model):`, which says "
                "when a window ends; and optimizer.zero_grad() after optimizer.step(), at the end of that block.",
            )


class TokenNormedEvaluation:
    """The loss per supervised token over a whole evaluation set, on all ranks, no sample counted twice.

    ::

        evaluation = TokenNormedEvaluation(accelerator)
        for batch in eval_loader:                                     # from accelerator.prepare
            losses = model(**batch).loss.view(batch["labels"].shape)  # per token [B, S]
            evaluation.add(loss_sums=losses.sum(1), effective_tokens=(batch["labels"][:, 1:] != -100).sum(1))
        print(evaluation.reduce().mean)

    To give every rank the same number of samples Accelerate repeats some in the last batch. They are left out
    here, by the count that ``accelerator.gather_for_metrics`` goes by. Ranks communicate in :meth:`reduce` only.

    Args:
        accelerator: of the loop.

    Raises:
        ConfigError: as for :class:`TokenNormedBackward`.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        _refuse_unsupported(accelerator)
        self._accelerator = accelerator
        self._sum = RatioSum(0.0, 0)

    def add(self, *, loss_sums: Tensor, effective_tokens: Tensor) -> None:
        """Add one batch, inside the loop over the prepared loader.

        Args:
            loss_sums: ``[B]``, for each sample of the batch the sum of its supervised tokens' losses.
            effective_tokens: ``[B]``, how many these are.

        Raises:
            KitUsageError: not one number per sample.
            ConfigError: the last batch may hold repeated samples, and Accelerate does not say how many.
        """
        real = _real_rows(self._accelerator, len(loss_sums)) if loss_sums.dim() else None
        self._sum = self._sum + sum_of_samples(loss_sums, effective_tokens, real)

    def reduce(self) -> RatioSum:
        """The sum over all ranks (a collective call) as a pair; its ``mean`` is the loss. Then start anew."""
        total = reduce_ratios({"loss": self._sum}, device=self._accelerator.device)["loss"]
        self._sum = RatioSum(0.0, 0)
        return total


def _state_of(gradient: Tensor) -> tuple[int, int]:
    """Changes with every operation on a gradient, without holding its memory."""
    return gradient.data_ptr(), gradient._version


def _real_rows(accelerator: Any, rows: int) -> int | None:
    """How many rows of this rank's batch are no repeats; None: all.

    A rank's rows lie side by side in the global batch, and the repeats are at its end.
    """
    state = accelerator.gradient_state
    if accelerator.num_processes == 1 or not state.end_of_dataloader:
        return None
    loader = state.active_dataloader
    if loader._drop_last or not getattr(loader.batch_sampler, "even_batches", True) or state.remainder == 0:
        return None
    if state.remainder < 0:
        raise ConfigError(
            f"the evaluation set has no length that Accelerate knows, on {accelerator.num_processes} ranks",
            why="it repeats samples to fill up the last batch and does not say how many; they would count twice.",
            fix="give the dataset a __len__ and the loader a batch_size, or let Accelerate dispatch: "
            "DataLoaderConfiguration(dispatch_batches=True).",
        )
    return min(max(state.remainder - accelerator.process_index * rows, 0), rows)


def _refuse_unsupported(accelerator: Any) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"Accelerate runs in mode {kind}, which is not supported here",
            why=_REASONS.get(kind, "what it does to gradients was not measured."),
            fix="use DDP (`accelerate launch --multi_gpu`); or " + _USE_KIT,
        )
    sizes = {
        axis: size
        for axis in ("tp_size", "cp_size", "sp_size")
        if (size := getattr(accelerator.parallelism_config, axis, None) or 1) > 1
    }
    if sizes:
        raise ConfigError(
            f"Accelerate's parallelism_config has {sizes}",
            why="these ranks share tokens, so counts and averages run over different groups.",
            fix=_USE_KIT,
        )
    if accelerator.has_lomo_optimizer:
        raise ConfigError(
            "the optimizer is LOMO",
            why="it changes the weights during backward, before the window's tokens are known.",
            fix="use an optimizer that steps after backward.",
        )
