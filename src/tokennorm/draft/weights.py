"""The weight of a slot: how much its losses count."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokennorm.errors import LossUsageError

__all__ = ["slot_weights"]


def slot_weights(supervised: Tensor, *, loss_decay_gamma: float | None, first_supervised_slot: int = 0) -> Tensor:
    """``w = supervised * exp(-max(k - first_supervised_slot, 0) / gamma)``, float32 ``[..., K]``.

    The decay counts proposals, so the first proposed token has weight 1 in both layouts: a mistake there costs the
    whole block, one at the end only itself (DSpark, arXiv 2607.05147).

    Args:
        supervised: ``[..., K]`` bool.
        loss_decay_gamma: proposals until the weight has fallen to 1/e; None, 0 or negative: no decay.
        first_supervised_slot: the layout.

    Raises:
        LossUsageError: gamma is NaN.
    """
    weights = supervised.to(torch.float32)
    if loss_decay_gamma is None or loss_decay_gamma <= 0:
        return weights
    if math.isnan(loss_decay_gamma):
        raise LossUsageError("loss_decay_gamma is NaN", fix="pass None for no decay.")
    slot = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    decay = torch.exp(-(slot - first_supervised_slot).clamp(min=0) / float(loss_decay_gamma))
    return weights * decay
