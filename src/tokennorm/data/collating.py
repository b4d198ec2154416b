"""One way to collate for all micro-batches of a run: packed or padded, and dummies that look like them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokennorm.data.packing import (
    Batch,
    CollateOptions,
    collate_packed,
    collate_padded,
    dummy_batch,
    padded_length,
)
from tokennorm.data.sample import Sample
from tokennorm.errors import ConfigError

__all__ = ["Collator"]


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes the batch of a micro-batch's rows.

    Attributes:
        packed: rows hold several documents; else one each, with an attention mask.
        pad_token_id: id of the filling.
        pad_to_multiple_of: tokens; rows are filled up to a multiple of them, but to no more than ``longest_row``.
        longest_row: tokens.
        group_names: names of the sources whose tokens are marked in ``groups``.

    Raises:
        ConfigError: ``pad_to_multiple_of`` below 1.
    """

    packed: bool
    pad_token_id: int
    pad_to_multiple_of: int
    longest_row: int
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of < 1:
            raise ConfigError(f"pad_to_multiple_of is {self.pad_to_multiple_of}", fix="give 1 or more tokens")

    def __call__(self, rows: Sequence[Sequence[Sample]] | None) -> Batch:
        """The batch of these rows; None: a dummy, for a rank that has run out of data."""
        if rows is None:
            return dummy_batch(self.pad_token_id, packed=self.packed, grouped=bool(self.group_names))
        options: CollateOptions = {
            "pad_token_id": self.pad_token_id,
            "row_length": padded_length(rows, self.pad_to_multiple_of, self.longest_row),
            "group_names": self.group_names,
        }
        if self.packed:
            return collate_packed(rows, **options)
        return collate_padded([row[0] for row in rows], **options)
