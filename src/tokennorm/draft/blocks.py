"""What the slots of each block see, read and have to propose: made on the host from token ids and anchors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokennorm.draft.anchors import Anchors
from tokennorm.draft.common import check_first_slot, teacher_positions
from tokennorm.draft.plan import SlotPlan, plan_slots
from tokennorm.draft.vocabulary import DraftVocabulary
from tokennorm.errors import LossUsageError

__all__ = ["Blocks", "make_blocks"]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of one micro-batch: ``B`` rows, ``A`` anchors, ``K`` slots.

    Attributes:
        anchors: ``[B, A]`` int64, index of each anchor in its row.
        keep: ``[B, A]`` bool, false for dummies.
        anchor_ids: ``[B, A]`` int64, the anchors' tokens, which stand in slot 0.
        previous_ids: ``[B, A, K]`` int64, the token before the one that a slot proposes, for the Markov head. The
            anchor's where that lies outside the anchor's document, and in slot 0 of the bonus-anchor layout.
        target_ids: ``[B, A, K]`` int64, the token to propose; 0 in unsupervised slots.
        eval_mask: ``[B, A, K]`` bool, the supervised slots.
        sequence_length: ``S``.
        first_supervised_slot: the layout.
    """

    anchors: Tensor
    keep: Tensor
    anchor_ids: Tensor
    previous_ids: Tensor
    target_ids: Tensor
    eval_mask: Tensor
    sequence_length: int
    first_supervised_slot: int

    @property
    def block_size(self) -> int:
        """Slots per block, ``K``."""
        return self.target_ids.shape[2]

    def to(self, device: torch.device | str) -> Blocks:
        """The blocks on another device; to a CUDA device by pinned copies, without waiting."""
        device = torch.device(device)
        if self.anchors.device == device:
            return self
        moved: dict[str, Tensor] = {}
        for name in ("anchors", "keep", "anchor_ids", "previous_ids", "target_ids", "eval_mask"):
            value: Tensor = getattr(self, name)
            if device.type == "cuda" and value.device.type == "cpu":
                value = value.pin_memory()
            moved[name] = value.to(device, non_blocking=True)
        return replace(self, **moved)

    def plan(self, vocabulary: int | DraftVocabulary) -> SlotPlan:
        """The plan of the fused objective (:func:`tokennorm.draft.plan_slots`); call it on the host's blocks.

        Args:
            vocabulary: ``drafter.vocabulary``.
        """
        return plan_slots(
            target_ids=self.target_ids,
            eval_mask=self.eval_mask,
            teacher_positions=teacher_positions(self.anchors, self.block_size, self.first_supervised_slot),
            sequence_length=self.sequence_length,
            vocabulary=vocabulary,
            block_keep_mask=self.keep,
            first_supervised_slot=self.first_supervised_slot,
        )


def make_blocks(
    input_ids: Tensor,
    supervised: Tensor,
    anchors: Anchors,
    *,
    block_size: int,
    first_supervised_slot: int = 0,
    documents: Tensor | None = None,
) -> Blocks:
    """Cut the blocks out of the rows.

    A slot is supervised as long as all slots from ``first_supervised_slot`` to it have a label that lies in the
    row and in the anchor's document and is supervised itself: decoding never gets past the first that isn't.

    Args:
        input_ids: ``[B, S]`` integers, on the CPU.
        supervised: ``[B, S]`` bool, "this token is supervised".
        anchors: from :func:`tokennorm.draft.sample_anchors`.
        block_size: ``K``.
        first_supervised_slot: 0 or 1, the layout.
        documents: ``[B, S]`` from :func:`tokennorm.draft.document_ids`; None: each row is one document.

    Raises:
        LossUsageError: shapes that don't fit.
    """
    check_first_slot(first_supervised_slot, block_size)
    shapes = {"supervised": supervised.shape} | ({} if documents is None else {"documents": documents.shape})
    for name, shape in shapes.items():
        if shape != input_ids.shape or input_ids.dim() != 2:
            raise LossUsageError(f"{name} {list(shape)} and input_ids {list(input_ids.shape)} must both be [B, S]")
    if anchors.positions.shape != anchors.keep.shape or anchors.positions.shape[0] != input_ids.shape[0]:
        raise LossUsageError(
            f"anchors {list(anchors.positions.shape)}, kept {list(anchors.keep.shape)} for "
            f"{input_ids.shape[0]} rows"
        )
    rows, length = input_ids.shape
    batch = torch.arange(rows).view(-1, 1, 1)
    start = anchors.positions
    anchor_ids = input_ids.gather(1, start)

    teacher = teacher_positions(start, block_size, first_supervised_slot)
    label = teacher + 1
    inside = label < length
    label_row = label.clamp(max=length - 1)
    own = inside if documents is None else inside & _same_document(documents, start, batch, label_row)
    proposes = torch.arange(block_size) >= first_supervised_slot
    taken = own & supervised.to(torch.bool)[batch, label_row] & anchors.keep.unsqueeze(-1)
    # Slots before the first supervised one are false, and must not end the product.
    eval_mask = (taken | ~proposes).to(torch.int64).cumprod(dim=-1).to(torch.bool) & proposes

    # The previous token stands where its teacher state is; in the bonus-anchor layout's slot 0 that is no token of
    # the block.
    previous = torch.maximum(teacher, start.unsqueeze(-1))
    previous_row = previous.clamp(max=length - 1)
    known = previous < length
    if documents is not None:
        known = known & _same_document(documents, start, batch, previous_row)
    previous_ids = torch.where(known, input_ids[batch, previous_row], anchor_ids.unsqueeze(-1))
    return Blocks(
        anchors=start,
        keep=anchors.keep,
        anchor_ids=anchor_ids.to(torch.int64),
        previous_ids=previous_ids.to(torch.int64),
        target_ids=torch.where(eval_mask, input_ids[batch, label_row], 0).to(torch.int64),
        eval_mask=eval_mask,
        sequence_length=length,
        first_supervised_slot=first_supervised_slot,
    )


def _same_document(documents: Tensor, start: Tensor, batch: Tensor, positions: Tensor) -> Tensor:
    """Whether ``positions`` ``[B, A, K]`` lie in the document of the anchors ``[B, A]``."""
    return documents[batch, positions] == documents.gather(1, start).unsqueeze(-1)
