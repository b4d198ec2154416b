"""Faults of single slots, reported with their place, without making the host wait for the device.

On the CPU a fault is an error at once. On an accelerator the first finding stays on the device until
:func:`raise_pending_slot_errors` is called where the host synchronises anyway (after ``kit.reduce_window()``).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from tokennorm.errors import LabelError, LossUsageError, NonFiniteSlotError

__all__ = [
    "SlotFault",
    "check_slot_labels",
    "defers",
    "raise_pending_slot_errors",
    "report_count",
    "report_slots",
]


class SlotFault(IntEnum):
    """What can be wrong with a supervised slot."""

    LABEL = 0
    DRAFT = 1
    TEACHER = 2
    CONFIDENCE = 3
    COUNT = 4


# What is not finite -> what it follows from.
_NON_FINITE = {
    SlotFault.DRAFT: ("the cross-entropy", "the drafter's logits there hold NaN or +inf, or -inf at the label"),
    SlotFault.TEACHER: ("the distance to the teacher", "the teacher's logits there hold NaN or +inf"),
    SlotFault.CONFIDENCE: ("the confidence logit", "the confidence head or its inputs hold NaN or inf there"),
}

# One record per device: fault, number of bad slots, b, a, k, label, vocabulary. The first finding stays.
_pending: dict[torch.device, Tensor] = {}


def defers(device: torch.device) -> bool:
    """Whether findings on this device wait for the next synchronisation."""
    return device.type != "cpu"


def report_slots(
    fault: SlotFault,
    bad: Tensor,
    slots: Tensor | None,
    shape: Sequence[int],
    *,
    labels: Tensor | None = None,
    vocabulary: int = 0,
) -> None:
    """Report the bad slots among ``n``, naming the first in ``[b, a, k]`` order.

    Args:
        fault: what is wrong with them.
        bad: ``[n]`` bool.
        slots: ``[n]`` flat index of each into the ``B * A * K`` slots; None when ``n`` is all of them, in order.
        shape: ``(B, A, K)``.
        labels: ``[n]`` int64, for the message about a label.
        vocabulary: its size, for the same.

    Raises:
        LabelError: on the CPU, for :attr:`SlotFault.LABEL`.
        NonFiniteSlotError: on the CPU, for the others.
    """
    if bad.numel() == 0:
        return
    if slots is None:
        slots = torch.arange(bad.shape[0], device=bad.device)
    beyond = shape[0] * shape[1] * shape[2]
    flat = torch.where(bad, slots, beyond)
    first = flat.argmin().reshape(1)
    place = flat.index_select(0, first).squeeze(0)
    label = place if labels is None else labels.index_select(0, first).squeeze(0)
    per_block, per_sequence = shape[2], shape[1] * shape[2]
    fields = [place // per_sequence, place % per_sequence // per_block, place % per_block, label]
    head = torch.full_like(place, int(fault))
    record = torch.stack([head, bad.sum(), *fields, torch.full_like(place, vocabulary)])
    _raise_or_keep(record)


def check_slot_labels(labels: Tensor, supervised: Tensor, vocabulary: int) -> None:
    """Report a label outside ``[0, vocabulary)`` in a supervised slot; both ``[B, A, K]``.

    Raises:
        LabelError: on the CPU.
    """
    bad = supervised & ((labels < 0) | (labels >= vocabulary))
    values = labels.reshape(-1).to(torch.int64)
    report_slots(SlotFault.LABEL, bad.reshape(-1), None, labels.shape, labels=values, vocabulary=vocabulary)


def report_count(surplus: Tensor) -> None:
    """Report that the host's number of supervised slots is off by ``surplus`` (0-d integer) from the mask's.

    Raises:
        LossUsageError: on the CPU, unless it is 0.
    """
    zero = torch.zeros_like(surplus)
    _raise_or_keep(
        torch.stack([torch.full_like(surplus, int(SlotFault.COUNT)), surplus, zero, zero, zero, zero, zero])
    )


def _raise_or_keep(record: Tensor) -> None:
    device = record.device
    if not defers(device):
        _raise_for(record.tolist())
        return
    earlier = _pending.get(device)
    _pending[device] = record if earlier is None else torch.where(earlier[1] != 0, earlier, record)


def raise_pending_slot_errors(device: torch.device | None = None) -> None:
    """Raise what was found on ``device`` (None: on any device) since the last call. Synchronises.

    Raises:
        LabelError: a label outside the vocabulary in a supervised slot.
        NonFiniteSlotError: NaN or infinity in a supervised slot.
        LossUsageError: a host count of supervised slots that was wrong.
    """
    devices = [key for key in _pending if device is None or _same_device(key, device)]
    records = [_pending.pop(key).tolist() for key in devices]
    for record in records:
        _raise_for(record)


def _same_device(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (other.index is None or one.index == other.index)


def _raise_for(record: list[int]) -> None:
    number, count, sequence, anchor, slot, label, vocabulary = record
    if not count:
        return
    place = f"slot [b={sequence}, a={anchor}, k={slot}]"
    fault = SlotFault(number)
    if fault is SlotFault.COUNT:
        raise LossUsageError(
            f"num_supervised is off by {-count:+d}: eval_mask and block_keep_mask hold another number of slots",
            why="slots would be dropped from the loss while they stay in its denominator.",
            fix="count exactly the supervised slots of kept blocks, or leave num_supervised out.",
        )
    others = "" if count == 1 else f" ({count} such slots)"
    if fault is SlotFault.LABEL:
        raise LabelError(
            f"label {label} at the supervised {place} is outside the vocabulary of {vocabulary}{others}",
            why="a label without a logit has no cross-entropy, and the slot is counted in the denominator.",
            fix="leave such slots out of eval_mask; check that the tokenizer belongs to the model.",
        )
    what, source = _NON_FINITE[fault]
    raise NonFiniteSlotError(
        f"{what} of the supervised {place} is not finite{others}: {source}",
        why="one such slot makes every gradient of the window NaN.",
        fix="look for the first module whose output is not finite; slots that should not count belong out of "
        "eval_mask, where their content does no harm.",
    )
