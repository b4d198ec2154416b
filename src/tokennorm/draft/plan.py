"""Which slots the fused objective computes, in which order: made on the host, before the forward pass.

The slots are sorted by the target's hidden state that teaches them, so that anchors closer together than a block
share that row's projection, and chunks end between two such rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokennorm.draft.checks import check_slot_labels
from tokennorm.draft.common import check_first_slot, supervised_slots
from tokennorm.draft.vocabulary import DraftVocabulary, cut_at_unknown
from tokennorm.errors import LossUsageError

__all__ = ["SlotChunk", "SlotPlan", "plan_slots"]


class SlotChunk(NamedTuple):
    """A range of the plan's slots, and the range of its teacher rows that they need."""

    slots: slice
    rows: slice


@dataclass(frozen=True, kw_only=True)
class SlotPlan:
    """The supervised slots of one micro-batch, ``n`` of them, sorted by teacher row.

    Attributes:
        supervised: ``[B, A, K]`` bool, after cuts at labels that the drafter can't propose.
        first_supervised_slot: the layout.
        slots: ``[n]`` int64, flat index of each slot among the ``B * A * K``.
        order: ``[n]`` int64, its index among the supervised slots in ``[b, a, k]`` order.
        labels: ``[n]`` int64, as draft tokens.
        teacher_rows: ``[u]`` int64, distinct flat indices into the ``B * S`` teacher states.
        row_of_slot: ``[n]`` int64, each slot's index into ``teacher_rows``.
        row_starts: ``u + 1`` host integers: row ``i`` teaches slots ``row_starts[i]`` to ``row_starts[i + 1]``.
        teacher_shape: ``(B, S)``.
        target_size: tokens in the target's vocabulary.
        vocabulary: the drafter's, when it is reduced.
    """

    supervised: Tensor
    first_supervised_slot: int
    slots: Tensor
    order: Tensor
    labels: Tensor
    teacher_rows: Tensor
    row_of_slot: Tensor
    row_starts: tuple[int, ...]
    teacher_shape: tuple[int, int]
    target_size: int
    vocabulary: DraftVocabulary | None

    @property
    def num_supervised(self) -> int:
        """Number of supervised slots, ``n``."""
        return self.row_starts[-1]

    @property
    def num_teacher_rows(self) -> int:
        """Number of distinct teacher states, ``u``."""
        return len(self.row_starts) - 1

    @property
    def draft_size(self) -> int:
        """Number of the drafter's logits per slot."""
        return self.target_size if self.vocabulary is None else self.vocabulary.size

    def to(self, device: torch.device | str) -> SlotPlan:
        """The plan on another device; to a CUDA device by pinned copies, without waiting."""
        device = torch.device(device)
        if self.slots.device == device:
            return self
        names = ("supervised", "slots", "order", "labels", "teacher_rows", "row_of_slot")
        moved: dict[str, Tensor] = {}
        for name in names:
            value: Tensor = getattr(self, name)
            if device.type == "cuda" and value.device.type == "cpu":
                value = value.pin_memory()
            moved[name] = value.to(device, non_blocking=True)
        vocabulary = None if self.vocabulary is None else self.vocabulary.to(device)
        return replace(self, vocabulary=vocabulary, **moved)

    def chunks(self, most: int) -> Iterator[SlotChunk]:
        """Ranges of at most ``most`` slots. A teacher row is split only when it alone teaches more than that."""
        starts = self.row_starts
        row = 0
        while row < self.num_teacher_rows:
            end = row + 1
            while end < self.num_teacher_rows and starts[end + 1] - starts[row] <= most:
                end += 1
            for low in range(starts[row], starts[end], most):
                yield SlotChunk(slice(low, min(low + most, starts[end])), slice(row, end))
            row = end


def plan_slots(
    *,
    target_ids: Tensor,
    eval_mask: Tensor,
    teacher_positions: Tensor,
    sequence_length: int,
    vocabulary: int | DraftVocabulary,
    block_keep_mask: Tensor | None = None,
    first_supervised_slot: int = 0,
) -> SlotPlan:
    """Plan the supervised slots of one micro-batch.

    Works on the host: give it CPU tensors (from the sampler of the anchors) and move the result with
    :meth:`SlotPlan.to`. Tensors of an accelerator are right too, but make the host wait for them.

    Args:
        target_ids: ``[B, A, K]`` integers, the data token that each slot has to propose, as target token.
        eval_mask: ``[B, A, K]`` bool.
        teacher_positions: ``[B, A, K]`` int64, the position of the target's hidden state that predicts that token;
            see :func:`tokennorm.draft.teacher_positions`.
        sequence_length: ``S``.
        vocabulary: size of the target's vocabulary, or the drafter's reduced one.
        block_keep_mask: ``[B, A]`` bool, false for dummy blocks; None: all are kept.
        first_supervised_slot: 0 or 1, the layout.

    Raises:
        LossUsageError: shapes that don't fit, a teacher position outside the sequence in a supervised slot.
        LabelError: a label outside the target's vocabulary in a supervised slot.
    """
    if not target_ids.shape == eval_mask.shape == teacher_positions.shape or eval_mask.dim() != 3:
        raise LossUsageError(
            f"target_ids {list(target_ids.shape)}, eval_mask {list(eval_mask.shape)} and teacher_positions "
            f"{list(teacher_positions.shape)} must all be [B, A, K]"
        )
    if block_keep_mask is not None and block_keep_mask.shape != eval_mask.shape[:2]:
        raise LossUsageError(
            f"block_keep_mask must be {list(eval_mask.shape[:2])}, not {list(block_keep_mask.shape)}"
        )
    check_first_slot(first_supervised_slot, eval_mask.shape[2])
    device = eval_mask.device
    keep = None if block_keep_mask is None else block_keep_mask.cpu()
    supervised = supervised_slots(eval_mask.cpu(), keep, first_supervised_slot)
    labels = target_ids.cpu()
    reduced = None if isinstance(vocabulary, int) else vocabulary.to("cpu")
    target_size = vocabulary if isinstance(vocabulary, int) else vocabulary.target_size
    check_slot_labels(labels, supervised, target_size)
    if reduced is not None:
        labels, supervised = cut_at_unknown(labels, supervised, reduced)

    slots = supervised.reshape(-1).nonzero().squeeze(1)
    positions = teacher_positions.cpu().reshape(-1).index_select(0, slots).to(torch.int64)
    outside = (positions < 0) | (positions >= sequence_length)
    if bool(outside.any()):
        first = int(outside.nonzero()[0])
        b, a, k = (int(i) for i in torch.unravel_index(slots[first], supervised.shape))
        raise LossUsageError(
            f"the supervised slot [b={b}, a={a}, k={k}] has teacher position {int(positions[first])} in sequences "
            f"of {sequence_length}",
            fix="eval_mask has to be false where the label lies outside the sequence.",
        )
    per_sequence = supervised.shape[1] * supervised.shape[2]
    flat_rows = slots // per_sequence * sequence_length + positions
    # Stable, so that the order of the slots, hence of every sum, is the same on every machine.
    sorted_rows, order = flat_rows.sort(stable=True)
    teacher_rows, row_of_slot, counts = torch.unique_consecutive(
        sorted_rows, return_inverse=True, return_counts=True
    )
    plan = SlotPlan(
        supervised=supervised,
        first_supervised_slot=first_supervised_slot,
        slots=slots.index_select(0, order),
        order=order,
        labels=labels.reshape(-1).to(torch.int64).index_select(0, slots).index_select(0, order),
        teacher_rows=teacher_rows,
        row_of_slot=row_of_slot,
        row_starts=(0, *counts.cumsum(0).tolist()),
        teacher_shape=(supervised.shape[0], sequence_length),
        target_size=target_size,
        vocabulary=reduced,
    )
    return plan.to(device)
