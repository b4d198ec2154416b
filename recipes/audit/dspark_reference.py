"""The DSpark objective by its definition, from all logits, one document at a time; formulas: docs/dspark.md.

Slow and plain on purpose. Of the package it uses the drafter's forward, whose gradient is what is audited; blocks,
weights, softmaxes and sums are written out here once more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokennorm.audit import TokenLoss
from tokennorm.draft import Blocks, DraftModel

__all__ = ["DSparkTokenLoss"]

_IGNORED = -100


@dataclass(kw_only=True)
class DSparkTokenLoss:
    """``token_loss`` of an audit: one entry per supervised slot of a single document.

    Every position before a supervised token starts a block; slot k proposes the token k + 1 places after it, as
    long as that and all before it are supervised.

    Attributes:
        target: folder of the target.
        gamma: a slot weighs exp(-k / gamma).
        ce: weight of the cross-entropy with the token.
        l1: of the distance between the drafter's and the target's distribution.
        confidence: of the confidence head's cross-entropy with the probability of acceptance, 1 - distance / 2.
    """

    target: Path
    gamma: float = 4.0
    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    _targets: dict[torch.dtype, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> TokenLoss:
        """Loss and weight of the slots of ``batch``, one document ``[1, S]`` with Hugging Face labels."""
        assert isinstance(model, DraftModel)
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        supervised = [place > 0 and label != _IGNORED for place, label in enumerate(labels)]
        anchors = [place for place in range(len(ids) - 1) if supervised[place + 1]]
        if not anchors:
            return TokenLoss(loss=torch.zeros(0, dtype=model.fc.weight.dtype))
        size = model.config.block_size
        slots = [(row, k) for row, a in enumerate(anchors) for k in range(size) if all(_window(supervised, a, k))]
        states, teacher = self._run_target(model, batch["input_ids"])
        output = model(
            blocks=_blocks(ids, anchors, size),
            features=states,
            position_ids=torch.arange(len(ids))[None],
            documents=torch.zeros(1, len(ids), dtype=torch.int64),
        )
        logits = output.hidden[0] @ model.lm_head.weight.T
        if output.latents is not None:
            logits = logits + output.latents[0] @ output.markov_weight.T
        rows, slot = torch.tensor(slots).T
        positions = torch.tensor([anchors[row] + k for row, k in slots])
        draft = torch.log_softmax(logits[rows, slot], dim=-1)
        tokens = torch.tensor(ids)[positions + 1]
        distance = (draft.exp() - teacher[positions]).abs().sum(-1)
        loss = -self.ce * draft.gather(1, tokens[:, None])[:, 0] + self.l1 * distance
        if output.confidence is not None:
            accepted = (1 - distance / 2).clamp(0, 1).detach()
            loss = loss + self.confidence * F.binary_cross_entropy_with_logits(
                output.confidence[0][rows, slot], accepted, reduction="none"
            )
        weight = torch.tensor([math.exp(-k / self.gamma) for _, k in slots], dtype=torch.float64)
        return TokenLoss(loss=loss, weight=weight)

    @torch.no_grad()
    def _run_target(self, drafter: DraftModel, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the drafter reads, ``[1, S, F]``, and the target's probabilities ``[S, V]``; in its dtype."""
        dtype = drafter.fc.weight.dtype
        if dtype not in self._targets:
            from transformers import AutoModelForCausalLM

            self._targets[dtype] = AutoModelForCausalLM.from_pretrained(self.target, dtype=dtype).eval()
        outputs = self._targets[dtype](input_ids=input_ids, output_hidden_states=True, use_cache=False)
        states = [outputs.hidden_states[layer + 1] for layer in drafter.config.target_layer_ids]
        return torch.cat(states, dim=-1), outputs.logits[0].softmax(-1)


def _window(supervised: list[bool], anchor: int, slot: int) -> list[bool]:
    """Are the tokens that slots 0 to ``slot`` propose there, and supervised?"""
    return [place < len(supervised) and supervised[place] for place in range(anchor + 1, anchor + slot + 2)]


def _blocks(ids: list[int], anchors: list[int], size: int) -> Blocks:
    """The drafter's input: a block for each anchor. Its labels are not used here."""

    def token(place: int, otherwise: int) -> int:
        return ids[place] if place < len(ids) else otherwise

    previous = [[token(a + k, ids[a]) for k in range(size)] for a in anchors]
    following = [[token(a + k + 1, 0) for k in range(size)] for a in anchors]
    return Blocks(
        anchors=torch.tensor([anchors]),
        keep=torch.ones(1, len(anchors), dtype=torch.bool),
        anchor_ids=torch.tensor([[ids[a] for a in anchors]]),
        previous_ids=torch.tensor([previous]),
        target_ids=torch.tensor([following]),
        eval_mask=torch.ones(1, len(anchors), size, dtype=torch.bool),
        sequence_length=len(ids),
        first_supervised_slot=0,
    )
