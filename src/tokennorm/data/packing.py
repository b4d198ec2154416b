"""Samples -> batches: packed rows of isolated documents, or padded rows.

Labels are shifted here, once, document by document: no target crosses into another document, whatever happens
to the rows afterwards. Counts are taken from the labels that leave this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

import torch
from torch import Tensor

from tokennorm.data.sample import IGNORE_INDEX, Sample
from tokennorm.errors import DataError

__all__ = ["Batch", "CollateOptions", "collate_packed", "collate_padded", "dummy_batch", "padded_length"]


class Batch(TypedDict):
    """One micro-batch, B rows of S positions.

    Attributes:
        input_ids: [B, S] int64.
        shift_labels: [B, S] int64, the token that each position must predict; -100: not supervised.
        position_ids: [B, S] int64, from 0 in each document.
        attention_mask: [B, S] int64, 1 for tokens. Only in padded batches: transformers isolates packed
            documents by their positions only where there is no mask (and no cache).
        effective_tokens: supervised tokens, exactly ``(shift_labels != -100).sum()``.
        total_tokens: tokens that are no padding.
        sources: for each row, where its documents come from (file and line).
        groups: [B, S] int64, the place of each token's source among the loader's group names; -1: none, padding.
            Only where there are group names.
    """

    input_ids: Tensor
    shift_labels: Tensor
    position_ids: Tensor
    attention_mask: NotRequired[Tensor]
    effective_tokens: int
    total_tokens: int
    sources: NotRequired[list[list[str]]]
    groups: NotRequired[Tensor]


class CollateOptions(TypedDict):
    """What :func:`collate_packed` and :func:`collate_padded` take besides the rows."""

    pad_token_id: int
    row_length: int | None
    group_names: Sequence[str]


def padded_length(rows: Sequence[Sequence[Sample]], multiple: int, longest: int) -> int:
    """Tokens of the longest row, up to the next ``multiple``, but to no more than ``longest``."""
    length = max(sum(len(sample) for sample in row) for row in rows)
    return max(length, min(-(-length // multiple) * multiple, longest))


def collate_packed(
    rows: Sequence[Sequence[Sample]],
    *,
    pad_token_id: int,
    row_length: int | None = None,
    group_names: Sequence[str] = (),
) -> Batch:
    """Put each row's documents one after the other.

    Positions restart at 0 with each document. A row that is shorter than the others is filled with padding
    that forms a document of its own, so it is isolated like any other. There is no attention mask.

    Args:
        rows: for each of the B rows, its documents.
        pad_token_id: id of the filling; any id inside the vocabulary will do.
        row_length: S; the longest row by default.
        group_names: names of the sources whose tokens are marked in ``groups``.

    Raises:
        DataError: no document, or a row longer than ``row_length``.
    """
    lengths = [sum(len(sample) for sample in row) for row in rows]
    _check_rows(lengths, row_length)
    width = row_length or max(lengths)
    input_ids, shift_labels, position_ids = [], [], []
    for row, length in zip(rows, lengths, strict=True):
        fill = width - length
        pieces = [*(len(sample) for sample in row), fill]
        input_ids.append(torch.cat([*(sample.input_ids for sample in row), _filled(fill, pad_token_id)]))
        shift_labels.append(torch.cat([*(sample.shift_labels() for sample in row), _filled(fill, IGNORE_INDEX)]))
        position_ids.append(torch.cat([torch.arange(piece) for piece in pieces]))
    labels = torch.stack(shift_labels)
    batch = Batch(
        input_ids=torch.stack(input_ids),
        shift_labels=labels,
        position_ids=torch.stack(position_ids),
        effective_tokens=int((labels != IGNORE_INDEX).sum()),
        total_tokens=sum(lengths),
    )
    return _with_sources(batch, rows, group_names)


def collate_padded(
    samples: Sequence[Sample],
    *,
    pad_token_id: int,
    row_length: int | None = None,
    group_names: Sequence[str] = (),
) -> Batch:
    """One document per row, padded on the right, with an attention mask.

    Args:
        samples: the B documents.
        pad_token_id: id of the padding.
        row_length: S; the longest document by default.
        group_names: names of the sources whose tokens are marked in ``groups``.

    Raises:
        DataError: no document, or one longer than ``row_length``.
    """
    lengths = [len(sample) for sample in samples]
    _check_rows(lengths, row_length)
    width = row_length or max(lengths)
    fills = [width - length for length in lengths]
    pairs = list(zip(samples, fills, strict=True))
    labels = torch.stack([torch.cat([s.shift_labels(), _filled(fill, IGNORE_INDEX)]) for s, fill in pairs])
    batch = Batch(
        input_ids=torch.stack([torch.cat([s.input_ids, _filled(fill, pad_token_id)]) for s, fill in pairs]),
        shift_labels=labels,
        position_ids=torch.arange(width).repeat(len(samples), 1),
        attention_mask=torch.stack([torch.cat([_filled(len(s), 1), _filled(fill, 0)]) for s, fill in pairs]),
        effective_tokens=int((labels != IGNORE_INDEX).sum()),
        total_tokens=sum(lengths),
    )
    return _with_sources(batch, [[sample] for sample in samples], group_names)


def dummy_batch(pad_token_id: int, *, packed: bool, grouped: bool = False) -> Batch:
    """A micro-batch without data, [1, 2], for a rank that has run out: it keeps the collectives in step.

    It has the keys of the loader's other batches: an attention mask unless ``packed``, groups if ``grouped``.
    """
    batch = Batch(
        input_ids=torch.full((1, 2), pad_token_id, dtype=torch.int64),
        shift_labels=torch.full((1, 2), IGNORE_INDEX, dtype=torch.int64),
        position_ids=torch.arange(2).unsqueeze(0),
        effective_tokens=0,
        total_tokens=0,
        sources=[[]],
    )
    if grouped:
        batch["groups"] = torch.full((1, 2), -1, dtype=torch.int64)
    if not packed:
        batch["attention_mask"] = torch.ones((1, 2), dtype=torch.int64)
    return batch


def _with_sources(batch: Batch, rows: Sequence[Sequence[Sample]], group_names: Sequence[str]) -> Batch:
    batch["sources"] = [[sample.source for sample in row] for row in rows]
    if group_names:
        places = {name: place for place, name in enumerate(group_names)}
        groups = torch.full_like(batch["input_ids"], -1)
        for marks, row in zip(groups, rows, strict=True):
            start = 0
            for sample in row:
                marks[start : start + len(sample)] = -1 if sample.group is None else places[sample.group]
                start += len(sample)
        batch["groups"] = groups
    return batch


def _filled(length: int, value: int) -> Tensor:
    return torch.full((length,), value, dtype=torch.int64)


def _check_rows(lengths: Sequence[int], row_length: int | None) -> None:
    if not lengths or min(lengths) == 0:
        raise DataError("a micro-batch with an empty row", fix="use dummy_batch() where there is no data")
    if row_length is not None and max(lengths) > row_length:
        raise DataError(
            f"a row of {max(lengths)} tokens does not fit into row_length {row_length}",
            fix=f"set row_length to at least {max(lengths)}",
        )
