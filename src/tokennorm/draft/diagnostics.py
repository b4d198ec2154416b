"""What a drafter's acceptance and confidence come to, as sums that add up over micro-batches and ranks.

Teacher-forced estimates: they tell how training goes. Acceptance in service is measured by decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["acceptance_sums", "wide_sum"]


def wide_sum(values: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum in float64 where the device has it."""
    dtype = values.dtype if values.device.type == "mps" else torch.float64
    return values.sum(dtype=dtype) if dim is None else values.sum(dim=dim, dtype=dtype)


@torch.no_grad()
def acceptance_sums(
    *,
    accept_rate: Tensor | None,
    supervised: Tensor,
    weights: Tensor,
    confidence: Tensor | None,
    first_supervised_slot: int,
) -> dict[str, Tensor]:
    """Numerators and denominators of the diagnostics; zeros without a teacher.

    With ``a`` the accept rate, ``c`` the confidence logit, ``w`` the weight of a slot, products over the slots of
    a block from the first supervised one on (all slots before it are left out):

    - ``accept_rate_pos``: ``sum a / number of supervised slots``, by proposal, without decay;
    - ``tau``: ``sum over blocks (1 + sum_k prod_{j<=k} a_j) / number of blocks`` with a supervised slot, the
      expected tokens per round; the 1 is the verified token that comes with every round;
    - ``confidence_abs_error``, ``confidence_bias``: ``sum w |sigmoid(c) - a|``, ``sum w (sigmoid(c) - a)``;
    - ``confidence_cumprod_bias``: ``sum w (prod sigmoid(c) - prod a)``; the three share ``confidence_diag_den``,
      ``sum w``.

    Args:
        accept_rate: ``[B, A, K]`` or None. What stands in unsupervised slots is not read.
        supervised: ``[B, A, K]`` bool, of kept blocks only.
        weights: ``[B, A, K]``.
        confidence: ``[B, A, K]`` logits or None.
        first_supervised_slot: the layout.

    Returns:
        ``accept_rate_pos_num``/``_den`` ``[K - first_supervised_slot]``, the others 0-d; wide sums.
    """
    proposals = (..., slice(first_supervised_slot, None))
    supervised, weights = supervised[proposals], weights[proposals]
    zero = wide_sum(weights.new_zeros(1))
    per_slot = zero.expand(supervised.shape[-1]).clone()
    names = ("tau_num", "tau_den", "confidence_abs_error_num", "confidence_bias_num")
    names += ("confidence_cumprod_bias_num", "confidence_diag_den")
    sums = {"accept_rate_pos_num": per_slot, "accept_rate_pos_den": per_slot.clone()}
    sums |= {name: zero.clone() for name in names}
    if accept_rate is None:
        return sums

    # Before the arithmetic: an unsupervised slot may hold NaN.
    accept = torch.where(supervised, accept_rate[proposals], 0)
    sums["accept_rate_pos_num"] = wide_sum(accept, dim=(0, 1))
    sums["accept_rate_pos_den"] = wide_sum(supervised.to(weights.dtype), dim=(0, 1))
    survival = accept.cumprod(dim=-1)
    blocks = supervised.any(dim=-1).to(survival.dtype)
    # A block without a supervised slot has no survival to add either.
    sums["tau_num"] = wide_sum(blocks) + wide_sum(survival)
    sums["tau_den"] = wide_sum(blocks)
    if confidence is None:
        return sums

    logits = torch.where(supervised, confidence[proposals], 0).to(accept.dtype)
    probability = torch.where(supervised, logits.sigmoid(), 0)
    error = probability - accept
    sums["confidence_abs_error_num"] = wide_sum(error.abs() * weights)
    sums["confidence_bias_num"] = wide_sum(error * weights)
    sums["confidence_cumprod_bias_num"] = wide_sum((probability.cumprod(dim=-1) - survival) * weights)
    sums["confidence_diag_den"] = wide_sum(weights)
    return sums
