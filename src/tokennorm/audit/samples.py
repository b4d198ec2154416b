"""Tiny token samples, and the batches a loop under test gets from them.

A batch is in the style of Hugging Face: ``labels`` are not shifted yet, -100 is "not supervised". Padded rows
come with an ``attention_mask``; packed rows come without one, and ``position_ids`` restart at every document. The
first label of a packed document is -100, as Hugging Face's flattening collator has it, so that a plain shift by
one never crosses a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.errors import ConfigError

__all__ = ["LONG_SAMPLE", "NUM_SAMPLES", "UNSUPERVISED_SAMPLES", "Sample", "collate", "make_samples"]

IGNORED = -100
PADDING = 0
# Places in the pool of samples; layouts refer to them by number.
LONG_SAMPLE = 10
UNSUPERVISED_SAMPLES = (11, 12)
NUM_SAMPLES = 13
_SMALLEST_VOCABULARY = 8


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One document: token ids, and for each the label (its own id, or -100 where it is not to be learned)."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def supervised_tokens(self) -> int:
        """Labels that some position of this document predicts: all but an unpredictable first one."""
        return sum(label != IGNORED for label in self.labels[1:])


def make_samples(vocabulary_size: int, *, seed: int = 0) -> list[Sample]:
    """The pool that the layouts draw from: ten uneven samples, one very long, two without supervised tokens.

    Some samples begin with an unsupervised prompt, and some are supervised from their very first token, which
    tells a count made before the shift from one made after it.

    Args:
        vocabulary_size: ids are drawn from 1 to ``vocabulary_size - 1``; 0 is the padding.
        seed: of lengths and ids.
    """
    if vocabulary_size < _SMALLEST_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocabulary_size} tokens is too small for the audit",
            why="gradients of different samples must differ for their weights to be told apart.",
            fix=f"build the tiny model with at least {_SMALLEST_VOCABULARY} tokens, 29 is plenty.",
        )
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    def sample(prompt: int, answer: int) -> Sample:
        ids = torch.randint(1, vocabulary_size, (prompt + answer,), generator=generator).tolist()
        return Sample(input_ids=tuple(ids), labels=(IGNORED,) * prompt + tuple(ids[prompt:]))

    # Even places are short and start supervised; odd ones have a prompt and are up to five times as long.
    pool = [
        sample(0, draw(3, 6)) if place % 2 == 0 else sample(draw(1, 5), draw(4, 15))
        for place in range(LONG_SAMPLE)
    ]
    pool.append(sample(draw(2, 6), draw(45, 55)))
    pool.extend(sample(draw(3, 6), 0) for _ in UNSUPERVISED_SAMPLES)
    return pool


def collate(samples: Sequence[Sample], packed: bool) -> dict[str, Tensor]:
    """One micro-batch: padded rows ``[B, S]`` with a mask, or one packed row ``[1, S]`` with positions.

    Args:
        samples: one row each, or the documents of the pack, in order.
        packed: which of the two.
    """
    if packed:
        return {
            "input_ids": torch.tensor([[token for sample in samples for token in sample.input_ids]]),
            "position_ids": torch.tensor([[p for sample in samples for p in range(len(sample.input_ids))]]),
            "labels": torch.tensor([[label for s in samples for label in (IGNORED, *s.labels[1:])]]),
        }
    longest = max(len(sample.input_ids) for sample in samples)

    def rows(values: Sequence[Sequence[int]], filler: int) -> Tensor:
        return torch.tensor([[*row, *(filler,) * (longest - len(row))] for row in values])

    return {
        "input_ids": rows([sample.input_ids for sample in samples], PADDING),
        "attention_mask": rows([[1] * len(sample.input_ids) for sample in samples], 0),
        "labels": rows([sample.labels for sample in samples], IGNORED),
    }


def is_token_batch(batch: Any) -> bool:
    """Whether a batch has the keys that the catalogue of mistakes knows how to vary."""
    return (
        isinstance(batch, dict)
        and isinstance(batch.get("input_ids"), Tensor)
        and isinstance(batch.get("labels"), Tensor)
        and batch["input_ids"].shape == batch["labels"].shape
        and batch["labels"].dim() == 2
    )
