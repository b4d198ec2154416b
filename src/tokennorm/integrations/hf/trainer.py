"""A ``transformers.Trainer`` that is exact. Imported only when transformers is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from tokennorm.errors import ConfigError, PatchError
from tokennorm.integrations.hf.checks import refuse_unsupported
from tokennorm.integrations.hf.evaluation import SAMPLE_LENGTHS, EvaluationSums, NotingLengths
from tokennorm.integrations.hf.token_losses import (
    IGNORED,
    TokenLosses,
    count_of,
    losses_of_logits,
    losses_of_model,
    targets_of,
    total_tokens,
    weighted_losses,
    without_labels,
)
from tokennorm.integrations.hf.window import TrainingWindow, WindowSums
from tokennorm.kit import apply_chunked_token_loss_patch

__all__ = ["TokenNormalisedTrainer"]


class TokenNormalisedTrainer(Trainer):
    """See :func:`tokennorm.integrations.hf.token_normalised`, which puts this class where it belongs."""

    # Trainer: don't divide the loss by the accumulation steps.
    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)
        self._window = TrainingWindow()
        self._evaluation: EvaluationSums | None = None
        self._logits_wanted = self._loss_only = False
        self._logits_checked = False
        self.prepare_token_losses(self.model)
        self.add_callback(_WindowEvents(self))

    # What may be overridden: which loss, which tokens.

    def token_losses(self, model: Any, inputs: dict[str, Any]) -> TokenLosses:
        """The losses of the tokens of one micro-batch; by default the model's own next-token cross-entropy.

        Args:
            model: the wrapped model, in training or evaluation mode.
            inputs: the micro-batch, on the device.
        """
        if self.label_smoother is None and not self._logits_wanted:
            return losses_of_model(model, inputs)
        targets = targets_of(inputs)
        self._check_logits(inputs, targets)
        outputs = model(**without_labels(inputs))
        if self._window.in_training_step and outputs.get("aux_loss") is not None:
            raise ConfigError(
                f"{type(self.model).__name__} has a router loss, and its logits are needed for "
                + ("label smoothing" if self.label_smoother is not None else "compute_loss(return_outputs=True)"),
                why="a model adds its router loss to the loss that it computes itself, without logits here.",
                fix="train without label smoothing and without return_outputs, or without the router loss "
                "(output_router_logits=False in the model's config).",
            )
        smoothing = 0.0 if self.label_smoother is None else self.label_smoother.epsilon
        losses = losses_of_logits(outputs["logits"], targets, label_smoothing=smoothing)
        return TokenLosses(losses=losses, outputs=outputs)

    def token_weights(self, inputs: dict[str, Any]) -> Tensor:
        """Which tokens count: ``[B, S]`` bool in the order of the losses (float: how much each counts)."""
        return targets_of(inputs) != IGNORED

    # The losses are 0 where these weights are: their plain sum will do.
    _weights_of_labels = token_weights

    def prepare_token_losses(self, model: Any) -> None:
        """Make the model return token losses to who asks for them.

        Raises:
            PatchError: it can't be made to, and :meth:`token_losses` was not overridden.
        """
        try:
            apply_chunked_token_loss_patch(model, on_request=True)
        except PatchError as error:
            if type(self).token_losses is not TokenNormalisedTrainer.token_losses:
                return
            fix = (
                "override token_losses (see token_normalised) with a loss of every token, from the model's logits."
            )
            raise PatchError(
                error.what, why=error.why, fix=f"{error.fix}\n  Or {fix}" if error.fix else fix
            ) from error

    # Training: one window per optimizer step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *_args: Any, **_kwargs: Any
    ) -> Any:
        """Fetch the micro-batches of a window and count it, over all ranks, before its first backward."""
        if "_window" not in self.__dict__:
            raise ConfigError(
                f"the constructor of {type(self).__name__} called Trainer.__init__ by name",
                why="the exact trainer's own constructor never ran.",
                fix="call super().__init__(...).",
            )
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        if self._window.is_complete:
            raise ConfigError(
                "an optimizer step was taken and its window was never closed",
                why="the sums of two windows would be mixed up.",
                fix="keep the trainer's own callbacks (trainer.callback_handler) in place.",
            )
        if self._window.is_open:
            # A callback stopped the epoch inside a window: what it left would be in the next window's gradient.
            self._window.give_up()
            model: Any = self.model
            model.zero_grad()
        return batches, self._window.begin([count_of(self.token_weights(batch)) for batch in batches])

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one micro-batch; its loss is the exact one, or an error is raised."""
        with self._window.training_step():
            loss = super().training_step(*args, **kwargs)
            names = (type(self).compute_loss.__qualname__, type(self).training_step.__qualname__)
            self._window.check_step(loss, names)
        return loss

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ARG002 - the window knows
    ) -> Any:
        """In a training step: this micro-batch's share of the window's loss. Otherwise its mean, for show."""
        self._logits_wanted = return_outputs and not self._loss_only
        part = self.token_losses(model, inputs)
        weights = self.token_weights(inputs)
        if self._window.in_training_step:
            plain = type(self).token_weights is type(self)._weights_of_labels
            loss = self._window.add(part, weights, total_tokens(inputs, weights), plain_sum=plain)
        else:
            if self._evaluation is not None:
                self._evaluation.add(part, weights)
            loss = weighted_losses(part, weights).sum() / weights.sum()
        return (loss, {} if part.outputs is None else part.outputs) if return_outputs else loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; ``training_loss`` is the mean per supervised token over the whole run."""
        output: Any = super().train(*args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log sums over counts where the Trainer would log means of means."""
        if "loss" in logs and "learning_rate" in logs:
            logs.update(self._means_to_log(self._window.since_log.means(self.accelerator.device)))
            self._window.since_log = WindowSums()
        if "train_loss" in logs:
            mean = self._window.since_start.loss.mean
            logs["train_loss"] = math.nan if mean is None else mean
        super().log(logs, *args, **kwargs)

    # Evaluation: one sum over one sum.

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; flattened batches say how long their samples are."""
        with self._noting_lengths():
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's; flattened batches say how long their samples are."""
        with self._noting_lengths():
            return super().get_test_dataloader(*args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """The Trainer's, which computes the loss by :meth:`compute_loss`."""
        lengths = inputs.pop(SAMPLE_LENGTHS, None)
        if self._evaluation is not None:
            self._evaluation.sample_lengths = lengths
        self._loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self._loss_only = False

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The Trainer's, with the loss (and the metrics of the token losses) over all batches and ranks."""
        sums = self._evaluation = EvaluationSums(self.accelerator, dataloader)
        try:
            output: Any = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        finally:
            self._evaluation = None
        reduced = sums.reduce()
        if "loss" not in reduced and f"{metric_key_prefix}_loss" in output.metrics:
            raise ConfigError(
                f"{type(self).prediction_step.__qualname__} computes a loss without compute_loss",
                why="the Trainer averages it over batches, in which tokens count unequally.",
                fix="let prediction_step call super().prediction_step or self.compute_loss.",
            )
        if reduced:
            means = {name: math.nan if ratio.mean is None else ratio.mean for name, ratio in reduced.items()}
            for name, mean in self._means_to_log(means).items():
                output.metrics[f"{metric_key_prefix}_{name}"] = mean
        return output

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """A new model for each trial, patched like the first one."""
        model = super().call_model_init(*args, **kwargs)
        self.prepare_token_losses(model)
        return model

    @contextmanager
    def _noting_lengths(self) -> Iterator[None]:
        collator = self.data_collator
        self.data_collator = NotingLengths(collator)
        try:
            yield
        finally:
            self.data_collator = collator

    def _close_window(self) -> int:
        """Before the optimizer step; returns the window's tokens that are not padding, over all ranks."""
        return self._window.close(keep_non_finite=not self.args.logging_nan_inf_filter)

    def _means_to_log(self, means: dict[str, Any]) -> dict[str, Any]:
        """The names under which means are logged."""
        return means

    def _check_logits(self, inputs: dict[str, Any], targets: Tensor) -> None:
        """Once: are the logits that the model returns those that its loss is computed from?"""
        if self._logits_checked:
            return
        model: Any = self.model
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        with torch.no_grad():
            want = losses_of_model(model, inputs).losses
            logits = model(**without_labels(inputs))["logits"]
        for module, training in modes:
            module.training = training
        got = losses_of_logits(logits, targets)
        error = float((got - want).norm()) / max(float(want.norm()), 1e-30)
        if error > (1e-3 if logits.dtype in (torch.float32, torch.float64) else 5e-2):
            raise PatchError(
                f"the losses of the logits that {type(model).__name__} returns differ from those of its own loss, "
                f"by {error:.2g} of their size",
                why="label smoothing, compute_metrics and return_outputs work on the logits.",
                fix="leave them out, or override token_losses.",
            )
        self._logits_checked = True


class _WindowEvents(TrainerCallback):
    """Where the Trainer offers no method to override."""

    def __init__(self, trainer: TokenNormalisedTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Start counting, also when a run is started over with a smaller batch."""
        accelerator = self._trainer.accelerator
        self._trainer._window.start(accelerator.device, accelerator.num_processes)

    def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        """Close the window; an error here comes before the optimizer has moved."""
        self._trainer._close_window()
