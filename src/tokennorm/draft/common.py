"""What one forward pass of a block drafter hands to its loss, and the slots that take part in it.

Shapes: ``B`` sequences, ``A`` anchors (blocks) per sequence, ``K`` slots per block, ``V`` logits per slot.
A *slot* is one position of one block; it proposes one token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tokennorm.errors import LossUsageError

__all__ = ["DSparkForwardOutput", "check_first_slot", "check_output", "supervised_slots", "teacher_positions"]


@dataclass
class DSparkForwardOutput:
    """One training forward of a drafter.

    Attributes:
        draft_logits: ``[B, A, K, V]``.
        target_ids: ``[B, A, K]`` int64, the data token that each slot has to propose. Anything may stand in
            unsupervised slots.
        eval_mask: ``[B, A, K]`` bool, the supervised slots.
        block_keep_mask: ``[B, A]`` bool, false for the dummy blocks of a sequence with too few anchors.
        confidence_pred: ``[B, A, K]`` logits of the probability that the proposal is accepted, or None.
        aligned_target_logits: ``[B, A, K, V]``, the teacher's logits at the same slots, or None. Never
            differentiated.
        first_supervised_slot: 0 where every slot proposes (next-token layout), 1 where slot 0 holds the verified
            anchor (bonus-anchor layout).
        num_supervised: number of supervised slots in kept blocks, when the host knows it. With it an accelerator
            computes only those slots; without it all of them, because asking for the number would make the host
            wait. The CPU never needs it.
    """

    draft_logits: Tensor
    target_ids: Tensor
    eval_mask: Tensor
    block_keep_mask: Tensor
    confidence_pred: Tensor | None = None
    aligned_target_logits: Tensor | None = None
    first_supervised_slot: int = 0
    num_supervised: int | None = None


def supervised_slots(eval_mask: Tensor, block_keep_mask: Tensor | None, first_supervised_slot: int) -> Tensor:
    """The slots that count: ``[B, A, K]`` bool.

    A dummy block never counts, nor does a slot before the first supervised one, whatever ``eval_mask`` says.
    """
    supervised = eval_mask.to(torch.bool)
    if block_keep_mask is not None:
        supervised = supervised & block_keep_mask.to(torch.bool).unsqueeze(-1)
    if first_supervised_slot:
        slot = torch.arange(eval_mask.shape[-1], device=eval_mask.device)
        supervised = supervised & (slot >= first_supervised_slot)
    return supervised


def teacher_positions(anchors: Tensor, block_size: int, first_supervised_slot: int = 0) -> Tensor:
    """Position of the target's hidden state that predicts each slot's token: ``[B, A, K]`` int64.

    ``a + k`` in the next-token layout, ``a + k - 1`` in the bonus-anchor layout; the token itself is one further.
    Positions may lie outside the sequence where a slot is not supervised.

    Args:
        anchors: ``[B, A]`` int64, the position of each block's anchor token.
        block_size: ``K``.
        first_supervised_slot: 0 or 1, the layout.
    """
    slot = torch.arange(block_size, device=anchors.device)
    return anchors.unsqueeze(-1) + slot - first_supervised_slot


def check_output(outputs: DSparkForwardOutput) -> None:
    """Refuse shapes and dtypes that don't fit, before anything is computed.

    Raises:
        LossUsageError: with the offending field, its shape and the expected one.
    """
    logits = outputs.draft_logits
    if logits.dim() != 4 or not logits.is_floating_point():
        raise LossUsageError(
            f"draft_logits must be a floating-point tensor [B, A, K, V], not {_describe(logits)}",
        )
    slots, teacher = logits.shape[:3], outputs.aligned_target_logits
    if teacher is not None and teacher.shape[-1] != logits.shape[-1]:
        raise LossUsageError(
            f"the drafter has {logits.shape[-1]} logits per slot, the teacher {teacher.shape[-1]}",
            why="their probabilities would be compared between different tokens.",
            fix="for a drafter with a reduced vocabulary map both with tokennorm.draft.reduce_output first.",
        )
    expected = {
        "target_ids": slots,
        "eval_mask": slots,
        "block_keep_mask": slots[:2],
        "confidence_pred": slots,
        "aligned_target_logits": logits.shape,
    }
    for field in fields(outputs):
        value = getattr(outputs, field.name)
        if field.name in expected and value is not None and value.shape != expected[field.name]:
            raise LossUsageError(
                f"{field.name} has shape {list(value.shape)}; with draft_logits {list(logits.shape)} it must be "
                f"{list(expected[field.name])}"
            )
    if outputs.target_ids.is_floating_point() or outputs.target_ids.dtype == torch.bool:
        raise LossUsageError(f"target_ids must be integers, not {outputs.target_ids.dtype}")
    check_first_slot(outputs.first_supervised_slot, slots[2])


def check_first_slot(first_supervised_slot: int, block_size: int) -> None:
    """Raises LossUsageError when the layout leaves no slot to supervise."""
    if not 0 <= first_supervised_slot < max(block_size, 1):
        raise LossUsageError(
            f"first_supervised_slot is {first_supervised_slot} in blocks of {block_size} slots",
            fix="0 for the next-token layout, 1 for the bonus-anchor layout.",
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
