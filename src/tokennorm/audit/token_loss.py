"""What "right" means: the loss of every single token, by its definition.

The default is next-token cross-entropy with Hugging Face labels. A loop with another objective passes a function
of its own, ``token_loss(model, batch)``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokennorm.audit.samples import IGNORED
from tokennorm.errors import AuditError

__all__ = ["CausalTokenLoss", "TokenLoss", "as_token_loss", "call_model", "forward_keys"]

_INPUT_KEYS = ("input_ids", "attention_mask", "position_ids")


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The losses of the tokens of one batch.

    Args:
        loss: ``[T]``, the loss of each token, with graph. Unsupervised tokens may be left out.
        weight: ``[T]``, how much each token is due to count: 1 for a supervised one, 0 for an unsupervised one,
            anything else for a weighted objective. None means all ones.
        segment: ``[T]`` of integers: tokens of one batch with the same number have their weight solved together
            (a document, a block, or a single token). None means all of one batch.
        extras: losses that are no sum over tokens, by name: ``(value, weight)``, each a scalar that belongs to
            the micro-batch as a whole (a router loss), already multiplied by its coefficient. The right total is
            their weighted mean over the micro-batches; a weight of None is the number of supervised tokens.
        parts: parts of ``loss`` worth telling apart in a diagnosis, by name: ``[T]`` each (``label_smoothing``).
    """

    loss: Tensor
    weight: Tensor | None = None
    segment: Tensor | None = None
    extras: Mapping[str, tuple[Tensor, float | None]] = field(default_factory=dict)
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    def weight_or_ones(self) -> Tensor:
        """The weights ``[T]``, detached."""
        return torch.ones_like(self.loss) if self.weight is None else self.weight.detach()

    def segments(self) -> list[Tensor]:
        """The indices ``[t]`` of the tokens of each segment, in the order of the segments' numbers."""
        if self.segment is None:
            return [torch.arange(len(self.loss))] if len(self.loss) else []
        return [(self.segment == number).nonzero().flatten() for number in self.segment.unique()]


def as_token_loss(returned: Any) -> TokenLoss:
    """What a ``token_loss`` function returned, flattened and without the tokens that don't count.

    Args:
        returned: a :class:`TokenLoss`, ``loss``, ``(loss, weight)`` or ``(loss, weight, segment)``.

    Raises:
        AuditError: it is none of these, or the lengths differ.
    """
    if isinstance(returned, Tensor):
        returned = (returned,)
    if isinstance(returned, tuple) and 1 <= len(returned) <= 3:
        returned = TokenLoss(**dict(zip(("loss", "weight", "segment"), returned, strict=False)))
    if not isinstance(returned, TokenLoss):
        raise AuditError(
            f"token_loss returned a {type(returned).__name__}",
            fix="return (loss[T], weight[T], segment[T]), or a tokennorm.audit.TokenLoss.",
        )
    loss = returned.loss.flatten()
    weight = torch.ones_like(loss) if returned.weight is None else returned.weight.detach().flatten().to(loss)
    segment = torch.zeros_like(loss) if returned.segment is None else returned.segment.flatten()
    parts = {name: part.flatten() for name, part in returned.parts.items()}
    lengths = {len(loss), len(weight), len(segment), *(len(part) for part in parts.values())}
    if len(lengths) > 1:
        raise AuditError(
            f"token_loss returned tensors of different lengths: {sorted(lengths)} tokens",
            fix="give every token one loss, one weight and one segment.",
        )
    # Before any arithmetic: the loss of a token that doesn't count may be anything, NaN too.
    keep = weight != 0
    return TokenLoss(
        loss=loss[keep],
        weight=weight[keep],
        segment=segment[keep].to(torch.int64),
        extras=returned.extras,
        parts={name: part[keep] for name, part in parts.items()},
    )


@dataclass(frozen=True, kw_only=True)
class CausalTokenLoss:
    """Next-token cross-entropy of Hugging Face style batches: label s+1 is the target of position s.

    Args:
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        logits_dtype: cast the logits to this before the loss (a mistake to be recognised, not a recommendation).
    """

    label_smoothing: float = 0.0
    logits_dtype: torch.dtype | None = None

    def __call__(self, model: nn.Module, batch: Any) -> TokenLoss:
        """Losses of the supervised tokens of one batch, and the model's router loss if it has one."""
        outputs = call_model(model, batch)
        logits, labels = _logits(outputs)[:, :-1], batch["labels"][:, 1:]
        supervised = labels != IGNORED
        rows, targets = logits[supervised], labels[supervised]
        if self.logits_dtype is not None:
            rows = rows.to(self.logits_dtype)
        smoothing = self.label_smoothing
        loss = F.cross_entropy(rows, targets, reduction="none") * (1 - smoothing)
        parts = {}
        if smoothing:
            parts["label_smoothing"] = -smoothing * torch.log_softmax(rows, dim=-1).mean(-1)
            loss = loss + parts["label_smoothing"]
        return TokenLoss(loss=loss, extras=_router_extras(model, outputs), parts=parts)


def forward_keys(model: nn.Module) -> tuple[str, ...]:
    """Which of the usual inputs the model's ``forward`` takes by name."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return tuple(key for key in _INPUT_KEYS if takes_all or key in parameters)


def call_model(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """Call the model on the inputs of a batch that it takes; never on its labels."""
    known = [key for key in forward_keys(model) if key in batch]
    if "input_ids" not in known:
        return model(batch["input_ids"], **{key: batch[key] for key in known})
    return model(**{key: batch[key] for key in known})


def _logits(outputs: Any) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else None
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif logits is None:
        logits = getattr(outputs, "logits", None)
    if logits is None and isinstance(outputs, tuple) and outputs:
        logits = outputs[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise AuditError(
            f"the model returned a {type(outputs).__name__} without logits of shape [B, S, V]",
            fix="pass token_loss= to the audit: token_loss(model, batch) -> (loss[T], weight[T], segment[T]).",
        )
    return logits


def _router_extras(model: nn.Module, outputs: Any) -> dict[str, tuple[Tensor, float | None]]:
    """A Hugging Face mixture-of-experts model returns ``aux_loss``, not yet times its coefficient."""
    value = outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)
    coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", 1.0)
    if not isinstance(value, Tensor) or not value.requires_grad or not coefficient:
        return {}
    return {"router": (coefficient * value, None)}
