"""The samples of a stream, one after the other, and a place between any two of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tokennorm.data.encoding import EncodedDocument
from tokennorm.data.sample import Sample
from tokennorm.data.streaming.account import SourceAccount
from tokennorm.data.streaming.encoding import RowEncoder, encode_ahead
from tokennorm.data.streaming.mixing import draw_by_weight
from tokennorm.data.streaming.reader import Place, SourceReader
from tokennorm.data.streaming.row import StreamRow
from tokennorm.data.streaming.settings import StreamPart, StreamSettings
from tokennorm.errors import DataError

__all__ = ["SampleKey", "StreamSamples"]


class SampleKey(NamedTuple):
    """What a sample is made of: number of the source, number of its row, number of the row's piece."""

    source: int
    row: int
    piece: int


class StreamSamples:
    """Samples in the stream's order, with their keys. Iterate it once.

    Args:
        parts: the sources.
        tokenizer: a Hugging Face tokenizer.
        settings: how rows become samples.
        state: from :meth:`state_dict`; None: the beginning.
        say: told in a sentence each what a user should read.

    Raises:
        DataError: a source that is not what it was when the state was saved.
    """

    def __init__(
        self,
        parts: Sequence[StreamPart],
        tokenizer: Any,
        settings: StreamSettings,
        *,
        state: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._parts, self._tokenizer, self._settings, self._say = parts, tokenizer, settings, say
        self._accounts = [SourceAccount(part.source.where, settings.bad_rows) for part in parts]
        self._places = [Place()] * len(parts)
        self._readers = [
            SourceReader(
                part.source,
                number=number,
                seed=settings.seed,
                buffer=settings.shuffle_buffer if settings.shuffle else 1,
                passes=settings.passes,
            )
            for number, part in enumerate(parts)
        ]
        # Taken before the state was saved, but not used by who took them.
        self._pending: deque[tuple[SampleKey, Sample]] = deque()
        # The pieces of the last row that were not taken yet, from this one on.
        self._rest: SampleKey | None = None
        self._restored_rest: list[tuple[SampleKey, Sample]] = []
        if state is not None:
            self._restore(state)
        self._rows = draw_by_weight(self._readers, [part.weight for part in parts])
        self._encoded = encode_ahead(self._rows, tokenizer, settings.encode, workers=settings.workers)

    def __iter__(self) -> Iterator[tuple[SampleKey, Sample]]:
        """Yield the samples that are left.

        Raises:
            DataError: a bad row that can't be let pass, a token that the model does not have, or a source that
                can't be read.
        """
        while self._pending:
            yield self._pending.popleft()
        yield from self._with_rest(self._restored_rest)
        self._restored_rest = []
        for drawn, document in self._encoded:
            self._places[drawn.source] = drawn.place
            for sentence in self._accounts[drawn.source].add(document, drawn.place.pass_number):
                self._say(sentence)
            yield from self._with_rest(self._samples(drawn.source, drawn.number, document))
        for account in self._accounts:
            account.end_pass()

    @property
    def accounts(self) -> list[SourceAccount]:
        """What became of the rows, source by source."""
        return self._accounts

    @property
    def held(self) -> int:
        """Rows in memory that are not encoded."""
        return sum(reader.held for reader in self._readers)

    def state_dict(self, pending: Sequence[SampleKey] = ()) -> dict[str, Any]:
        """The place after the last sample that was taken: plain values, and no sample.

        Args:
            pending: samples that were taken, but are to come again first, in this order.
        """
        return {
            "sources": [
                {"place": list(place), "account": account.state_dict()}
                for place, account in zip(self._places, self._accounts, strict=True)
            ],
            "pending": [list(key) for key in (*pending, *(key for key, _ in self._pending))],
            "rest": None if self._rest is None else list(self._rest),
        }

    def close(self) -> None:
        """End the workers and close the files."""
        for generator in (self._encoded, self._rows):
            generator.close()  # pyright: ignore[reportAttributeAccessIssue]
        for reader in self._readers:
            reader.close()

    def _restore(self, state: Mapping[str, Any]) -> None:
        if len(state["sources"]) != len(self._parts):
            raise DataError(
                f"a place in a stream of {len(state['sources'])} sources, and this one has {len(self._parts)}",
                fix="resume with the sources of the run",
            )
        pending = [SampleKey(*key) for key in state["pending"]]
        rest = None if state["rest"] is None else SampleKey(*state["rest"])
        wanted = [
            {key.row for key in (*pending, *filter(None, [rest])) if key.source == number}
            for number in range(len(self._parts))
        ]
        rows: dict[tuple[int, int], StreamRow] = {}
        for number, (reader, source) in enumerate(zip(self._readers, state["sources"], strict=True)):
            place = Place(*source["place"])
            found = reader.go_to(place, wanted[number])
            rows.update({(number, row): content for row, content in found.items()})
            self._places[number] = place
            self._accounts[number].load_state_dict(source["account"])
        encoder = RowEncoder(self._tokenizer, self._settings.encode)
        samples = {
            key: sample
            for (number, row), content in rows.items()
            for key, sample in self._samples(number, row, encoder.encode(content))
        }
        self._pending.extend((key, samples[key]) for key in pending)
        if rest is not None:
            self._rest = rest
            self._restored_rest = [
                (key, sample) for key, sample in samples.items() if key[:2] == rest[:2] and key.piece >= rest.piece
            ]

    def _samples(self, source: int, row: int, document: EncodedDocument) -> list[tuple[SampleKey, Sample]]:
        found: list[tuple[SampleKey, Sample]] = []
        for piece, (ids, supervised) in enumerate(document.pieces):
            sample = Sample(
                input_ids=ids, supervised=supervised, source=document.source, group=self._parts[source].name
            )
            if self._settings.vocabulary is not None:
                sample.check_vocabulary(self._settings.vocabulary)
            found.append((SampleKey(source, row, piece), sample))
        return found

    def _with_rest(self, samples: list[tuple[SampleKey, Sample]]) -> Iterator[tuple[SampleKey, Sample]]:
        """The samples of one row; at each of them ``state_dict`` knows where to go on."""
        for index, item in enumerate(samples):
            self._rest = samples[index + 1][0] if index + 1 < len(samples) else None
            yield item
