"""The DSpark objective by definition, one slot at a time in float64: the oracle of these tests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALPHAS = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}
DIAGNOSTICS = ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias")


@dataclass(frozen=True)
class Reference:
    """``nums`` with graph by term, the shared denominator, and diagnostics as (num, den)."""

    nums: Mapping[str, Tensor]
    den: float
    diagnostics: Mapping[str, tuple[float, float]]

    def loss_sum(self, alphas: Mapping[str, float] = ALPHAS) -> Tensor:
        return sum((alphas[name] * num for name, num in self.nums.items()), torch.zeros((), dtype=torch.float64))


def naive_dspark(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    eval_mask: Tensor,
    keep: Tensor,
    confidence: Tensor | None,
    *,
    gamma: float | None,
    first: int,
) -> Reference:
    """Everything from full-vocabulary logits ``[B, A, K, V]``; -inf logits are tokens that can't be proposed."""
    zero = torch.zeros((), dtype=torch.float64)
    nums = {"ce": zero, "l1": zero} | ({} if confidence is None else {"confidence": zero})
    pairs: dict[str, list[float]] = {"tau": [0.0, 0.0]} | {name: [0.0, 0.0] for name in DIAGNOSTICS}
    den = 0.0
    batch, anchors, slots, _ = draft_logits.shape
    for proposal in range(1, slots - first + 1):
        pairs[f"accept_rate_{proposal}"] = [0.0, 0.0]
    for b in range(batch):
        for a in range(anchors):
            survival, predicted, tau, any_slot = 1.0, 1.0, 1.0, False
            for k in range(first, slots):
                if not (eval_mask[b, a, k] and keep[b, a]):
                    survival = predicted = 0.0
                    continue
                any_slot = True
                decay = math.exp(-(k - first) / gamma) if gamma else 1.0
                weight = float(torch.tensor(decay, dtype=torch.float32))
                log_q = draft_logits[b, a, k].double().log_softmax(0)
                p = target_logits[b, a, k].detach().double().softmax(0)
                l1 = (log_q.exp() - p).abs().sum()
                nums["ce"] = nums["ce"] - weight * log_q[labels[b, a, k]]
                nums["l1"] = nums["l1"] + weight * l1
                accept = min(max(1 - float(l1.detach()) / 2, 0.0), 1.0)
                den += weight
                pairs[f"accept_rate_{k - first + 1}"][0] += accept
                pairs[f"accept_rate_{k - first + 1}"][1] += 1
                survival *= accept
                tau += survival
                if confidence is not None:
                    c = confidence[b, a, k].double()
                    nums["confidence"] = nums["confidence"] - weight * (
                        accept * torch.nn.functional.logsigmoid(c)
                        + (1 - accept) * torch.nn.functional.logsigmoid(-c)
                    )
                    sigma = float(c.detach().sigmoid())
                    predicted *= sigma
                    values = (abs(sigma - accept), sigma - accept, predicted - survival)
                    for name, value in zip(DIAGNOSTICS, values, strict=True):
                        pairs[name][0] += weight * value
                        pairs[name][1] += weight
            if any_slot:
                pairs["tau"][0] += tau
                pairs["tau"][1] += 1
    if confidence is None:
        for name in DIAGNOSTICS:
            del pairs[name]
    return Reference(nums, den, {name: (num, den) for name, (num, den) in pairs.items()})


def relative_error(got: Tensor, want: Tensor) -> float:
    """Relative L2 distance in float64; absolute where the reference is 0."""
    got, want = got.detach().double(), want.detach().double()
    norm = float(want.norm())
    return float((got - want).norm()) / (norm or 1.0)
