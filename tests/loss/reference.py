"""A linear cross-entropy by definition, one row at a time in the reader's head: the oracle of these tests."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100


def naive_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Per-token losses in the dtype of the inputs, all logits at once, only supervised rows touched."""
    rows = (labels != IGNORE).nonzero().squeeze(1)
    logits = hidden[rows] @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_q = logits - logits.logsumexp(dim=-1, keepdim=True)
    nll = -log_q[torch.arange(len(rows)), labels[rows]]
    losses = (1 - label_smoothing) * nll - label_smoothing * log_q.mean(dim=-1)
    losses = losses + z_loss * logits.logsumexp(dim=-1) ** 2
    if token_weights is not None:
        losses = losses * token_weights[rows].to(losses.dtype)
    return torch.zeros(len(labels), dtype=losses.dtype).index_put((rows,), losses)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance, in float64."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())
