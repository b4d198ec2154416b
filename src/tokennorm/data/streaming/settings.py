"""What decides the samples of a stream and their order, besides the sources and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.encoding import EncodeSettings
from tokennorm.data.streaming.source import StreamSource
from tokennorm.errors import ConfigError

__all__ = ["StreamPart", "StreamSettings"]


@dataclass(frozen=True, kw_only=True)
class StreamPart:
    """One source of a stream.

    Attributes:
        source: its rows.
        name: its loss is reported under this name; None: only in the total.
        weight: of a stretch of the stream, each source gives rows in proportion to its weight.
    """

    source: StreamSource
    name: str | None = None
    weight: Fraction = Fraction(1)


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How rows become samples.

    Attributes:
        encode: lengths and turns.
        seed: of the order.
        shuffle: an order of its own for each pass; else rows come as they lie there.
        shuffle_buffer: rows of each source that are shuffled together, and held, not encoded.
        passes: over each source; None: for ever.
        bad_rows: what becomes of rows that can't be used.
        workers: processes of this rank that encode ahead; 0: none.
        vocabulary: rows of the model's embedding, which every token id must have; None: not checked.
    """

    encode: EncodeSettings
    seed: int = 0
    shuffle: bool = True
    shuffle_buffer: int = 10_000
    passes: int | None = None
    bad_rows: BadRows = field(default_factory=BadRows)
    workers: int = 0
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"{self.workers} workers", fix="give 0 or more")
