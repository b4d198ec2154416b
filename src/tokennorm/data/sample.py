"""One document as tokens and mask, and what became of the documents of a set."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokennorm.errors import DataError

__all__ = ["IGNORE_INDEX", "DatasetStatistics", "Sample"]

IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One document.

    Attributes:
        input_ids: [L] int64.
        supervised: [L] bool, the assistant writes this token; in plain text every token is supervised.
        source: where it comes from.
        group: name of the source that its loss is reported under; None: only in the total.
    """

    input_ids: Tensor
    supervised: Tensor
    source: str
    group: str | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def shift_labels(self) -> Tensor:
        """[L] int64: the token that each position must predict, -100 where it is not supervised.

        The last position predicts nothing, and nothing predicts the first token.
        """
        labels = torch.full_like(self.input_ids, IGNORE_INDEX)
        labels[:-1] = torch.where(self.supervised[1:], self.input_ids[1:], IGNORE_INDEX)
        return labels

    @property
    def num_supervised(self) -> int:
        """Supervised tokens as the loss sees them: ``(shift_labels() != -100).sum()``."""
        return int(self.supervised[1:].sum())

    def check_vocabulary(self, size: int) -> None:
        """Check the token ids against the rows of a model's embedding.

        Raises:
            DataError: an id that has none.
        """
        largest = int(self.input_ids.max())
        if largest >= size:
            raise DataError(
                f"{self.source}: token id {largest}, but the model's embedding has {size} rows",
                why="the tokenizer is not the one that the model was made with",
                fix="load model and tokenizer from the same folder, or resize the embedding "
                "(model.resize_token_embeddings)",
            )


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """What became of the conversations; every one of them makes samples, or is counted as dropped or bad.

    Attributes:
        num_conversations: conversations (or texts) given.
        num_samples: samples made of them.
        num_dropped: conversations whose supervised tokens were all cut off by ``max_length``.
        num_truncated: samples that lost their tail to ``max_length``.
        num_without_end: conversations with an assistant turn that the template closes with no end token.
        num_special_text: conversations whose text spells out a special token of the tokenizer.
        supervised_tokens: of all samples, as the loss sees them.
        total_tokens: of all samples.
        lost_supervised_tokens: supervised tokens cut off, those of dropped conversations included.
        num_bad: conversations that can't be masked and were left out.
    """

    num_conversations: int
    num_samples: int
    num_dropped: int
    num_truncated: int
    num_without_end: int
    num_special_text: int
    supervised_tokens: int
    total_tokens: int
    lost_supervised_tokens: int
    num_bad: int = 0

    def __add__(self, other: DatasetStatistics) -> DatasetStatistics:
        """The statistics of two sets together: every number is a count."""
        return DatasetStatistics(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    def warnings(self) -> list[str]:
        """One sentence for each thing that a user should know before training."""
        found = []
        if self.num_dropped:
            found.append(
                f"{self.num_dropped:,} of {self.num_conversations:,} conversations are dropped: the assistant's "
                "tokens all lie beyond max_length"
            )
        if self.num_truncated:
            found.append(
                f"{self.num_truncated:,} of {self.num_conversations:,} conversations are cut at max_length "
                f"({self.lost_supervised_tokens:,} supervised tokens lost in all)"
            )
        if self.num_without_end:
            found.append(
                f"{self.num_without_end:,} conversations have an assistant turn without an end token: nothing "
                "teaches the model to stop there"
            )
        if self.num_special_text:
            found.append(
                f"{self.num_special_text:,} conversations spell out a special token in a message; the tokenizer "
                "reads it as that token"
            )
        return found
