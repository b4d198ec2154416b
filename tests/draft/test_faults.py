"""Slots that should not count do no harm; slots that count and are broken are reported with their place.

One test for each fault that other implementations of this loss have shipped with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.draft.case import LEAVES, LOSS_OPTIONS, Case, make_case
from tests.draft.reference import relative_error
from tokennorm.draft import (
    DSparkForwardOutput,
    checks,
    compute_dspark_loss,
    raise_pending_slot_errors,
)
from tokennorm.errors import LabelError, NonFiniteSlotError
from tokennorm.testing import RefuseHostSync

Evaluate = Callable[[Case, dict[str, Tensor]], tuple[Tensor, ...]]


def fused(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Every number that the fused objective returns."""
    sums = case.fused(leaves, chunk_size=3)
    numbers = [torch.as_tensor(part) for ratio in sums.metrics.values() for part in (ratio.num, ratio.den)]
    return sums.loss_sum, sums.denominator, *numbers


def full(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Every number of compute_dspark_loss, with whatever stands in the hidden states also in the logits."""
    result = compute_dspark_loss(outputs=case.output(leaves), return_terms=True, **LOSS_OPTIONS)
    assert isinstance(result, tuple)
    return result[0], *result[1].values()


BOTH = pytest.mark.parametrize("evaluate", [fused, full])


def gradients(loss: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [leaves[name] for name in LEAVES]))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("label", [-100, -1, 10**9])
@pytest.mark.parametrize("reduced", [False, True])
def test_junk_in_unsupervised_slots_changes_no_bit(first: int, junk: float, label: int, reduced: bool) -> None:
    clean, dirty = (make_case(first=first, reduced=reduced, dtype=torch.float32) for _ in range(2))
    supervised = clean.plan().supervised
    assert not supervised.all()
    # Slots beyond the first unknown label are not supervised either, but their labels are read to find that out.
    unlabelled = ~(clean.eval_mask & clean.keep.unsqueeze(-1))
    dirty.labels = torch.where(unlabelled, label, dirty.labels)
    for name in ("hidden", "latents", "confidence"):
        value = getattr(dirty, name)
        mask = supervised if value.dim() == 3 else supervised.unsqueeze(-1)
        setattr(dirty, name, torch.where(mask, value, junk))
    unread = torch.ones(clean.teacher_hidden.shape[:2], dtype=torch.bool).flatten()
    unread[clean.plan().teacher_rows] = False
    dirty.teacher_hidden = torch.where(unread.view(*clean.teacher_hidden.shape[:2], 1), junk, dirty.teacher_hidden)
    leaves, junk_leaves = clean.leaves(), dirty.leaves()
    want, got = fused(clean, leaves), fused(dirty, junk_leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for a, b in zip(gradients(got[0], junk_leaves), gradients(want[0], leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e38])
def test_junk_in_unsupervised_logits_changes_no_bit(first: int, junk: float) -> None:
    case = make_case(first=first, dtype=torch.float32)
    outputs = case.output(case.leaves())
    supervised = case.plan().supervised
    assert outputs.confidence_pred is not None
    assert outputs.aligned_target_logits is not None

    def run(*, dirty: bool) -> tuple[Tensor, ...]:
        def soil(value: Tensor, mask: Tensor) -> Tensor:
            value = value.detach()
            return (torch.where(mask, value, junk) if dirty else value.clone()).requires_grad_()

        assert outputs.confidence_pred is not None
        assert outputs.aligned_target_logits is not None
        given = dataclasses.replace(
            outputs,
            draft_logits=soil(outputs.draft_logits, supervised.unsqueeze(-1)),
            aligned_target_logits=soil(outputs.aligned_target_logits, supervised.unsqueeze(-1)),
            confidence_pred=soil(outputs.confidence_pred, supervised),
            target_ids=torch.where(supervised, outputs.target_ids, -100) if dirty else outputs.target_ids,
        )
        result = compute_dspark_loss(outputs=given, return_terms=True, **LOSS_OPTIONS)
        assert isinstance(result, tuple)
        assert given.confidence_pred is not None
        grads = torch.autograd.grad(result[0], [given.draft_logits, given.confidence_pred])
        return result[0], *result[1].values(), *grads

    assert all(torch.equal(a, b) for a, b in zip(run(dirty=True), run(dirty=False), strict=True))


def test_multiplying_by_the_mask_afterwards_would_fail_here() -> None:
    """The planted mistake: the same junk through a loss that masks after the arithmetic."""
    case = make_case(dtype=torch.float32)
    supervised = case.plan().supervised
    logits = torch.where(supervised.unsqueeze(-1), case.output(case.leaves()).draft_logits, torch.nan)
    assert (logits.logsumexp(-1) * supervised).sum().isnan()


@BOTH
@pytest.mark.parametrize("first", [0, 1])
def test_dummy_blocks_and_early_slots_get_no_gradient(evaluate: Evaluate, first: int) -> None:
    case = make_case(first=first)
    counted = case.plan().supervised
    expected = evaluate(case, case.leaves())
    # A sloppy mask: true in dummy blocks, and in the slot that holds the verified anchor.
    case.eval_mask = case.eval_mask | ~case.keep.unsqueeze(-1) & (case.positions < case.teacher_hidden.shape[1])
    case.eval_mask[..., :first] = True
    assert (case.eval_mask & ~counted).any()
    leaves = case.leaves()
    got = evaluate(case, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    hidden = gradients(got[0], leaves)[0]
    assert not hidden[~counted].any()
    assert hidden[counted].any()


@BOTH
@pytest.mark.parametrize("label", [-100, -1, 23, 2**40])
def test_a_label_outside_the_vocabulary_in_a_supervised_slot(evaluate: Evaluate, label: int) -> None:
    case = make_case(first=1)
    b, a, k = (int(i) for i in case.plan().supervised.nonzero()[3])
    case.labels[b, a, k] = label
    with pytest.raises(LabelError, match=rf"label {label} .*\[b={b}, a={a}, k={k}\] .* vocabulary of 23"):
        evaluate(case, case.leaves())


def test_a_reduced_vocabulary_does_not_hide_a_bad_label() -> None:
    for evaluate in (fused, full):
        case = make_case(reduced=True)
        case.labels[0, 0, 0] = -100
        with pytest.raises(LabelError, match=r"label -100 .*\[b=0, a=0, k=0\]"):
            evaluate(case, case.leaves())


@BOTH
@pytest.mark.parametrize("where", ["hidden", "confidence", "teacher_hidden"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nan_in_a_supervised_slot_is_reported_with_its_place(
    evaluate: Evaluate, where: str, value: float
) -> None:
    case = make_case(first=1)
    supervised = case.plan().supervised
    b, a, k = (int(i) for i in supervised.nonzero()[5])
    if where == "teacher_hidden":
        case.teacher_hidden[b, case.positions[b, a, k]] = value
        # The first slot that this row teaches.
        same = supervised & (case.positions == case.positions[b, a, k])
        b, a, k = (int(i) for i in (same & (torch.arange(len(same)).view(-1, 1, 1) == b)).nonzero()[0])
        what = "distance to the teacher"
    else:
        getattr(case, where)[b, a, k] = value
        what = {"hidden": "cross-entropy", "confidence": "confidence logit"}[where]
    with pytest.raises(NonFiniteSlotError, match=rf"{what} .*\[b={b}, a={a}, k={k}\]"):
        evaluate(case, case.leaves())


@BOTH
@pytest.mark.parametrize("fault", ["label", "nan"])
def test_on_an_accelerator_the_place_is_known_at_the_next_sync(
    evaluate: Evaluate, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "defers", lambda device: True)
    case = make_case()
    plan = case.plan()
    b, a, k = (int(i) for i in plan.supervised.nonzero()[7])
    case.hidden[b, a, k] = torch.nan if fault == "nan" else case.hidden[b, a, k]
    case.labels[b, a, k] = 99 if fault == "label" else case.labels[b, a, k]
    leaves = case.leaves()
    if evaluate is full:
        with RefuseHostSync():
            evaluate(case, leaves)[0].backward()
    else:
        # The plan is made on the host, where a label is an error at once.
        monkeypatch.setattr(checks, "defers", lambda device: False)
        if fault == "label":
            with pytest.raises(LabelError):
                case.plan()
            return
        plan = case.plan()
        monkeypatch.setattr(checks, "defers", lambda device: True)
        with RefuseHostSync():
            case.fused(leaves, plan=plan).loss_sum.backward()
    # A good call in between does not hide it, and it is raised once.
    good = make_case()
    good_plan = plan
    good.fused(good.leaves(), plan=good_plan)
    expected = LabelError if fault == "label" else NonFiniteSlotError
    with pytest.raises(expected, match=rf"\[b={b}, a={a}, k={k}\]"):
        raise_pending_slot_errors(torch.device("cpu"))
    raise_pending_slot_errors()


class Watch(TorchDispatchMode):
    """Counts the rows of logits that softmaxes work on, and the new tensors as large as all logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self._vocabulary, self._size = logits.shape[-1], logits.numel()
        self.rows = 0
        self.full_size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("aten.exp_") and args[0].shape[-1:] == (self._vocabulary,):
            self.rows += args[0].numel() // self._vocabulary
        leaves = torch.utils._pytree.tree_leaves
        known = {leaf.untyped_storage().data_ptr() for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for tensor in leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.full_size += tensor.numel() >= self._size
        return out


def test_unsupervised_slots_cost_nothing_and_backward_allocates_one_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Small blocks, so that a backward that allocates a whole gradient for each of them would show.
    monkeypatch.setattr("tokennorm.draft.slot_math._BLOCK_BYTES_PER_THREAD", 1)
    case = make_case(sizes=(2, 8, 4, 20))
    outputs = case.output(case.leaves())
    outputs.draft_logits = outputs.draft_logits.detach().requires_grad_()
    count = int(case.plan().supervised.sum())
    with Watch(outputs.draft_logits) as forward:
        loss = compute_dspark_loss(outputs=outputs, **LOSS_OPTIONS)
        assert isinstance(loss, Tensor)
    # Drafter and teacher, once per supervised slot.
    assert forward.rows == 2 * count < 2 * case.eval_mask.numel()
    assert forward.full_size == 0
    with Watch(outputs.draft_logits) as backward:
        loss.backward()
    assert backward.rows == 2 * count
    assert backward.full_size == 1
    # What slices under autograd do, and what the watch would see.
    logits = outputs.draft_logits.detach().reshape(-1, 23).requires_grad_()
    parts = [logits[low : low + 16].logsumexp(-1).sum() for low in range(0, 64, 16)]
    with Watch(logits) as slices:
        torch.stack(parts).sum().backward()
    assert slices.full_size >= len(parts)


@pytest.mark.parametrize("alphas", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_float64_stays_float64(alphas: tuple[float, float, float]) -> None:
    case = make_case()
    names = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
    options = dict(zip(names, alphas, strict=True))
    leaves = case.leaves()
    outputs = case.output(leaves)
    loss = compute_dspark_loss(outputs=outputs, **{**LOSS_OPTIONS, **options})
    assert isinstance(loss, Tensor)
    assert loss.dtype == torch.float64
    sums = case.fused(case.leaves(), **options)
    assert sums.loss_sum.dtype == torch.float64
    assert relative_error(sums.loss_sum / sums.denominator, loss) < 1e-13


def test_inputs_are_left_as_they_were() -> None:
    case = make_case(reduced=True)
    before = {name: value.clone() for name, value in vars(case).items() if isinstance(value, Tensor)}
    leaves = case.leaves()
    fused(case, leaves)[0].backward()
    outputs: DSparkForwardOutput = case.output(leaves)
    copies = {
        field.name: getattr(outputs, field.name).detach().clone()
        for field in dataclasses.fields(outputs)
        if isinstance(getattr(outputs, field.name), Tensor)
    }
    loss = compute_dspark_loss(outputs=outputs, **LOSS_OPTIONS)
    assert isinstance(loss, Tensor)
    loss.backward()
    for name, value in before.items():
        assert torch.equal(getattr(case, name), value)
    for name, value in copies.items():
        assert torch.equal(getattr(outputs, name), value)
