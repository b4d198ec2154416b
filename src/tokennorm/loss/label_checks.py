"""Checks of labels that never make the host wait for the device.

On the CPU a bad label is an error at once. On an accelerator, looking at a value would stall the queue, so the
finding is kept on the device and raised by :func:`raise_pending_label_errors`, which the kit calls where it
synchronises anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokennorm.errors import LabelError, LossUsageError

__all__ = ["check_labels", "defers", "raise_pending_label_errors"]

# One record per device: [number of bad labels, row of the first, its value, vocabulary, surplus or missing rows].
_pending: dict[torch.device, Tensor] = {}


def defers(device: torch.device) -> bool:
    """Whether findings on this device wait for the next synchronisation."""
    return device.type != "cpu"


def check_labels(
    labels: Tensor, supervised: Tensor, vocabulary: int, ignore_index: int, num_supervised: int | None
) -> None:
    """Check that every supervised label is inside the vocabulary and that the host's count is right.

    Args:
        labels: ``[N]`` int64.
        supervised: ``[N]`` bool.
        vocabulary: number of rows of the head.
        ignore_index: the value of an unsupervised label, for the message.
        num_supervised: the host's count of supervised rows, or None.

    Raises:
        LabelError: on the CPU at once; on an accelerator from :func:`raise_pending_label_errors`.
        LossUsageError: ``num_supervised`` is not the number of supervised labels (same times).
    """
    bad = supervised & ((labels < 0) | (labels >= vocabulary))
    surplus = (
        supervised.sum() - num_supervised
        if num_supervised is not None
        else torch.zeros((), dtype=torch.int64, device=labels.device)
    )
    if labels.numel() == 0:
        record = torch.stack([surplus.new_zeros(()), surplus.new_zeros(()), surplus.new_zeros(()), surplus])
    else:
        first = bad.int().argmax()
        # index_select, not labels[first]: indexing by a tensor scalar may read it on the host.
        value = labels.index_select(0, first.reshape(1)).squeeze(0)
        record = torch.stack([bad.sum(), first, value, surplus])
    # Filled on the device: torch.tensor(..., device=) would be a blocking copy from the host.
    record = torch.cat([record, record.new_full((1,), vocabulary), record.new_full((1,), ignore_index)])
    if not defers(labels.device):
        _raise_for(record.tolist())
        return
    earlier = _pending.get(labels.device)
    if earlier is not None:
        # The first finding stays; later ones do not overwrite it.
        record = torch.where((earlier[0] != 0) | (earlier[3] != 0), earlier, record)
    _pending[labels.device] = record


def raise_pending_label_errors(device: torch.device | None = None) -> None:
    """Raise what was found on ``device`` (None: on any device) since the last call. Synchronises.

    Raises:
        LabelError: a label outside the vocabulary.
        LossUsageError: a host count of supervised rows that was wrong.
    """
    devices = list(_pending) if device is None else [key for key in _pending if _same_device(key, device)]
    records = [_pending.pop(key).tolist() for key in devices]
    for record in records:
        _raise_for(record)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (other.index is None or one.index == other.index)


def _raise_for(record: list[int]) -> None:
    num_bad, row, value, surplus, vocabulary, ignore_index = record
    if num_bad:
        raise LabelError(
            f"label {value} at row {row} is outside the vocabulary of {vocabulary} "
            f"({num_bad} such {'row' if num_bad == 1 else 'rows'})",
            why="a label without a logit has no cross-entropy.",
            fix=f"use ignore_index ({ignore_index}) for tokens that are not supervised, and check that the "
            "tokenizer belongs to the model.",
        )
    if surplus:
        raise LossUsageError(
            f"num_supervised is off by {-surplus:+d}: the labels hold another number of supervised rows",
            why="rows would be dropped from the loss, or counted twice.",
            fix="count exactly the labels that differ from ignore_index, or leave num_supervised out.",
        )
