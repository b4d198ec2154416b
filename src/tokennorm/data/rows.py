"""Which documents share a packed row: best fit over the whole epoch, or over a bounded buffer."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from tokennorm.errors import ConfigError, DataError

__all__ = ["fill_rate", "pack", "pack_buffered"]


def pack(lengths: Sequence[int], pack_length: int, order: Iterable[int] | None = None) -> list[tuple[int, ...]]:
    """Group documents into rows of at most ``pack_length`` tokens; none is split.

    Each document, in order, goes to the fullest row that still has room (best fit), the oldest of equals.
    Deterministic; O(n log n).

    Args:
        lengths: tokens of each document.
        pack_length: tokens of a row.
        order: the indices to pack, in this order; all of them by default.

    Returns:
        For each row, in the order in which the rows were opened, the indices of its documents.

    Raises:
        DataError: a document is longer than a row.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for i in range(len(lengths)) if order is None else order:
        length = lengths[i]
        _check_length(length, pack_length)
        at = bisect.bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, row = rooms.pop(at)
        else:
            room, row = pack_length, len(rows)
            rows.append([])
        rows[row].append(i)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return [tuple(row) for row in rows]


def pack_buffered(
    documents: Iterable[tuple[int, int]], pack_length: int, buffer: int
) -> Iterator[tuple[int, ...]]:
    """Group documents into rows while they come, looking at ``buffer`` of them at a time; none is split.

    A row begins with the oldest document of the buffer and takes the longest one that still fits (the oldest of
    equals) until none does; then the buffer is filled up again. So a document waits for at most ``buffer`` rows,
    and the row comes out as soon as it is full. Deterministic; each document costs O(log buffer) comparisons.

    Args:
        documents: (index, tokens) in the order in which they come; may be endless.
        pack_length: tokens of a row.
        buffer: documents looked at together, 1 or more; 1 packs nothing together.

    Yields:
        The indices of a row's documents, the oldest first.

    Raises:
        DataError: a document is longer than a row.
        ConfigError: ``buffer`` below 1.
    """
    if buffer < 1:
        raise ConfigError(f"the packing buffer is {buffer} documents", fix="give 1 or more, usually hundreds")
    coming = iter(documents)
    arrivals: deque[tuple[int, int, int]] = deque()  # (arrival, index, tokens)
    by_length: list[tuple[int, int, int]] = []  # (tokens, -arrival, index), ascending
    arrival = 0
    while True:
        while len(by_length) < buffer and (document := next(coming, None)) is not None:
            index, length = document
            _check_length(length, pack_length)
            bisect.insort(by_length, (length, -arrival, index))
            arrivals.append((arrival, index, length))
            arrival += 1
        if not by_length:
            return
        row: list[int] = []
        oldest, index, length = arrivals.popleft()
        while not _take(by_length, (length, -oldest, index)):  # it went into an earlier row
            oldest, index, length = arrivals.popleft()
        room = pack_length
        while True:
            row.append(index)
            room -= length
            # The largest tuple of at most this length: the longest document, and the oldest of equals.
            at = bisect.bisect_left(by_length, (room + 1, -arrival - 1, -1)) - 1
            if at < 0:
                break
            length, _, index = by_length.pop(at)
        yield tuple(row)


def fill_rate(rows: Iterable[Sequence[int]], lengths: Sequence[int], pack_length: int) -> float:
    """Tokens in ``rows`` by the tokens that they could hold, 0 to 1; 0 for no rows."""
    filled = [sum(lengths[i] for i in row) for row in rows]
    return sum(filled) / (len(filled) * pack_length) if filled else 0.0


def _take(by_length: list[tuple[int, int, int]], item: tuple[int, int, int]) -> bool:
    at = bisect.bisect_left(by_length, item)
    if at < len(by_length) and by_length[at] == item:
        by_length.pop(at)
        return True
    return False


def _check_length(length: int, pack_length: int) -> None:
    if length > pack_length:
        raise DataError(
            f"a document of {length} tokens does not fit into a row of {pack_length}",
            why="documents are never split across rows",
            fix=f"set pack_length to at least {length}, or max_length to at most {pack_length}",
        )
