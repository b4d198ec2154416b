"""The callback that reduces each window and rescales its gradients at the one moment when that is right."""

# Lightning hands every hook the trainer and the module, used or not.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import strategies as lightning_strategies
from torch import Tensor

from tokennorm.errors import ConfigError, KitUsageError
from tokennorm.integrations.lightning.evaluation import EvaluationSums, log_number
from tokennorm.integrations.windows import AccumulationWindows, refuse_unknown_averaging
from tokennorm.kit.stats import EmptyWindow
from tokennorm.loss.terms import RatioSum

__all__ = ["TokenNormalisation"]

_USE_KIT = "write the loop with TokenNormedLossKit (docs/integrations.md has one for FSDP2)."
_REASONS = {
    "DeepSpeedStrategy": "DeepSpeed's engine divides, clips and steps by itself, inside one call.",
    "FSDPStrategy": "FSDP shards gradients and clips them itself; that was not shown to be exact.",
    "ModelParallelStrategy": "some of its ranks share tokens, so counts and averages run over different groups.",
    "XLAStrategy": "XLA averages gradients inside the optimizer step, after the rescale.",
    "SingleDeviceXLAStrategy": "it was not tested.",
}


class TokenNormalisation(Callback):
    """Rescales the gradients of each window before clipping, and logs the window's loss.

    :class:`TokenNormedModule` brings it along. Pass one to the Trainer to change its settings.

    Logged, from float64 sums over all ranks: ``train_loss`` at each optimizer step, the loss per supervised token
    of its window; ``train_loss_epoch``, that of all windows of the epoch. (``outputs["loss"]`` in
    ``on_train_batch_end`` is the provisional loss, a number without meaning.)

    It moves itself to the front of the Trainer's callbacks: the others see rescaled gradients in
    ``on_before_optimizer_step``. In ``on_after_backward`` gradients are provisional.

    Args:
        train_loss: name to log under; None: log nothing. (The window's sums are read all the same, once per
            optimizer step: that is when faults of a window show.)
        prog_bar: show it in the progress bar.
        averaging_factor: what the reduction over ranks divides by, where a DDP communication hook decides that.
            Default: the number of ranks. (The accumulation steps come on top.)
        empty_window: what a window without any supervised token does: "raise" EmptyWindowError, or "skip": weights
            and optimizer state stay as they are on all ranks. Lightning itself can't be told to skip: its
            ``global_step`` and schedulers per step count the window.
        extra_terms: names of the extra terms, for modules where a rank may leave one out.
    """

    def __init__(
        self,
        *,
        train_loss: str | None = "train_loss",
        prog_bar: bool = True,
        averaging_factor: float | None = None,
        empty_window: EmptyWindow = "raise",
        extra_terms: Sequence[str] | None = None,
    ) -> None:
        self.evaluation = EvaluationSums()
        self._train_loss, self._prog_bar = train_loss, prog_bar
        self._averaging_factor = averaging_factor
        self._empty_window: EmptyWindow = empty_window
        self._extra_terms = extra_terms
        self._windows: AccumulationWindows | None = None
        self._accumulated = self._backwards = 0
        self._epoch = RatioSum(0.0, 0)

    def token_loss(self, trainer: Trainer, **micro_batch: Any) -> Tensor:
        """See :meth:`TokenNormedModule.token_loss`."""
        if self._windows is None or not trainer.training:
            raise KitUsageError(
                "token_loss was called outside of training",
                why="there is no window of an optimizer step to count its tokens in.",
                fix="in validation_step and test_step call self.log_token_loss.",
            )
        loss = self._windows.accumulate(steps=trainer.accumulate_grad_batches, **micro_batch)
        self._accumulated += 1
        return loss

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what can't be exact, before anything is loaded; come first.

        Raises:
            ConfigError: a strategy other than one device or DDP; manual optimisation.
        """
        callbacks = cast(Any, trainer).callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        _refuse_strategy(trainer)
        if stage == "fit" and not pl_module.automatic_optimization:
            raise ConfigError(
                f"{type(pl_module).__name__} has automatic_optimization = False",
                why="Lightning then neither divides by accumulation steps nor says when a window ends.",
                fix="use TokenNormedLossKit in training_step (docs/integrations.md has an example); for the "
                "evaluation give the module no token_loss, or log (sum, count) pairs.",
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the wrapped model and the optimizer.

        Raises:
            KitUsageError: DDP with a communication hook and no declared ``averaging_factor``.
            ConfigError: L-BFGS.
        """
        if self._averaging_factor is None and trainer.model is not None:
            refuse_unknown_averaging(trainer.model, trainer.world_size, prepared_by="Lightning's strategy")
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise ConfigError(
                "the optimizer is L-BFGS",
                why="it runs its closure several times in one step, so tokens would be counted several times.",
                fix="use an optimizer with one backward per micro-batch.",
            )
        self._windows = AccumulationWindows(
            pl_module.device,
            trainer.world_size,
            averaging_factor=self._averaging_factor,
            empty_window=self._empty_window,
            extra_terms=self._extra_terms,
        )
        self._start_window()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A new epoch starts with a new window: Lightning clears the gradients, whatever was left over."""
        if self._windows is not None and self._windows.is_open:
            self._windows.give_up()
        self._start_window()
        self._epoch = RatioSum(0.0, 0)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Count the micro-batches that reach the gradients."""
        self._backwards += 1

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Reduce and rescale: after the last backward and after unscaling, before clipping.

        Raises:
            KitUsageError: a micro-batch ran backward on a loss that did not come from ``token_loss``.
            EmptyWindowError: no rank had a supervised token, with ``empty_window="raise"``.
        """
        if self._accumulated == 0 or self._accumulated < self._backwards:
            raise KitUsageError(
                f"of {self._backwards} micro-batches of this optimizer step, {self._accumulated} went through "
                "token_loss",
                why="the others' losses are divided by something else, and their tokens are in no count.",
                fix="return self.token_loss(loss_sum=..., effective_tokens=..., total_tokens=...) from "
                "training_step, for empty micro-batches too.",
            )
        assert self._windows is not None
        stats = self._windows.finish(p for group in optimizer.param_groups for p in group["params"])
        self._start_window()
        loss = stats.mean_loss
        if loss is None or self._train_loss is None:
            return
        self._epoch = self._epoch + RatioSum(stats.global_loss_sum, stats.global_effective_tokens)
        log_number(pl_module, self._train_loss, loss, on_step=True, prog_bar=self._prog_bar)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the loss of the whole epoch."""
        if self._train_loss is not None and self._epoch.mean is not None:
            log_number(pl_module, f"{self._train_loss}_epoch", self._epoch.mean)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the evaluation's sums."""
        self.evaluation.start()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Remember which loader the batch is from."""
        self.evaluation.dataloader_idx = dataloader_idx

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reduce over the ranks, and log."""
        self.evaluation.log(pl_module)

    # Lightning calls these where it tests.
    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_start = on_validation_batch_start
    on_test_epoch_end = on_validation_epoch_end

    def _start_window(self) -> None:
        self._accumulated = self._backwards = 0


def _refuse_strategy(trainer: Trainer) -> None:
    strategy = trainer.strategy
    names = [cls.__name__ for cls in type(strategy).__mro__]
    reason = next((_REASONS[name] for name in names if name in _REASONS), None)
    known = (lightning_strategies.SingleDeviceStrategy, lightning_strategies.DDPStrategy)
    if reason is None and not isinstance(strategy, known):
        reason = "what it does to gradients was not measured."
    if reason is not None:
        raise ConfigError(
            f"Lightning's strategy {names[0]} is not supported here",
            why=reason,
            fix='use Trainer(strategy="ddp"); or ' + _USE_KIT,
        )
