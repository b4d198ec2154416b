"""The windows of a stream, for one rank: packed while they are read, and resumed from a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from tokennorm.data.collating import Collator
from tokennorm.data.packing import Batch
from tokennorm.data.plan import plan_windows, rank_view
from tokennorm.data.rows import pack_buffered
from tokennorm.data.sample import Sample
from tokennorm.data.streaming.account import SourceAccount
from tokennorm.data.streaming.samples import SampleKey, StreamSamples
from tokennorm.data.streaming.settings import StreamPart, StreamSettings
from tokennorm.errors import ConfigError

__all__ = ["StreamWindows"]

Row = list[Sample]


class StreamWindows:
    """One rank's windows of a stream: an iterator with a place, in the form that the engine wants.

    A window is a stretch of packed rows (or of samples) in the stream's order, which knows nothing of ranks: each
    rank reads, encodes and packs all of it, and collates its own micro-batches. So every rank meets a bad row at
    the same place, and none has to send data to another.

    Args:
        parts: the sources.
        tokenizer: a Hugging Face tokenizer.
        settings: how rows become samples, and in which order.
        micro_batch_size: rows of a micro-batch.
        micro_batches_per_window: of one optimizer step, of all ranks together.
        pad_token_id: id of the filling.
        pack_length: tokens of a packed row; None: one sample per row, padded.
        pack_buffer: samples that packing looks at together.
        pad_to_multiple_of: tokens; rows are filled up to a multiple of them.
        rank: this rank.
        world_size: number of ranks that hold different data.
        say: told in a sentence each what a user should read; it may be called in the thread of a
            :class:`~tokennorm.data.Prefetch`.

    Raises:
        ConfigError: a value that can't work.
    """

    def __init__(
        self,
        parts: Sequence[StreamPart],
        tokenizer: Any,
        settings: StreamSettings,
        *,
        micro_batch_size: int,
        micro_batches_per_window: int,
        pad_token_id: int,
        pack_length: int | None = None,
        pack_buffer: int = 512,
        pad_to_multiple_of: int = 1,
        rank: int = 0,
        world_size: int = 1,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        longest = settings.encode.max_length
        if pack_length is not None and pack_length < longest:
            raise ConfigError(
                f"pack_length is {pack_length} tokens, max_length {longest}",
                why="samples are never split across rows",
                fix=f"set pack_length to at least {longest}",
            )
        plan_windows((), micro_batch_size=micro_batch_size, micro_batches_per_window=micro_batches_per_window)
        rank_view([], rank, world_size)  # both refuse bad numbers now
        self.pack_length, self.pack_buffer = pack_length, pack_buffer
        self.micro_batch_size, self.micro_batches_per_window = micro_batch_size, micro_batches_per_window
        self.rank, self.world_size = rank, world_size
        self.group_names = tuple(part.name for part in parts if part.name is not None)
        self._collate = Collator(
            packed=pack_length is not None,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
            longest_row=longest if pack_length is None else pack_length,
            group_names=self.group_names,
        )
        self._parts, self._tokenizer, self._settings, self._say = tuple(parts), tokenizer, settings, say
        self._opened: StreamSamples | None = self._open(None)
        self._state = {"windows": 0, **self._opened.state_dict()}

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the windows that are left: of each this rank's micro-batches, as many as on every other rank.

        Raises:
            DataError: see :class:`~tokennorm.data.streaming.samples.StreamSamples`; on all ranks alike.
        """
        samples, self._opened = self._opened or self._open(self._state), None
        number: int = self._state["windows"]
        waiting: dict[int, tuple[SampleKey, Sample]] = {}
        try:
            rows = self._rows(samples, waiting)
            while window := list(islice(rows, self.micro_batch_size * self.micro_batches_per_window)):
                number += 1
                batches = self._batches(window)
                pending = [key for key, _ in waiting.values()]
                self._state = {"windows": number, **samples.state_dict(pending)}
                yield batches
        finally:
            samples.close()

    def state_dict(self) -> dict[str, Any]:
        """The place after the last window that was yielded: plain values, the same on every rank."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place; the sources are read up to it, and compared with what they were.

        Raises:
            DataError: a source has changed.
        """
        if self._opened is not None:
            if state == self._state:
                return
            self._opened.close()
        self._opened = self._open(state)
        self._state = dict(state)

    def accounts(self, state: Mapping[str, Any] | None = None) -> list[SourceAccount]:
        """What became of the rows of each source up to a place, by default the present one."""
        accounts = [SourceAccount(part.source.where, self._settings.bad_rows) for part in self._parts]
        for account, source in zip(accounts, (state or self._state)["sources"], strict=True):
            account.load_state_dict(source["account"])
        return accounts

    def _open(self, state: Mapping[str, Any] | None) -> StreamSamples:
        return StreamSamples(self._parts, self._tokenizer, self._settings, state=state, say=self._say)

    def _rows(self, samples: StreamSamples, waiting: dict[int, tuple[SampleKey, Sample]]) -> Iterator[Row]:
        """Rows in order; ``waiting`` is kept to be the samples that packing holds, in the order they came."""
        if self.pack_length is None:
            yield from ([sample] for _, sample in samples)
            return

        def coming() -> Iterator[tuple[int, int]]:
            for arrival, (key, sample) in enumerate(samples):
                waiting[arrival] = (key, sample)
                yield arrival, len(sample)

        for row in pack_buffered(coming(), self.pack_length, self.pack_buffer):
            yield [waiting.pop(arrival)[1] for arrival in row]

    def _batches(self, rows: Sequence[Row]) -> list[Batch]:
        (window,) = plan_windows(
            range(len(rows)),
            micro_batch_size=self.micro_batch_size,
            micro_batches_per_window=self.micro_batches_per_window,
        )
        (mine,) = rank_view([window], self.rank, self.world_size)
        return [
            self._collate(None if micro_batch is None else [rows[row] for row in micro_batch])
            for micro_batch in mine
        ]
