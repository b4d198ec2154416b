"""The log-sum-exp of the target's logits at each position: a number that spares a projection later."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokennorm.draft.target import target_weights
from tokennorm.loss import default_chunk_size
from tokennorm.loss.products import Products

__all__ = ["log_totals"]


@torch.no_grad()
def log_totals(target: nn.Module, last_hidden: Tensor, wanted: Tensor) -> Tensor:
    """``[T]`` float32 on the CPU: ``logsumexp(last_hidden @ head.T)`` where wanted, NaN elsewhere.

    Args:
        target: its head is used.
        last_hidden: ``[T, D]`` exactly as training will read it, rounded as the cache rounds.
        wanted: ``[T]`` bool.
    """
    head = target_weights(target)[1].detach()
    result = torch.full((last_hidden.shape[0],), torch.nan)
    rows = wanted.nonzero().squeeze(1)
    products = Products.of(head, head)
    weight = products.operand(head)
    for part in rows.split(default_chunk_size(rows.shape[0], head.shape[0], head.device)):
        states = last_hidden[part].to(head.device, head.dtype)
        out = torch.empty((part.shape[0], head.shape[0]), dtype=products.accumulate_dtype, device=head.device)
        logits = products.logits(products.operand(states), weight, None, out=out)
        result[part] = logits.logsumexp(dim=1).to("cpu", torch.float32)
    return result
