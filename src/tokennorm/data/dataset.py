"""Encoded chats: samples with exact counts, ready to be packed or padded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from tokennorm.data.chat import ChatEncoder
from tokennorm.data.conversation import Conversation
from tokennorm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE_INDEX", "ChatDataset", "DatasetStatistics", "Progress", "Sample", "check_max_length"]

IGNORE_INDEX = -100
Progress = Callable[[int, int], None]
"""Called with (done, total) conversations."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One document.

    Attributes:
        input_ids: [L] int64.
        supervised: [L] bool, the assistant writes this token.
        source: where it comes from.
    """

    input_ids: Tensor
    supervised: Tensor
    source: str

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


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics:
    """What became of the conversations; every one of them is either a sample or counted as dropped.

    Attributes:
        num_conversations: conversations given.
        num_samples: samples made of them.
        num_dropped: conversations whose supervised tokens were all cut off by ``max_length``.
        num_truncated: samples that lost their tail to ``max_length``.
        num_without_end: conversations with an assistant turn that the template closes with no end token.
        num_special_text: conversations whose text spells out a special token of the tokenizer.
        supervised_tokens: of all samples, as the loss sees them.
        total_tokens: of all samples.
        lost_supervised_tokens: supervised tokens cut off, those of dropped conversations included.
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


class ChatDataset(Sequence[Sample]):
    """Samples made from conversations, with their statistics.

    Build one with :meth:`encode`, or from samples of your own.
    """

    def __init__(self, samples: Iterable[Sample], statistics: DatasetStatistics | None = None) -> None:
        self._samples = list(samples)
        self.lengths = [len(sample) for sample in self._samples]
        self.supervised_lengths = [sample.num_supervised for sample in self._samples]
        if not sum(self.supervised_lengths):
            raise DataError(
                f"no supervised token in the whole set ({len(self._samples)} samples)",
                why="there is nothing to train on or to evaluate",
                fix="check that the assistant's messages are there, and raise max_length if they begin beyond it",
            )
        self.statistics = statistics or DatasetStatistics(
            num_conversations=len(self._samples),
            num_samples=len(self._samples),
            num_dropped=0,
            num_truncated=0,
            num_without_end=0,
            num_special_text=0,
            supervised_tokens=sum(self.supervised_lengths),
            total_tokens=sum(self.lengths),
            lost_supervised_tokens=0,
        )

    @classmethod
    def encode(
        cls,
        conversations: Sequence[Conversation],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        template_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> ChatDataset:
        """Render, tokenise and mask every conversation; keep the first ``max_length`` tokens of each.

        Args:
            conversations: at least one.
            tokenizer: see :class:`~tokennorm.data.ChatEncoder`.
            max_length: tokens; the head of a longer chat is kept. A chat that keeps no supervised token is
                dropped and counted.
            template_options: variables for the chat template.
            progress: called with (done, total) now and then.

        Raises:
            DataError: a conversation that can't be masked, or no supervised token in the whole set.
        """
        if max_length < 2:
            raise DataError(
                f"max_length is {max_length} tokens",
                why="a token is predicted from the one before it, so a sample needs two",
                fix="give max_length at least 2, usually hundreds",
            )
        encoder = ChatEncoder(tokenizer, template_options=template_options)
        samples: list[Sample] = []
        truncated = without_end = special = lost = 0
        for done, conversation in enumerate(conversations):
            if progress is not None and done % 50 == 0:
                progress(done, len(conversations))
            chat = encoder.encode(conversation)
            whole = Sample(
                input_ids=torch.tensor(chat.input_ids, dtype=torch.int64),
                supervised=torch.tensor(chat.supervised, dtype=torch.bool),
                source=conversation.source,
            )
            sample = Sample(
                # Clones, so that a cut sample does not hold on to its tail.
                input_ids=whole.input_ids[:max_length].clone(),
                supervised=whole.supervised[:max_length].clone(),
                source=conversation.source,
            )
            without_end += chat.num_turns_without_end > 0
            special += chat.has_special_text
            lost += whole.num_supervised - sample.num_supervised
            if sample.num_supervised:
                truncated += len(sample) < len(whole)
                samples.append(sample)
        if progress is not None:
            progress(len(conversations), len(conversations))
        return cls(
            samples,
            DatasetStatistics(
                num_conversations=len(conversations),
                num_samples=len(samples),
                num_dropped=len(conversations) - len(samples),
                num_truncated=truncated,
                num_without_end=without_end,
                num_special_text=special,
                supervised_tokens=sum(sample.num_supervised for sample in samples),
                total_tokens=sum(len(sample) for sample in samples),
                lost_supervised_tokens=lost,
            ),
        )

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        return self._samples[index]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._samples)

    def select(self, indices: Iterable[int]) -> ChatDataset:
        """The samples at these places, as a set of their own."""
        return ChatDataset(self._samples[i] for i in indices)

    def take(self, *, min_supervised_tokens: int, seed: int = 0) -> ChatDataset:
        """Samples drawn at random (without replacement) until they hold this many supervised tokens.

        Raises:
            DataError: the whole set holds fewer.
        """
        available = sum(self.supervised_lengths)
        if available < min_supervised_tokens:
            raise DataError(
                f"{min_supervised_tokens:,} supervised tokens are asked for, the set holds {available:,}",
                fix="ask for fewer or add data",
            )
        order = list(range(len(self)))
        random.Random(f"take {seed}").shuffle(order)
        chosen, total = [], 0
        for i in order:
            if total >= min_supervised_tokens:
                break
            chosen.append(i)
            total += self.supervised_lengths[i]
        return self.select(sorted(chosen))

    def describe(self) -> str:
        """One line: samples, tokens, and how uneven they are."""
        lengths = self.supervised_lengths
        return (
            f"{len(self):,} samples, {sum(lengths):,} supervised of {sum(self.lengths):,} tokens; supervised per "
            f"sample: median {statistics.median(lengths):,.0f}, mean {statistics.fmean(lengths):,.1f}, "
            f"max {max(lengths):,}"
        )

    def check_fits(self, model: nn.Module) -> None:
        """Check the token ids against the model's embedding and the lengths against its positions.

        Raises:
            DataError: naming the first sample that does not fit.
        """
        rows = int(model.get_input_embeddings().weight.shape[0])  # pyright: ignore[reportCallIssue]
        for sample in self._samples:
            largest = int(sample.input_ids.max())
            if largest >= rows:
                raise DataError(
                    f"{sample.source}: token id {largest}, but the model's embedding has {rows} rows",
                    why="the tokenizer is not the one that the model was made with",
                    fix="load model and tokenizer from the same folder, or resize the embedding "
                    "(model.resize_token_embeddings)",
                )
        check_max_length(max(self.lengths), model.config)


def check_max_length(max_length: int, config: Any) -> None:
    """Check a length against the positions that a model has, before anything is encoded.

    Args:
        max_length: tokens of the longest document.
        config: the model's configuration; one without ``max_position_embeddings`` has no limit.

    Raises:
        DataError: the model has fewer positions.
    """
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text_config, "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < max_length:
        raise DataError(
            f"max_length is {max_length} tokens, the model has {limit} positions",
            why="positions beyond that were never trained, and fail or silently give nonsense",
            fix=f"set max_length to at most {limit}",
        )
