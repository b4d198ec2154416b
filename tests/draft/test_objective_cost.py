"""What the fused objective costs: matrix products, memory and host synchronisations, counted rather than timed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.draft.case import LEAVES, make_case
from tokennorm.draft import checks
from tokennorm.testing import RefuseHostSync

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear", "aten.baddbmm")
CHUNK = 4


class Counter(TorchDispatchMode):
    """Counts the multiply-adds of matrix products and remembers the largest tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(PRODUCTS):
            left, right = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2][-2:]
            assert left.shape[1] == right.shape[0]
            self.multiply_adds += left.shape[0] * left.shape[1] * right.shape[1]
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("trainable_head", [False, True])
def test_products_of_the_supervised_slots_and_of_the_distinct_teacher_rows(
    reduced: bool, trainable_head: bool
) -> None:
    case = make_case(reduced=reduced)
    plan, leaves = case.plan(), case.leaves()
    leaves["head"].requires_grad_(trainable_head)
    with Counter() as counter:
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
    with Counter() as once:
        case.fused(case.leaves(), plan=plan).loss_sum.backward()
    with Counter() as twice:
        sums = case.fused(case.leaves(), plan=plan)
        (sums.terms["ce"].numerator + 0.3 * sums.terms["l1"].numerator).backward()
    assert twice.multiply_adds == 2 * once.multiply_adds
    with Counter() as evaluation, torch.no_grad():
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
