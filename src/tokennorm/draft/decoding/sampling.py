"""Choosing and verifying tokens, for any number of independent rows. A decoder calls it with one.

Rejection sampling keeps the target's distribution (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318): a token x drafted from q is accepted with probability ``min(1, p(x) / q(x))``; in place of the first
that is not, one is drawn from the normalised positive part of ``p - q``; where all are accepted, one more is drawn
from p. The last is the same rule with q = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["draw", "probabilities", "verify_greedy", "verify_sampled"]


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """``softmax(logits / temperature)`` over the last dimension, in float32 (float64 for float64).

    Args:
        logits: ``[..., V]``.
        temperature: above 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The largest becomes 0 before the division: a tiny temperature would make infinities of logits.
    return ((wide - wide.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index per row, with probability proportional to its weight; never one of weight 0.

    Args:
        weights: ``[N, V]``, not negative, not all 0.
        uniform: ``[N]`` in [0, 1).

    Returns:
        ``[N]`` int64: the first index whose cumulative weight exceeds ``uniform`` of the total.
    """
    # In float64: float32 sums of a large vocabulary would lose the rare tokens.
    cumulative = weights.to(torch.float64).cumsum(dim=-1).contiguous()
    total = cumulative[:, -1:].contiguous()
    found = torch.searchsorted(cumulative, uniform.to(torch.float64).unsqueeze(-1) * total, right=True)
    # A product that was rounded up to the total would fall off the end.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last).squeeze(-1)


def verify_greedy(best: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens as long as they are the target's likeliest.

    Args:
        best: ``[N, P + 1]``, the target's likeliest tokens at the drafted places and after them.
        drafted: ``[N, P]``.

    Returns:
        How many are accepted, ``[N]``, and the target's own token after those, ``[N]``.
    """
    accepted = (best[:, :-1] == drafted).cumprod(dim=1).sum(dim=1)
    return accepted, best.gather(1, accepted.unsqueeze(1)).squeeze(1)


def verify_sampled(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept or replace tokens drawn from the drafter, so that what is emitted follows the target.

    Args:
        target: ``[N, P + 1, V]``, the target's probabilities at the drafted places and after them.
        drafter: ``[N, P, V]``, the probabilities that each token was drawn from: 0 outside a reduced vocabulary.
        drafted: ``[N, P]``.
        uniforms: ``[N, P]`` in [0, 1), for accepting.
        last_uniform: ``[N]`` in [0, 1), for the token after the accepted ones.

    Returns:
        How many are accepted, ``[N]``, and the token after those, ``[N]``.
    """
    proposals = drafted.shape[1]
    place = drafted.unsqueeze(-1)
    p = target[:, :-1].gather(-1, place).squeeze(-1)
    q = drafter.gather(-1, place).squeeze(-1)
    accepted = (uniforms * q < p).cumprod(dim=1).sum(dim=1)
    row = accepted.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
    wanted = target.gather(1, row).squeeze(1)
    residual = wanted
    if proposals:
        q_row = drafter.gather(1, row.clamp(max=proposals - 1)).squeeze(1)
        rejected = (accepted < proposals).unsqueeze(-1)
        residual = torch.where(rejected, (wanted - q_row).clamp(min=0), wanted)
        # Where q was rejected, p exceeds q somewhere, but perhaps by less than a rounding.
        residual = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, wanted)
    return accepted, draw(residual, last_uniform)
