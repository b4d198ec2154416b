"""The losses of the tokens of one micro-batch, and how many of them count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokennorm.errors import DataError, PatchError

__all__ = [
    "IGNORED",
    "TokenLosses",
    "count_of",
    "losses_of_logits",
    "losses_of_model",
    "targets_of",
    "total_sum",
    "total_tokens",
    "weighted_losses",
    "without_labels",
]

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class TokenLosses:
    """What one micro-batch costs, token by token.

    Attributes:
        losses: ``[B, S]`` or ``[B*S]`` in the same order, with graph; 0 where a token is not supervised.
        extra_loss: 0-d, what the model adds to its loss by itself (a router loss, coefficient included), or None.
        metrics: name -> ``[B, S]`` or ``[B*S]``, detached, 0 where not supervised; logged as means over the
            supervised tokens.
        outputs: what the model returned, for callers of ``compute_loss(return_outputs=True)``.
    """

    losses: Tensor
    extra_loss: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Any = None


def targets_of(inputs: Mapping[str, Any]) -> Tensor:
    """What each position predicts, ``[B, S]``, -100 for nothing: ``shift_labels``, or ``labels`` shifted by one.

    Raises:
        DataError: the batch has neither.
    """
    shifted = inputs.get("shift_labels")
    if shifted is not None:
        return shifted
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        raise DataError(
            f"a batch has the keys {sorted(inputs)}, and no `labels` [B, S]",
            why="supervised tokens are counted from the labels that the loss reads.",
            fix="let the data collator return labels, e.g. DataCollatorForLanguageModeling(mlm=False).",
        )
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def total_tokens(inputs: Mapping[str, Any], weights: Tensor) -> int | Tensor:
    """Tokens that are not padding, as far as the batch says; a 0-d tensor stays on its device.

    Args:
        inputs: the batch.
        weights: of its tokens, ``[B, S]``.
    """
    mask = inputs.get("attention_mask")
    return mask.sum() if isinstance(mask, Tensor) and mask.dim() == 2 else weights.numel()


def without_labels(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs with which a model returns logits and no loss."""
    return {key: value for key, value in inputs.items() if key not in ("labels", "shift_labels")}


def losses_of_model(model: Any, inputs: Mapping[str, Any]) -> TokenLosses:
    """By a model that was patched on request, chunk by chunk.

    Raises:
        PatchError: the patch is gone.
    """
    outputs = model(**inputs, token_losses=True)
    losses = outputs.loss
    if losses.dim() != 1 or losses.numel() != targets_of(inputs).numel():
        raise PatchError(
            f"the model returned a loss of shape {list(losses.shape)} where losses of tokens are expected",
            why="somebody removed the patch that the trainer had applied, or replaced the model's forward.",
            fix="leave the trainer's model patched; without token_losses=True it behaves as if it were not.",
        )
    return TokenLosses(losses=losses, extra_loss=outputs.extra_loss, outputs=outputs)


def losses_of_logits(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Losses ``[B*S]`` from logits ``[B, S, V]`` and targets ``[B, S]``; rows without target take no part.

    Label smoothing as transformers' ``LabelSmoother`` has it: ``(1 - e) * nll + e * mean over V of -log p``.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = targets.flatten().to(logits.device)
    rows = (targets != IGNORED).nonzero().flatten()
    losses = F.cross_entropy(
        logits.flatten(0, 1).index_select(0, rows),
        targets.index_select(0, rows),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.new_zeros(len(targets)).index_copy(0, rows, losses)


def weighted_losses(part: TokenLosses, weights: Tensor) -> Tensor:
    """Losses times weights, flat; what does not count is left out before the product (it may be NaN)."""
    losses, weights = part.losses.flatten(), weights.flatten()
    losses = torch.where(weights != 0, losses, torch.zeros_like(losses))
    return losses if weights.dtype == torch.bool else losses * weights.to(losses)


def count_of(weights: Tensor) -> Tensor:
    """0-d: how many tokens count, or the sum of their weights."""
    return weights.sum() if weights.dtype == torch.bool else weights.sum(dtype=torch.float64)


def total_sum(values: Tensor) -> Tensor:
    """0-d detached sum, in float64 where the device has it: a running sum in float32 is off by 1e-6."""
    values = values.detach()
    return values.float().sum() if values.device.type == "mps" else values.sum(dtype=torch.float64)
