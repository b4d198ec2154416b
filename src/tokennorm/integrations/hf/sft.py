"""TRL's ``SFTTrainer``, exact, on its own fused head. Imported only when TRL is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.trainer.sft_trainer import SFTTrainer

from tokennorm.errors import ConfigError, PatchError
from tokennorm.integrations.hf.token_losses import IGNORED, TokenLosses, targets_of, without_labels
from tokennorm.integrations.hf.trainer import TokenNormalisedTrainer

__all__ = ["TokenNormalisedSFTTrainer"]


class TokenNormalisedSFTTrainer(TokenNormalisedTrainer, SFTTrainer):
    """See :func:`tokennorm.integrations.hf.token_normalised`.

    TRL's own metrics (``entropy``, ``mean_token_accuracy``, ``aux_loss``) become means over supervised tokens, and
    ``num_tokens`` counts the last window of an epoch like any other.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None:
            raise ConfigError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} with TRL's SFTTrainer",
                why="TRL's head gives the losses of the tokens without smoothing (TRL has deprecated it as well).",
                fix="leave it at 0, or use token_normalised(transformers.Trainer), which has it.",
            )
        if self._is_vision_dataset:
            raise ConfigError(
                "the dataset has images",
                why="vision-language models were not tested.",
                fix="train on text, or count and compute the losses in a loop with the kit.",
            )

    def prepare_token_losses(self, model: Any) -> None:
        """TRL has put its own head into the model."""

    def token_weights(self, inputs: dict[str, Any]) -> Tensor:
        """Which tokens count: ``[B, S-1]`` bool; TRL's head has no loss for what would follow the last token."""
        return targets_of(inputs)[:, :-1] != IGNORED

    _weights_of_labels = token_weights

    def token_losses(self, model: Any, inputs: dict[str, Any]) -> TokenLosses:
        """By TRL's fused head, with the entropy and the accuracy of the same tokens."""
        inputs = {**inputs, "use_cache": False}
        if self.aux_loss_enabled:
            inputs["output_router_logits"] = True
        outputs = model(**inputs, fused_lm_head=True)
        if getattr(outputs, "log_probs", None) is None:
            raise PatchError(
                f"{type(self.model).__name__} returned no log_probs for fused_lm_head=True",
                why="the losses of the tokens are read from TRL's head.",
                fix="leave the model's forward as TRL has set it.",
            )
        losses = -outputs.log_probs
        if getattr(self.args, "loss_type", "nll") == "dft":
            # Dynamic fine-tuning (arXiv:2508.05629): each token's loss times its own probability, detached.
            losses = losses * outputs.log_probs.detach().exp()
        extra = self.router_aux_loss_coef * outputs.aux_loss if self.aux_loss_enabled else None
        metrics = {"entropy": outputs.entropy.detach(), "mean_token_accuracy": outputs.is_top1.detach()}
        if self._logits_wanted:
            with torch.no_grad():
                outputs = model(**without_labels(inputs))
        return TokenLosses(losses=losses, extra_loss=extra, metrics=metrics, outputs=outputs)

    def _close_window(self) -> int:
        tokens = super()._close_window()
        self._total_train_tokens += tokens
        return tokens

    def _means_to_log(self, means: dict[str, Any]) -> dict[str, Any]:
        if "router_loss" in means:
            means["aux_loss"] = means["router_loss"] / self.router_aux_loss_coef
        return {**means, "num_tokens": self._total_train_tokens}
