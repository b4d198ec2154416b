"""Encoded chats: samples with exact counts, ready to be packed or padded."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.cache import encode_cached
from tokennorm.data.documents import Document
from tokennorm.data.encoding import EncodedDocument, EncodeSettings, Progress
from tokennorm.data.sample import IGNORE_INDEX, DatasetStatistics, Sample
from tokennorm.errors import DataError, NoSupervisedTokenError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["IGNORE_INDEX", "ChatDataset", "DatasetStatistics", "Progress", "Sample", "check_max_length"]


class ChatDataset(Sequence[Sample]):
    """Samples made from conversations or texts, with their statistics, ``errors`` and ``notes``: of the bad
    rows that were left out.

    Build one with :meth:`encode`, or from samples of your own.
    """

    def __init__(self, samples: Iterable[Sample], statistics: DatasetStatistics | None = None) -> None:
        self.notes: list[str] = []
        self.errors: list[DataError] = []
        self._samples = list(samples)
        self.lengths = [len(sample) for sample in self._samples]
        self.supervised_lengths = [sample.num_supervised for sample in self._samples]
        if not sum(self.supervised_lengths):
            raise NoSupervisedTokenError(
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
        conversations: Sequence[Document],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        template_options: Mapping[str, Any] | None = None,
        date: str | None = None,
        progress: Progress | None = None,
        turns: Literal["all", "each"] = "all",
        group: str | None = None,
        bad_rows: BadRows | None = None,
        workers: int = 0,
        cache: Path | None = None,
    ) -> ChatDataset:
        """Render, tokenise and mask every conversation; keep the first ``max_length`` tokens of each.

        Plain text is cut into pieces of ``max_length`` tokens instead, and nothing of it is lost:
        :func:`~tokennorm.data.encode_document`.

        Args:
            conversations: at least one; chats or plain text.
            tokenizer: see :class:`~tokennorm.data.ChatEncoder`.
            max_length: tokens; the head of a longer chat is kept. A chat that keeps no supervised token is
                dropped and counted.
            template_options: variables for the chat template.
            date: the day (``YYYY-MM-DD``) that a template which prints the date shows; None: today.
            progress: called with (done, total) now and then.
            turns: ``all``: a chat is one sample, with every assistant turn supervised. ``each``: every assistant
                turn is the last of a sample of its own, after the messages before it as the template shows them
                then: right for templates that drop the reasoning of earlier turns.
            group: name of this source, given to the samples.
            bad_rows: what becomes of conversations that can't be masked; by default they are an error.
            workers: processes that encode; 0: this one alone.
            cache: folder in which encoded conversations are kept and found again, see
                :func:`~tokennorm.data.encode_cached`; None: nothing is kept.

        Raises:
            DataError: a conversation that can't be masked, or (NoSupervisedTokenError) nothing is supervised in
                the whole set.
        """
        settings = EncodeSettings(
            max_length=max_length, turns=turns, template_options=template_options or {}, date=date
        )
        encoded = encode_cached(
            conversations, tokenizer, settings, folder=cache, workers=workers, progress=progress
        )
        return cls.of_encoded(encoded, group=group, bad_rows=bad_rows)

    @classmethod
    def of_encoded(
        cls, encoded: Sequence[EncodedDocument], *, group: str | None = None, bad_rows: BadRows | None = None
    ) -> ChatDataset:
        """Make the set of documents that are encoded already; arguments and errors as for :meth:`encode`."""
        bad_rows = bad_rows or BadRows()
        errors = [document.error for document in encoded if document.error is not None]
        bad_rows.settle(errors, len(encoded), "the conversations")
        samples = [
            Sample(input_ids=ids, supervised=supervised, source=document.source, group=group)
            for document in encoded
            for ids, supervised in document.pieces
        ]
        dataset = cls(
            samples,
            DatasetStatistics(
                num_conversations=len(encoded),
                num_samples=len(samples),
                num_dropped=sum(not document.pieces and document.error is None for document in encoded),
                num_truncated=sum(document.truncated for document in encoded),
                num_without_end=sum(document.without_end for document in encoded),
                num_special_text=sum(document.special_text for document in encoded),
                supervised_tokens=sum(sample.num_supervised for sample in samples),
                total_tokens=sum(len(sample) for sample in samples),
                lost_supervised_tokens=sum(document.lost for document in encoded),
                num_bad=len(errors),
            ),
        )
        dataset.errors = errors
        dataset.notes = bad_rows.report(errors, len(encoded), "the conversations")
        return dataset

    @classmethod
    def concatenate(cls, parts: Sequence[ChatDataset]) -> ChatDataset:
        """The samples of several sets, one set after the other.

        Raises:
            DataError: no part.
        """
        if not parts:
            raise DataError("there is no set to concatenate")
        statistics = parts[0].statistics
        for part in parts[1:]:
            statistics = statistics + part.statistics
        dataset = cls((sample for part in parts for sample in part), statistics)
        dataset.errors = [error for part in parts for error in part.errors]
        dataset.notes = [note for part in parts for note in part.notes]
        return dataset

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the sources in the set, in the order in which they come first."""
        return tuple(dict.fromkeys(sample.group for sample in self._samples if sample.group is not None))

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
            sample.check_vocabulary(rows)
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
