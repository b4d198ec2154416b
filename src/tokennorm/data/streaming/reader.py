"""One source, pass after pass, each shuffled within a bounded buffer; and a place from which it can go on."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from tokennorm.data.streaming.row import StreamRow
from tokennorm.data.streaming.source import StreamSource
from tokennorm.errors import ConfigError, DataError

__all__ = ["Drawn", "Place", "SourceReader"]


class Place(NamedTuple):
    """Where a source stands. It holds no rows: the order follows from the seed.

    Attributes:
        drawn: rows drawn in all passes.
        pass_number: of the last row, from 0.
        taken: rows drawn in that pass.
        read: rows read in it, more than ``taken``: those in the buffer.
        digest: of these, in hexadecimal digits.
        whole: rows of a whole pass, once one was read; else 0.
        whole_digest: of these.
    """

    drawn: int = 0
    pass_number: int = 0
    taken: int = 0
    read: int = 0
    digest: str = ""
    whole: int = 0
    whole_digest: str = ""


class Drawn(NamedTuple):
    """A row that was drawn.

    Attributes:
        source: number of the source.
        number: of the row in its source, from 0; the same in each pass.
        row: itself.
        place: of the source, after this row.
    """

    source: int
    number: int
    row: StreamRow
    place: Place


class SourceReader:
    """Draws the rows of a source, each once in a pass.

    A pass is cut into blocks of ``buffer`` rows, and each block comes in an order of its own, which depends on the
    seed, the number of the source, the pass and the block alone: a place is a few numbers. While a block is drawn
    the next one is read, a row for a row, so that never more than ``buffer`` rows are held (and the one at hand),
    and none has to be waited for at the border of two blocks.

    Args:
        source: to read.
        number: of the source among those of a run.
        seed: of the order.
        buffer: rows; 1: in the order in which they lie there.
        passes: after so many the rows are over; None: they never are.

    Raises:
        ConfigError: ``buffer`` or ``passes`` below 1.
    """

    def __init__(
        self, source: StreamSource, *, number: int, seed: int, buffer: int, passes: int | None = None
    ) -> None:
        if buffer < 1:
            raise ConfigError(f"the shuffle buffer is {buffer} rows", fix="give 1 or more, usually thousands")
        if passes is not None and passes < 1:
            raise ConfigError(f"{passes} passes over a stream", fix="give 1 or more, or none for an endless one")
        self._source, self._number, self._seed = source, number, seed
        self._buffer, self._passes = buffer, passes
        self.drawn = 0
        self._whole = (0, "")
        self._begin(0)

    @property
    def held(self) -> int:
        """Rows in memory."""
        return len(self._coming) + sum(row is not None for row in self._block)

    def draw(self) -> Drawn | None:
        """The next row; None when all passes are over.

        Raises:
            DataError: the source can't be read, has no row, or is not what it was in the pass before.
        """
        while self._next == len(self._block):
            if not self._turn():
                return None
        place = self._order[self._next]
        found = self._block[place]
        assert found is not None
        self._block[place] = None
        self._next += 1
        self.drawn += 1
        self._read_one()
        number, row = found
        return Drawn(self._number, number, row, self._place())

    def go_to(self, place: Place, wanted: Collection[int] = ()) -> dict[int, StreamRow]:
        """Go to a place; rows before it are read and hashed, not parsed.

        Args:
            place: from :attr:`Drawn.place`.
            wanted: numbers of rows.

        Returns:
            The wanted rows.

        Raises:
            DataError: what was read up to there is not the same as then.
        """
        self.close()
        self.drawn, self._whole = place.drawn, (place.whole, place.whole_digest)
        self._begin(place.pass_number)
        if place == Place():
            return {}
        block, self._next = divmod(place.taken, self._buffer)
        found: dict[int, StreamRow] = {}
        self._block_number = block - 1
        while self._read < block * self._buffer and self._read_one():
            self._keep(wanted, found)
            self._coming.clear()
        while len(self._coming) < self._buffer and self._read_one():
            self._keep(wanted, found)
        self._shuffle_block()
        if self._next > len(self._block):
            raise self._changed(place)
        for _ in range(self._next):
            if self._read_one():
                self._keep(wanted, found)
        for index in self._order[: self._next]:
            self._block[index] = None
        if (self._read, self._digest.hex()) != (place.read, place.digest):
            raise self._changed(place)
        missing = set(wanted) - found.keys()
        if missing:  # of the end of the pass before
            found.update(_rows_of(self._source, missing))
        if missing - found.keys():
            raise self._changed(place)
        return found

    def close(self) -> None:
        """Close what is open."""
        close = getattr(self._rows, "close", None)
        if close is not None:
            close()

    def _begin(self, pass_number: int) -> None:
        self._pass, self._block_number = pass_number, -1
        self._rows: Iterator[StreamRow] | None = None
        self._read, self._digest = 0, b""
        self._coming: list[tuple[int, StreamRow]] = []
        self._block: list[tuple[int, StreamRow] | None] = []
        self._order: list[int] = []
        self._next = 0

    def _turn(self) -> bool:
        """Go on with the next block, or the next pass; False when all are over."""
        if self._passes is not None and self._pass >= self._passes:
            return False
        while len(self._coming) < self._buffer and self._read_one():
            pass
        if self._coming:
            self._shuffle_block()
            self._next = 0
        else:
            self._begin(self._pass + 1)
        return True

    def _shuffle_block(self) -> None:
        self._block, self._coming = [*self._coming], []
        self._block_number += 1
        self._order = list(range(len(self._block)))
        if len(self._order) > 1:
            name = f"tokennorm stream {self._seed} {self._number} {self._pass} {self._block_number}"
            random.Random(name).shuffle(self._order)

    def _read_one(self) -> bool:
        """Read a row ahead; False at the end of the source."""
        if self._rows is None:
            self._rows = iter(self._source)
        row = next(self._rows, None)
        if row is None:
            self._check_whole()
            return False
        self._coming.append((self._read, row))
        self._read += 1
        try:
            self._digest = row.digest_after(self._digest)
        except OSError as error:
            raise DataError(f"{row.source} can't be read: {error.strerror}") from error
        return True

    def _check_whole(self) -> None:
        here = (self._read, self._digest.hex())
        if not self._read:
            raise DataError(
                f"{self._source.where} holds no row",
                fix='write one {"messages": [{"role": "user", "content": "..."}, ...]} per line',
            )
        if not self._whole[0]:
            self._whole = here
        if self._whole != here:
            raise DataError(
                f"{self._source.where} has changed while it was read: {self._whole[0]:,} rows in the pass before, "
                f"{self._read:,} now" + ("" if self._whole[0] != self._read else ", with another content"),
                why="the run could not be made again, and a resumed run would be another one",
                fix="give the run a source that nobody writes to",
            )

    def _keep(self, wanted: Collection[int], found: dict[int, StreamRow]) -> None:
        number, row = self._coming[-1]
        if number in wanted:
            found[number] = row

    def _place(self) -> Place:
        taken = max(self._block_number, 0) * self._buffer + self._next
        return Place(self.drawn, self._pass, taken, self._read, self._digest.hex(), *self._whole)

    def _changed(self, place: Place) -> DataError:
        return DataError(
            f"{self._source.where} has changed: the {place.read:,} rows that the run had read of it are not the "
            "first ones any more",
            why="a run that is resumed goes on with the rest of the same rows",
            fix="put the source back as it was, or start a new run from the export",
        )


def _rows_of(source: Iterable[StreamRow], numbers: Collection[int]) -> dict[int, StreamRow]:
    found: dict[int, StreamRow] = {}
    rows = iter(source)
    for number, row in enumerate(rows):
        if number in numbers:
            found[number] = row
            if len(found) == len(numbers):
                break
    return found
