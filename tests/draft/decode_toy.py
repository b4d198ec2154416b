"""Small targets that don't repeat themselves, drafters for them, and a drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.draft.targets import tiny_target
from tokennorm.draft import ContextKV, DraftConfig, DraftModel, DraftVocabulary, target_weights

VOCAB, MASK = 40, 39


def lively_target(family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny target with weights large enough that its greedy output varies."""
    target = tiny_target(family, seed=seed, layers=2, dtype=dtype)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("bias"):
                parameter.copy_(0.02 * noise)
            else:
                parameter.copy_(0.5 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    return target


def drafter_for(target: Any, *, seed: int = 0, kind: type[DraftModel] = DraftModel, **options: Any) -> Any:
    """Random weights, also where fresh ones would be 0."""
    defaults: dict[str, Any] = {
        "target_layer_ids": (-1, 0, 1),
        "num_layers": 1,
        "block_size": 5,
        "markov_rank": 6,
        "mask_token_id": MASK,
    }
    config = DraftConfig.from_target(target, **defaults | options)
    vocabulary = None
    if size := config.draft_vocab_size:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:size]
        vocabulary = DraftVocabulary(ids.sort().values, VOCAB)
    drafter = kind(config, vocabulary=vocabulary).to(next(target.parameters()).dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    drafter.share_target(*target_weights(target), copy=True)
    return drafter


class Oracle(DraftModel):
    """Drafts the tokens of ``answer`` (whose first stands at position ``start``), except for some misses.

    Attributes:
        chance: that a slot holds the right token.
        contexts: what each draft was given.
    """

    answer: Sequence[int] = ()
    start: int = 0
    chance: float = 1.0
    seed: int = 0

    def know(self, answer: Sequence[int], start: int, chance: float = 1.0) -> Oracle:
        self.answer, self.start, self.chance = answer, start, chance
        self.contexts: list[ContextKV] = []
        self._generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            # With rows of one length, a row's own product is the largest.
            self.lm_head.weight.copy_(torch.nn.functional.normalize(self.lm_head.weight, dim=1))
        return self

    def draft_hidden(
        self, anchor_ids: Tensor, anchor_positions: Tensor, context: ContextKV, context_mask: Tensor | None = None
    ) -> Tensor:
        position = int(anchor_positions)
        assert self.answer[position - self.start] == int(anchor_ids), "the anchor is the last emitted token"
        self.contexts.append(context)
        first = self.config.first_supervised_slot
        rows = []
        for slot in range(self.config.block_size):
            place = position - self.start + slot + 1 - first
            token = self.answer[place] if place < len(self.answer) else 0
            if torch.rand((), generator=self._generator) >= self.chance:
                token = (token + 1) % VOCAB
            vocabulary = self.vocabulary
            draft = token if isinstance(vocabulary, int) else max(int(vocabulary.draft_of[token]), 0)
            rows.append(1e6 * self.lm_head.weight[draft])
        return torch.stack(rows).unsqueeze(0)


def prompts(count: int, *, seed: int = 0, longest: int = 12) -> list[Tensor]:
    """``[1, S]`` each, of 1 token or more."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(MASK, (1, length), generator=generator) for length in lengths]
