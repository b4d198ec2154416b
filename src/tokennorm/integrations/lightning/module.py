"""The LightningModule to derive from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from tokennorm.errors import KitUsageError
from tokennorm.integrations.lightning.callback import TokenNormalisation
from tokennorm.kit.counts import Count
from tokennorm.loss.terms import LossTerm

__all__ = ["TokenNormedModule"]


class TokenNormedModule(LightningModule):
    """A LightningModule whose gradient is that of the mean over the window's supervised tokens.

    ::

        class Model(TokenNormedModule):                    # or (TokenNormedModule, YourLightningModule)
            def training_step(self, batch, batch_idx):
                losses = self.model(**batch).loss          # per token
                return self.token_loss(loss_sum=losses.sum(), effective_tokens=n, total_tokens=t)

            def validation_step(self, batch, batch_idx):
                losses = self.model(**batch).loss.view(batch["labels"].shape)
                supervised = (batch["labels"][:, 1:] != -100).sum(1)
                self.log_token_loss("val_loss", loss_sums=losses.sum(1), effective_tokens=supervised)

    Everything else stays: the Trainer, accumulation, clipping, precision, schedulers. A module that overrides
    ``configure_callbacks`` calls ``super().configure_callbacks()``.
    """

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Adds a :class:`TokenNormalisation` unless the Trainer has one."""
        inherited = super().configure_callbacks()
        callbacks = [inherited] if isinstance(inherited, Callback) else list(inherited)
        if any(isinstance(callback, TokenNormalisation) for callback in (*callbacks, *_callbacks_of(self))):
            return callbacks
        return [*callbacks, TokenNormalisation()]

    def token_loss(
        self,
        *,
        loss_sum: Tensor,
        effective_tokens: Count,
        total_tokens: Count,
        router_loss: Tensor | None = None,
        extra_terms: Mapping[str, LossTerm] | None = None,
    ) -> Tensor:
        """The loss to return from ``training_step``, as it is; for empty micro-batches too.

        Args:
            loss_sum: 0-d, with graph: the sum of the supervised tokens' losses in this micro-batch.
            effective_tokens: how many these are (or the sum of their weights, a float).
            total_tokens: tokens that are not padding. Only logged.
            router_loss: 0-d, the router loss of this micro-batch, times its coefficient. Such a loss is no sum
                over tokens: what is optimised is the mean over micro-batches, weighted by their effective tokens.
            extra_terms: further terms, as in :meth:`TokenNormedLossKit.accumulate_microbatch`.

        Raises:
            KitUsageError: outside of training; the callback is not there; whatever the kit raises.
        """
        return _callback_of(self).token_loss(
            self.trainer,
            loss_sum=loss_sum,
            effective_tokens=effective_tokens,
            total_tokens=total_tokens,
            router_loss=router_loss,
            extra_terms=extra_terms,
        )

    def log_token_loss(
        self, name: str, *, loss_sums: Tensor, effective_tokens: Tensor, prog_bar: bool = False
    ) -> None:
        """In ``validation_step`` or ``test_step``: add a batch to the loss per supervised token of the whole set.

        Logged under ``name`` at the end, from float64 sums over all batches and ranks. Samples that a
        ``DistributedSampler`` repeats, to give every rank the same number, are left out.

        Args:
            name: to log under; different names for different loaders.
            loss_sums: ``[B]``, for each sample of the batch, in the loader's order, the sum of its supervised
                tokens' losses.
            effective_tokens: ``[B]``, how many these are.
            prog_bar: show it in the progress bar.

        Raises:
            KitUsageError: outside of an evaluation; not one number per sample; the callback is not there.
        """
        _callback_of(self).evaluation.add(
            self.trainer, name, loss_sums=loss_sums, effective_tokens=effective_tokens, prog_bar=prog_bar
        )


def _callbacks_of(module: LightningModule) -> list[Any]:
    return cast(Any, module.trainer).callbacks


def _callback_of(module: LightningModule) -> TokenNormalisation:
    for callback in _callbacks_of(module):
        if isinstance(callback, TokenNormalisation):
            return callback
    raise KitUsageError(
        "the Trainer has no TokenNormalisation callback",
        why="nothing would rescale the gradients before the optimizer step.",
        fix="if your module overrides configure_callbacks, let it call super().configure_callbacks(). "
        "(Lightning's learning-rate and batch-size finders take callbacks away: run them on a module without "
        "token_loss.)",
    )
