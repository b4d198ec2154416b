"""Which source the next row comes from: by weight, spread evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from tokennorm.data.streaming.reader import Drawn, SourceReader
from tokennorm.errors import ConfigError

__all__ = ["draw_by_weight"]


def draw_by_weight(readers: Sequence[SourceReader], weights: Sequence[Fraction]) -> Iterator[Drawn]:
    """Rows of several sources, in each stretch in the shares of the weights, up to one row.

    The ``n``-th row of a source of weight ``w`` is due at ``(n + 1/2) / w``, the middle of its part; the source
    whose row is due first is next, of equals the one that is named first. So the order follows from how many rows
    of each were drawn. A source that is over leaves its turns to the others.

    Raises:
        ConfigError: numbers that don't fit, or a weight that is not positive.
    """
    if len(readers) != len(weights) or not readers or min(weights) <= 0:
        raise ConfigError(
            f"{len(readers)} sources and the weights {', '.join(map(str, weights))}",
            fix="give each source a weight above 0",
        )
    due = {place: _due(reader, weights[place]) for place, reader in enumerate(readers)}
    while due:
        place = min(due, key=lambda at: (due[at], at))
        drawn = readers[place].draw()
        if drawn is None:
            del due[place]
            continue
        due[place] = _due(readers[place], weights[place])
        yield drawn


def _due(reader: SourceReader, weight: Fraction) -> Fraction:
    return Fraction(2 * reader.drawn + 1, 2) / weight
