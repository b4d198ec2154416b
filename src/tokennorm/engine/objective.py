"""What a micro-batch is trained on: sums with their graph, never means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tokennorm.errors import PatchError
from tokennorm.loss import LossTerm, RatioSum

__all__ = ["Batch", "CausalLMObjective", "Objective", "ObjectiveOutput"]

Batch = Mapping[str, Any]
"""A micro-batch: tensors for the model, and the host integers ``effective_tokens`` and ``total_tokens``."""

_MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask", "shift_labels")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOutput:
    """The sums of one micro-batch.

    Attributes:
        loss_sum: 0-d tensor with graph: the per-token losses of the supervised tokens, added up (nats).
        extra_terms: further terms of the objective by name, e.g. ``{"router": LossTerm(...)}``.
        metrics: detached pairs for the log; every rank and micro-batch gives the same names.
        denominator: what ``loss_sum`` is counted in, where that is not the batch's ``effective_tokens``: a sum of
            token weights (a float or a 0-d tensor without graph).
        token_losses: detached losses per token, for the file about a micro-batch that the loss guard refuses.
        judged: 0-d and detached, what the loss guard judges where that is not ``loss_sum``: NaN when anything that
            backward multiplies by is not finite, though the loss itself is.
    """

    loss_sum: Tensor
    extra_terms: Mapping[str, LossTerm] = field(default_factory=dict)
    metrics: Mapping[str, RatioSum] = field(default_factory=dict)
    denominator: float | Tensor | None = None
    token_losses: Tensor | None = None
    judged: Tensor | None = None

    def count(self, batch: Batch) -> int | float | Tensor:
        """The denominator of ``loss_sum`` on ``batch``."""
        return batch["effective_tokens"] if self.denominator is None else self.denominator


class Objective(Protocol):
    """Runs the model on one micro-batch and returns sums; it must not divide by any count."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        """Return the sums of ``batch``; under DDP, ``model`` is the wrapper and is called exactly once."""
        ...


class CausalLMObjective:
    """Next-token cross-entropy of a Hugging Face causal LM patched to return per-token losses.

    The batch holds ``input_ids``, ``position_ids`` and already shifted ``shift_labels`` (``[B, S]`` int64, -100
    where unsupervised), and ``attention_mask`` unless it is packed. A router loss that the family adds becomes
    the term "router": its value on each micro-batch, weighted by the micro-batch's supervised tokens.

    Args:
        model_kwargs: further keywords of the model. The cache is off by default: with one, transformers does
            not isolate packed documents from each other.
        groups: names of the groups of tokens whose losses are reported as metrics ``loss/<name>``. The batch then
            holds ``groups``, [B, S] int64: the place of each position's group among the names, -1 for none. A
            batch without it (a dummy) counts nothing.
    """

    def __init__(self, model_kwargs: Mapping[str, Any] | None = None, *, groups: Sequence[str] = ()) -> None:
        self.model_kwargs = {"use_cache": False} if model_kwargs is None else dict(model_kwargs)
        self.groups = tuple(groups)

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        """Return the summed loss of the batch and, where the model has one, its router term.

        Raises:
            PatchError: the model returned anything but one loss per position.
        """
        inputs = {name: batch[name] for name in _MODEL_INPUTS if name in batch}
        # The host knows the count: with it, the loss finds the supervised rows without asking the device.
        outputs = model(**inputs, num_supervised=batch["effective_tokens"], **self.model_kwargs)
        loss: Tensor | None = outputs["loss"]
        if loss is None or loss.numel() != batch["shift_labels"].numel():
            raise PatchError(
                f"the model returned {'no loss' if loss is None else f'a loss of shape {list(loss.shape)}'} for "
                f"labels of shape {list(batch['shift_labels'].shape)}; one loss per position was expected",
                why="a reduced loss is already divided by the tokens of one micro-batch: that can't be undone",
                fix="call model = kit.apply_chunked_token_loss_patch(model) before wrapping it in DDP",
            )
        extra = outputs.get("extra_loss")
        # The sum is taken directly on the returned loss: its gradient is then a broadcast scalar, which the
        # operator recognises by its stride, without reading values.
        loss_sum = loss.sum()
        terms = {} if extra is None else {"router": _router_term(extra, batch["effective_tokens"], loss_sum)}
        return ObjectiveOutput(
            loss_sum=loss_sum,
            extra_terms=terms,
            metrics=_group_losses(loss.detach(), batch, self.groups),
            token_losses=loss.detach(),
        )

    def dummy(self, batch: Batch) -> Batch:
        """A micro-batch of two tokens, none supervised, to run in place of ``batch``, of whose values it has none.

        With the inputs of ``batch`` and no labels, a NaN of its forward would still reach the gradients: backward
        multiplies it by zero, and that is NaN.
        """
        ids = torch.zeros_like(batch["input_ids"][:1, :1]).expand(1, 2).contiguous()
        blank: dict[str, Any] = {"input_ids": ids, "shift_labels": torch.full_like(ids, -100)}
        if "position_ids" in batch:
            blank["position_ids"] = torch.arange(2, device=ids.device)[None]
        if "attention_mask" in batch:
            blank["attention_mask"] = torch.ones_like(ids, dtype=batch["attention_mask"].dtype)
        return {**blank, "effective_tokens": 0, "total_tokens": 0}


def _group_losses(losses: Tensor, batch: Batch, names: Sequence[str]) -> dict[str, RatioSum]:
    """Loss sum and supervised tokens of each group, without a wait for the device."""
    groups: Tensor | None = batch.get("groups")
    if not names or groups is None:
        return {f"loss/{name}": RatioSum(0.0, 0) for name in names}
    wide = torch.float32 if losses.device.type == "mps" else torch.float64
    # One place more, for what belongs to no group; unsupervised positions go there too, whatever their loss is.
    nowhere = len(names)
    places = torch.where((groups >= 0) & (batch["shift_labels"] != -100), groups, nowhere).flatten()
    sums = torch.zeros(nowhere + 1, dtype=wide, device=losses.device).index_add_(
        0, places, losses.flatten().to(wide)
    )
    counts = torch.zeros_like(sums).index_add_(0, places, torch.ones_like(losses.flatten(), dtype=wide))
    return {f"loss/{name}": RatioSum(sums[k], counts[k]) for k, name in enumerate(names)}


def _router_term(extra_loss: Tensor, effective_tokens: int, loss_sum: Tensor) -> LossTerm:
    if effective_tokens == 0:
        # A case, not a factor: a router loss over no token may be NaN, and 0 * NaN is NaN. The sum of no losses
        # is a zero that has the whole model in its graph.
        return LossTerm(numerator=loss_sum * 0.0, denominator=0, weight=1.0)
    # In half precision the product with a token count would lose its last digits, or overflow.
    wide = extra_loss.to(torch.promote_types(extra_loss.dtype, torch.float32))
    return LossTerm(numerator=wide * effective_tokens, denominator=effective_tokens, weight=1.0)
