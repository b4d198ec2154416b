"""The plan of the slots: what is supervised, how it is grouped and cut, and reduced vocabularies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.draft.case import make_case
from tests.draft.reference import relative_error
from tokennorm.draft import DraftVocabulary, plan_slots, reduce_output, teacher_positions
from tokennorm.errors import LossUsageError


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000])
def test_every_slot_once_with_its_own_teacher_row(first: int, most: int) -> None:
    case = make_case(first=first, sizes=(3, 6, 5, 9), seed=most)
    plan = case.plan()
    assert torch.equal(plan.supervised, case.eval_mask & case.keep.unsqueeze(-1))
    assert plan.num_supervised == int(plan.supervised.sum())
    assert sorted(plan.slots.tolist()) == plan.supervised.flatten().nonzero().squeeze(1).tolist()
    # order: the same slots among the supervised ones.
    assert torch.equal(plan.supervised.flatten().nonzero().squeeze(1)[plan.order], plan.slots)
    assert torch.equal(case.labels.flatten()[plan.slots], plan.labels)
    batch = plan.slots // (6 * 5)
    expected_rows = batch * 9 + case.positions.flatten()[plan.slots]
    assert torch.equal(plan.teacher_rows[plan.row_of_slot], expected_rows)
    assert len(set(plan.teacher_rows.tolist())) == plan.num_teacher_rows < plan.num_supervised

    covered: list[int] = []
    projected: list[int] = []
    for chunk in plan.chunks(most):
        covered += range(chunk.slots.start, chunk.slots.stop)
        rows = range(chunk.rows.start, chunk.rows.stop)
        projected += rows
        assert chunk.slots.stop - chunk.slots.start <= most
        assert set(plan.row_of_slot[chunk.slots].tolist()) == set(rows)
    assert covered == list(range(plan.num_supervised))
    longest = max(b - a for a, b in zip(plan.row_starts, plan.row_starts[1:], strict=False))
    if most >= longest:
        assert projected == list(range(plan.num_teacher_rows)), "a teacher row was projected twice"


def test_positions_in_both_layouts() -> None:
    anchors = torch.tensor([[2, 5]])
    assert teacher_positions(anchors, 3).tolist() == [[[2, 3, 4], [5, 6, 7]]]
    # Slot k of the bonus-anchor layout proposes token a + k, which the row before it predicts.
    assert teacher_positions(anchors, 3, 1).tolist() == [[[1, 2, 3], [4, 5, 6]]]


@pytest.mark.parametrize("first", [0, 1])
def test_an_unknown_label_ends_the_supervised_prefix(first: int) -> None:
    vocabulary = DraftVocabulary(torch.tensor([4, 0, 7]), 9)
    #                    known, known, unknown, known; then one that is unknown at once
    labels = torch.tensor([[[7, 4, 5, 0], [1, 7, 7, 7]]])
    eval_mask = torch.ones(1, 2, 4, dtype=torch.bool)
    if first:
        labels, eval_mask = (torch.cat([x[..., :1], x], dim=-1) for x in (labels, eval_mask))
        eval_mask[..., 0] = False
    positions = teacher_positions(torch.tensor([[1, 2]]), 4 + first, first)
    plan = plan_slots(
        target_ids=labels,
        eval_mask=eval_mask,
        teacher_positions=positions,
        sequence_length=12,
        vocabulary=vocabulary,
        first_supervised_slot=first,
    )
    assert plan.supervised[..., first:].tolist() == [[[True, True, False, False], [False] * 4]]
    assert plan.labels.tolist() == [2, 0]
    assert plan.draft_size == 3


def test_the_common_axis_of_a_reduced_vocabulary_is_that_of_the_full_one() -> None:
    case = make_case(reduced=True)
    assert isinstance(case.vocabulary, DraftVocabulary)
    leaves = case.leaves()
    teacher = case.teacher_logits(leaves)
    output = case.output(leaves)
    assert output.aligned_target_logits is not None
    probabilities = output.aligned_target_logits.softmax(-1)
    full = teacher.softmax(-1)
    assert relative_error(probabilities[..., :-1], full[..., case.vocabulary.ids]) < 1e-14
    outside = case.vocabulary.draft_of < 0
    assert relative_error(probabilities[..., -1], full[..., outside].sum(-1)) < 1e-14
    assert not output.draft_logits.softmax(-1)[..., -1].any()


def test_a_reduced_vocabulary_that_holds_everything_changes_nothing() -> None:
    case = make_case(seed=7)
    permuted = make_case(seed=7)
    ids = torch.randperm(23)
    permuted.vocabulary = DraftVocabulary(ids, 23)
    permuted.teacher_head = permuted.head
    permuted.head, permuted.markov = permuted.head[ids], permuted.markov[ids]
    one, other = case.fused(case.leaves()), permuted.fused(permuted.leaves())
    assert relative_error(other.loss_sum, one.loss_sum) < 1e-13


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        (torch.tensor([0, 3, 3]), 9, "3 draft ids name only 2"),
        (torch.tensor([0, 9]), 9, "run from 0 to 9"),
        (torch.tensor([-1, 2]), 9, "run from -1"),
        (torch.tensor([0.0]), 9, "must be integers"),
        (torch.tensor([[0]]), 9, "must be integers"),
        (torch.tensor([], dtype=torch.int64), 9, "must be integers"),
    ],
)
def test_draft_ids_are_checked(ids: torch.Tensor, size: int, message: str) -> None:
    with pytest.raises(LossUsageError, match=message):
        DraftVocabulary(ids, size)


def test_a_vocabulary_is_copied_once_per_device() -> None:
    vocabulary = DraftVocabulary(torch.tensor([2, 5]), 9)
    moved = vocabulary.to("meta")
    assert moved.ids.device.type == moved.draft_of.device.type == "meta"
    assert (moved.size, moved.target_size) == (2, 9)
    assert vocabulary.to("meta") is moved
    assert moved.to("cpu") is vocabulary.to("cpu") is vocabulary


def test_logits_that_are_not_the_vocabularys_are_refused() -> None:
    case = make_case()
    with pytest.raises(LossUsageError, match="23 and 23 logits per slot; the vocabulary maps 2"):
        reduce_output(case.output(case.leaves()), DraftVocabulary(torch.tensor([1, 2]), 23))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_ids": torch.zeros(2, 5, dtype=torch.int64)}, r"must all be \[B, A, K\]"),
        ({"block_keep_mask": torch.ones(5, 2, dtype=torch.bool)}, "block_keep_mask must be"),
        ({"first_supervised_slot": 4}, "first_supervised_slot is 4"),
        ({"sequence_length": 3}, r"slot \[b=.*\] has teacher position .* in sequences of 3"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = make_case()
    arguments: dict[str, Any] = {
        "target_ids": case.labels,
        "eval_mask": case.eval_mask,
        "teacher_positions": case.positions,
        "sequence_length": 9,
        "vocabulary": 23,
    }
    with pytest.raises(LossUsageError, match=message):
        plan_slots(**{**arguments, **change})


def test_a_plan_of_nothing() -> None:
    plan = make_case(empty=True).plan()
    assert plan.num_supervised == plan.num_teacher_rows == 0
    assert list(plan.chunks(4)) == []
