"""What the fused objective costs: matrix products, memory and host synchronisations, counted rather than timed."""

from __future__ import annotations

import pytest
import torch

from tests.draft.case import LEAVES, make_case
from tests.operator_cost import OperatorCost
from tokennorm.draft import checks
from tokennorm.testing import RefuseHostSync

CHUNK = 4


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("trainable_head", [False, True])
def test_products_of_the_supervised_slots_and_of_the_distinct_teacher_rows(
    reduced: bool, trainable_head: bool
) -> None:
    case = make_case(reduced=reduced)
    plan, leaves = case.plan(), case.leaves()
    leaves["head"].requires_grad_(trainable_head)
    with OperatorCost() as counter:
        sums = case.fused(leaves, plan=plan, chunk_size=CHUNK)
        (sums.loss_sum / 64).backward()
    width, rank, n, u = 6, 3, plan.num_supervised, plan.num_teacher_rows
    assert u < n < case.eval_mask.numel(), "the case has shared teacher rows and unsupervised slots"
    expected = u * width * plan.target_size
    # Logits and gradient of the rows; the frozen head has none.
    expected += n * plan.draft_size * (2 * width + 3 * rank + (width if trainable_head else 0))
    assert counter.multiply_adds == expected
    # One chunk of logits and its two scratch buffers at a time; never those of all slots.
    assert counter.largest <= max(leaves["hidden"].numel(), 2 * CHUNK * plan.target_size)
    assert counter.largest < case.eval_mask.numel() * plan.draft_size


def test_a_term_by_itself_costs_one_more_pass_and_no_gradients_none() -> None:
    case = make_case()
    plan = case.plan()
    with OperatorCost() as once:
        case.fused(case.leaves(), plan=plan).loss_sum.backward()
    with OperatorCost() as twice:
        sums = case.fused(case.leaves(), plan=plan)
        (sums.terms["ce"].numerator + 0.3 * sums.terms["l1"].numerator).backward()
    assert twice.multiply_adds == 2 * once.multiply_adds
    with OperatorCost() as evaluation, torch.no_grad():
        case.fused(case.leaves(), plan=plan)
    forward = (plan.num_teacher_rows * 6 + plan.num_supervised * (6 + 3)) * plan.target_size
    assert evaluation.multiply_adds == forward


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch):
    """Treat the CPU as a device on which reading a value would stall."""
    monkeypatch.setattr(checks, "defers", lambda device: True)
    yield
    checks._pending.clear()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize(("first", "reduced", "empty"), [(0, False, False), (1, True, False), (0, False, True)])
@pytest.mark.parametrize("separate", [False, True])
def test_no_host_sync_with_a_plan(first: int, reduced: bool, empty: bool, separate: bool) -> None:
    case = make_case(first=first, reduced=reduced, empty=empty)
    plan, leaves = case.plan(), case.leaves()
    with RefuseHostSync():
        sums = case.fused(leaves, plan=plan, chunk_size=CHUNK)
        loss = sums.loss_sum
        if separate:
            loss = loss + sums.terms["ce"].numerator * 0.5
        (loss / 8).backward()
    assert all(leaves[name].grad is not None for name in LEAVES)
    checks.raise_pending_slot_errors()
