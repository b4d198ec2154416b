"""From a filled block to its proposals: token by token, each knowing the ones before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.draft.model import DraftModel

__all__ = ["Proposal", "propose"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The drafted tokens of one block per row, ``P`` of them: ``config.num_proposals`` or fewer.

    Attributes:
        token_ids: ``[B, P]`` int64, in the target's vocabulary.
        draft_ids: ``[B, P]`` int64, in the drafter's.
        logits: ``[B, P, V_d]``, Markov bias included: what each token was chosen from.
        confidence: ``[B, P]`` logits, or None without a confidence head.
    """

    token_ids: Tensor
    draft_ids: Tensor
    logits: Tensor
    confidence: Tensor | None


def propose(
    drafter: DraftModel,
    hidden: Tensor,
    anchor_ids: Tensor,
    *,
    choose: Callable[[Tensor, int], Tensor] | None = None,
    keep_going: Callable[[Tensor, int], bool] | None = None,
) -> Proposal:
    """Choose the tokens of a block from left to right.

    Args:
        drafter: with or without Markov and confidence heads.
        hidden: ``[B, K, D]`` from :meth:`DraftModel.draft_hidden`.
        anchor_ids: ``[B]``.
        choose: ``(logits [B, V_d], number of the proposal from 0) -> draft tokens [B]``; by default the likeliest.
        keep_going: ``(confidence logits [B], number of the proposal) -> bool``, asked about a proposal before it
            is made; False ends the block without it. It sees nothing that comes later, so that the length of what
            is verified can depend on it without a loss of exactness. Never asked without a confidence head.
    """
    hidden = hidden[:, drafter.config.first_supervised_slot :]
    # All at once: with one row the head's weights are read once instead of P times.
    base = drafter.lm_head(hidden)
    markov, confidence_head = drafter.markov_head, drafter.confidence_head
    token, state = anchor_ids, None
    tokens: list[Tensor] = []
    logits: list[Tensor] = []
    confidences: list[Tensor] = []
    for number in range(hidden.shape[1]):
        here = hidden[:, number]
        embedded = None if markov is None else markov.embed(token)
        if confidence_head is not None:
            confidence = confidence_head(here, embedded)
            if keep_going is not None and not keep_going(confidence, number):
                break
            confidences.append(confidence)
        scores = base[:, number]
        if markov is not None and embedded is not None:
            latent, state = markov.step(embedded, here, state)
            scores = scores + markov.bias(latent)
        chosen = scores.argmax(dim=-1) if choose is None else choose(scores, number)
        token = drafter.target_ids(chosen)
        tokens.append(chosen)
        logits.append(scores)
    rows = anchor_ids.shape[0]
    draft_ids = torch.stack(tokens, dim=1) if tokens else anchor_ids.new_empty((rows, 0))
    confidence = torch.stack(confidences, dim=1) if confidences else hidden.new_empty((rows, 0))
    return Proposal(
        token_ids=drafter.target_ids(draft_ids),
        draft_ids=draft_ids,
        logits=torch.stack(logits, dim=1) if logits else base[:, :0],
        confidence=None if confidence_head is None else confidence,
    )
