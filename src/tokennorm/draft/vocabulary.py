"""A drafter that proposes only some of the target's tokens.

The drafter's distribution is 0 outside its vocabulary; the teacher's stays the softmax over the whole one. So the
distance between the two is ``sum over drafted v of |q_v - p_v|`` plus the teacher's missing mass
``1 - sum over drafted v of p_v``, and ``1 - L1 / 2 = sum_v min(p_v, q_v)`` is what rejection sampling accepts.
Renormalising the teacher over the drafted tokens would promise more than the server delivers.

A label outside the drafter's vocabulary ends the block's supervised prefix: it can't be proposed, and decoding
never gets past it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tokennorm.draft.checks import check_slot_labels
from tokennorm.draft.common import DSparkForwardOutput, supervised_slots
from tokennorm.errors import LossUsageError

__all__ = ["DraftVocabulary", "cut_at_unknown", "reduce_output"]


class DraftVocabulary:
    """Which target token each of the drafter's logits stands for. Made once; looks at the values on the host.

    Args:
        ids: ``[V_d]`` integers, distinct, in ``[0, target_size)``: the target's token of every draft token. (A
            ``d2t`` of offsets, as servers store it, is ``ids - arange(V_d)``.)
        target_size: tokens in the target's vocabulary, ``V``.

    Attributes:
        ids: ``[V_d]`` int64.
        draft_of: ``[V]`` int64, the draft token of every target token, -1 where there is none.
        target_size: ``V``.

    Raises:
        LossUsageError: ids that are not distinct or out of range.
    """

    def __init__(self, ids: Tensor, target_size: int) -> None:
        if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0:
            raise LossUsageError(f"draft ids must be integers [V_d], not {ids.dtype} of shape {list(ids.shape)}")
        self.ids = ids.detach().to(torch.int64)
        self.target_size = target_size
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < 0 or high >= target_size:
            raise LossUsageError(
                f"draft ids run from {low} to {high}, the target has {target_size} tokens",
                fix="pass target ids; from offsets (d2t) they are arange(V_d) + d2t.",
            )
        self.draft_of = torch.full((target_size,), -1, dtype=torch.int64, device=ids.device)
        self.draft_of[self.ids] = torch.arange(self.ids.shape[0], device=ids.device)
        self._copies: dict[torch.device, DraftVocabulary] = {self.ids.device: self}
        distinct = int((self.draft_of >= 0).sum())
        if distinct != self.size:
            raise LossUsageError(
                f"{self.size} draft ids name only {distinct} target tokens",
                why="two logits for one token split its probability.",
                fix="pass every target id once.",
            )

    @property
    def size(self) -> int:
        """Number of draft tokens, ``V_d``."""
        return self.ids.shape[0]

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The same vocabulary with its tables on another device; copied once per device, not per micro-batch."""
        device = torch.device(device)
        if device not in self._copies:
            moved = object.__new__(DraftVocabulary)
            moved.ids, moved.draft_of = self.ids.to(device), self.draft_of.to(device)
            moved.target_size, moved._copies = self.target_size, self._copies
            self._copies[device] = moved
        return self._copies[device]


def cut_at_unknown(labels: Tensor, supervised: Tensor, vocabulary: DraftVocabulary) -> tuple[Tensor, Tensor]:
    """Labels as draft tokens (0 where unsupervised), and the supervised slots before the first unknown one.

    Args:
        labels: ``[B, A, K]`` target ids, inside the target's vocabulary in supervised slots.
        supervised: ``[B, A, K]`` bool.
        vocabulary: on the same device.
    """
    inside = labels.to(torch.int64).clamp(0, vocabulary.target_size - 1)
    draft = vocabulary.draft_of.index_select(0, inside.reshape(-1)).view_as(inside)
    known = (draft >= 0) | ~supervised
    supervised = supervised & known.to(torch.int64).cumprod(dim=-1).to(torch.bool)
    return torch.where(supervised, draft, 0), supervised


def reduce_output(outputs: DSparkForwardOutput, vocabulary: DraftVocabulary) -> DSparkForwardOutput:
    """Bring a drafter with ``V_d`` logits and a teacher with ``V`` to one common axis of ``V_d + 1``.

    The last column is all that the drafter can't propose: ``-inf`` for the drafter, the log-sum-exp of the other
    logits for the teacher. ``compute_dspark_loss`` of the result is that of the two full distributions.

    Args:
        outputs: ``draft_logits`` ``[B, A, K, V_d]``, ``aligned_target_logits`` ``[B, A, K, V]`` or None,
            ``target_ids`` in the target's vocabulary.
        vocabulary: on the device of the logits.

    Returns:
        A new output: labels as draft tokens, ``eval_mask`` cut at the first label that is not in the drafter's
        vocabulary, and without ``num_supervised``, which the cut changes.

    Raises:
        LossUsageError: logits whose sizes are not those of the vocabulary.
        LabelError: a supervised label outside the target's vocabulary.
    """
    draft, teacher = outputs.draft_logits, outputs.aligned_target_logits
    sizes = (draft.shape[-1], None if teacher is None else teacher.shape[-1])
    if sizes[0] != vocabulary.size or sizes[1] not in (None, vocabulary.target_size):
        raise LossUsageError(
            f"drafter and teacher have {sizes[0]} and {sizes[1]} logits per slot; the vocabulary maps "
            f"{vocabulary.size} draft tokens to {vocabulary.target_size} target tokens"
        )
    supervised = supervised_slots(outputs.eval_mask, outputs.block_keep_mask, outputs.first_supervised_slot)
    check_slot_labels(outputs.target_ids, supervised, vocabulary.target_size)
    labels, supervised = cut_at_unknown(outputs.target_ids, supervised, vocabulary)
    if teacher is not None:
        outside = (vocabulary.draft_of < 0).expand_as(teacher)
        rest = teacher.detach().masked_fill(~outside, -torch.inf).logsumexp(dim=-1, keepdim=True)
        teacher = torch.cat([teacher.detach().index_select(-1, vocabulary.ids), rest], dim=-1)
    return dataclasses.replace(
        outputs,
        draft_logits=torch.nn.functional.pad(draft, (0, 1), value=-torch.inf),
        aligned_target_logits=teacher,
        target_ids=labels,
        eval_mask=supervised,
        num_supervised=None,
    )
