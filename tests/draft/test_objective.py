"""The fused objective against the definition and against compute_dspark_loss: values, gradients, diagnostics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.draft.case import GAMMA, LEAVES, LOSS_OPTIONS, Case, make_case
from tests.draft.reference import ALPHAS, relative_error
from tokennorm.draft import DSparkSums, compute_dspark_loss, dspark_objective, slot_math
from tokennorm.errors import LossUsageError, NonFiniteSlotError

EXACT = 1e-12
CASES = pytest.mark.parametrize(("first", "reduced"), [(0, False), (1, False), (0, True), (1, True)])


def gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(relative_error(got[name], want[name]) for name in want)


def numerators(sums: DSparkSums) -> dict[str, Tensor]:
    return {name: term.numerator for name, term in sums.terms.items()}


@CASES
@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize("upstream", [1.0, -0.37])
def test_float64_is_the_definition(first: int, reduced: bool, chunk_size: int | None, upstream: float) -> None:
    case = make_case(first=first, reduced=reduced)
    leaves, truth = case.leaves(), case.leaves()
    sums, reference = case.fused(leaves, chunk_size=chunk_size), case.reference(truth)
    assert abs(float(sums.denominator) - reference.den) < EXACT
    for name, num in reference.nums.items():
        assert relative_error(sums.terms[name].numerator, num) < EXACT
        assert sums.terms[name].weight == ALPHAS[name]
    found, expected = (
        gradients(upstream * sums.loss_sum, leaves),
        gradients(upstream * reference.loss_sum(), truth),
    )
    assert worst(found, expected) < EXACT
    assert all(float(gradient.norm()) > 0 for gradient in expected.values())
    for name, (num, den) in reference.diagnostics.items():
        assert abs(float(sums.metrics[name].num) - num) < EXACT
        assert abs(float(sums.metrics[name].den) - den) < EXACT


@CASES
def test_float64_is_compute_dspark_loss_on_the_full_logits(first: int, reduced: bool) -> None:
    case = make_case(first=first, reduced=reduced, seed=1)
    leaves, full = case.leaves(), case.leaves()
    sums = case.fused(leaves, chunk_size=3)
    loss, terms = compute_dspark_loss(outputs=case.output(full), return_terms=True, **LOSS_OPTIONS)
    assert relative_error(sums.loss_sum / sums.denominator, loss) < EXACT
    assert worst(gradients(sums.loss_sum / sums.denominator, leaves), gradients(loss, full)) < EXACT
    for name in ("ce", "l1", "confidence"):
        assert relative_error(sums.terms[name].numerator / sums.denominator, terms[f"{name}_loss"]) < EXACT
    for name in ("tau", "confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
        assert relative_error(sums.metrics[name].num, terms[f"{name}_num"]) < EXACT
    positions = range(1, case.eval_mask.shape[2] - first + 1)
    per_position = torch.stack([torch.as_tensor(sums.metrics[f"accept_rate_{k}"].num) for k in positions])
    assert relative_error(per_position, terms["accept_rate_per_pos_num"]) < EXACT


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_a_known_sum_of_the_teachers_logits_changes_nothing(first: int, chunk_size: int | None) -> None:
    case = make_case(first=first, reduced=True, seed=4)
    assert case.teacher_head is not None
    total = (case.teacher_hidden @ case.teacher_head.t()).logsumexp(-1)
    # Only rows that teach a supervised slot are read.
    unread = torch.ones_like(total, dtype=torch.bool).flatten()
    unread[case.plan().teacher_rows] = False
    assert unread.any()
    total.view(-1)[unread] = torch.nan
    mine, theirs = case.leaves(), case.leaves()
    with_total = case.fused(mine, teacher_log_total=total, chunk_size=chunk_size)
    without = case.fused(theirs, chunk_size=chunk_size)
    assert relative_error(with_total.loss_sum, without.loss_sum) < EXACT
    assert with_total.accept_rate is not None
    torch.testing.assert_close(with_total.accept_rate, without.accept_rate, rtol=1e-12, atol=1e-14)
    assert worst(gradients(with_total.loss_sum, mine), gradients(without.loss_sum, theirs)) < EXACT
    # The sum of another head is not the same: the teacher's missing mass would be wrong.
    wrong = case.fused(case.leaves(), teacher_log_total=total + 0.1, chunk_size=chunk_size)
    assert relative_error(wrong.loss_sum, without.loss_sum) > 1e-3


def test_a_missing_sum_is_found_and_a_useless_one_refused() -> None:
    case = make_case(reduced=True)
    assert case.teacher_head is not None
    total = (case.teacher_hidden @ case.teacher_head.t()).logsumexp(-1)
    broken = total.clone()
    broken.view(-1)[case.plan().teacher_rows[0]] = torch.nan
    with pytest.raises(NonFiniteSlotError, match="the distance to the teacher"):
        case.fused(case.leaves(), teacher_log_total=broken)
    with pytest.raises(LossUsageError, match=r"teacher_log_total is .*one number for each position"):
        case.fused(case.leaves(), teacher_log_total=total[:, :-1])
    whole = make_case()
    with pytest.raises(LossUsageError, match="teacher_log_total came with the whole vocabulary"):
        whole.fused(whole.leaves(), teacher_log_total=total)


@CASES
def test_terms_may_get_different_upstreams(first: int, reduced: bool) -> None:
    upstreams = {"ce": 0.7, "l1": -1.3, "confidence": 0.2}
    case = make_case(first=first, reduced=reduced, seed=2)
    truth = case.leaves()
    nums = case.reference(truth).nums

    def combined(parts: Mapping[str, Tensor]) -> Tensor:
        return sum((upstreams[name] * part for name, part in parts.items()), torch.zeros((), dtype=torch.float64))

    expected = gradients(combined(nums), truth)
    leaves = case.leaves()
    assert worst(gradients(combined(numerators(case.fused(leaves, chunk_size=5))), leaves), expected) < EXACT
    # One term alone, and the weighted sum together with a term.
    for name, num in nums.items():
        leaves, truth_leaves = case.leaves(), case.leaves()
        sums = case.fused(leaves)
        mixed = 2 * sums.loss_sum + 0.5 * sums.terms[name].numerator
        reference = case.reference(truth_leaves)
        want = gradients(2 * reference.loss_sum() + 0.5 * reference.nums[name], truth_leaves)
        assert worst(gradients(mixed, leaves), want) < EXACT
        leaves = case.leaves()
        alone = gradients(numerators(case.fused(leaves))[name], leaves)
        again = case.leaves()
        assert worst(alone, gradients(case.reference(again).nums[name], again)) < EXACT
        assert num.requires_grad


def no_centre(logits: Tensor, *args: Any, **options: Any) -> tuple[Tensor | None, Tensor | None]:
    """A planted mistake: the L1 gradient without the softmax's own dependence, q * s."""
    before = logits.clone()
    result = slot_math.slot_losses_(logits, *args, **options)
    if options.get("factors") is not None:
        _, teacher, _ = args
        q = before.softmax(dim=1)
        p = teacher if options.get("teacher_row") is None else teacher[options["teacher_row"]]
        signed = q * (q - p).sign()
        logits.add_(options["factors"][1].unsqueeze(1) * q * signed.sum(dim=1, keepdim=True))
    return result


def no_decay(*args: Any, **options: Any) -> Tensor:
    return args[0].float()


def teacher_one_late(case: Case) -> None:
    case.positions = case.positions + 1
    case.eval_mask = case.eval_mask & (case.positions < case.teacher_hidden.shape[1])


@pytest.mark.parametrize("fault", ["no_centre", "no_decay", "teacher_one_late"])
def test_a_planted_mistake_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, truth_case = make_case(), make_case()
    if fault == "no_centre":
        monkeypatch.setattr("tokennorm.draft.fused_chunks.slot_losses_", no_centre)
    elif fault == "no_decay":
        monkeypatch.setattr("tokennorm.draft.objective.slot_weights", no_decay)
    else:
        teacher_one_late(case)
        truth_case.eval_mask = case.eval_mask
    leaves, truth = case.leaves(), truth_case.leaves()
    found = gradients(case.fused(leaves).loss_sum, leaves)
    assert worst(found, gradients(truth_case.reference(truth).loss_sum(), truth)) > 1e-3


@pytest.mark.parametrize("compact", [("hidden",), ("latents", "confidence"), ("hidden", "latents", "confidence")])
@pytest.mark.parametrize("first", [0, 1])
def test_only_the_supervised_rows_may_be_given(compact: tuple[str, ...], first: int) -> None:
    case = make_case(first=first)
    supervised = case.plan().supervised
    leaves, full = case.leaves(), case.leaves()
    rows = {name: leaves[name][supervised] if name in compact else leaves[name] for name in LEAVES}
    sums, whole = case.fused(rows), case.fused(full)
    assert torch.equal(sums.loss_sum, whole.loss_sum)
    assert worst(gradients(sums.loss_sum, leaves), gradients(whole.loss_sum, full)) == 0


def full_in(dtype: torch.dtype, case: Case) -> dict[str, Tensor]:
    """Gradients of the plain way in one dtype: full logits, autograd, softmax in that dtype, no chunks."""
    leaves = {name: leaf.detach().to(dtype).requires_grad_() for name, leaf in case.leaves().items()}
    draft = leaves["hidden"] @ leaves["head"].t() + leaves["latents"] @ leaves["markov"].t()
    supervised = case.plan().supervised
    weights = supervised * torch.exp(-torch.arange(draft.shape[2]) / GAMMA)
    row = case.positions.clamp(0, case.teacher_hidden.shape[1] - 1)
    teacher = (
        case.teacher_hidden.to(dtype)[torch.arange(len(row)).view(-1, 1, 1), row] @ leaves["head"].detach().t()
    )
    weights = weights.to(dtype)
    q, p = draft.softmax(-1), teacher.softmax(-1)
    ce = -draft.log_softmax(-1).gather(-1, case.labels.unsqueeze(-1)).squeeze(-1)
    l1 = (q - p).abs().sum(-1)
    accept = (1 - l1 / 2).clamp(0, 1).detach()
    bce = torch.nn.functional.binary_cross_entropy_with_logits(leaves["confidence"], accept, reduction="none")
    loss = ((ALPHAS["ce"] * ce + ALPHAS["l1"] * l1 + ALPHAS["confidence"] * bce) * weights).sum()
    return gradients(-0.6 * loss, leaves)


@pytest.mark.parametrize(
    ("dtype", "floor"), [(torch.float32, 3e-7), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)], ids=str
)
def test_lower_precision_is_no_worse_than_the_plain_way(dtype: torch.dtype, floor: float) -> None:
    truth = full_in(torch.float64, make_case(dtype=dtype))
    case = make_case(dtype=dtype)
    leaves = case.leaves()
    sums = case.fused(leaves, chunk_size=4)
    assert sums.loss_sum.dtype == torch.float32
    found, naive = gradients(-0.6 * sums.loss_sum, leaves), full_in(dtype, case)
    for name in LEAVES:
        assert found[name].dtype == dtype
        assert relative_error(found[name], truth[name]) <= 1.5 * relative_error(naive[name], truth[name]) + floor


def test_autocast_multiplies_in_its_dtype_and_leaves_the_losses_in_float32() -> None:
    case = make_case(dtype=torch.float32)
    leaves, plain = case.leaves(), case.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = case.fused(leaves)
    exact = case.fused(plain)
    assert sums.loss_sum.dtype == torch.float32
    error = relative_error(sums.loss_sum, exact.loss_sum)
    assert 0 < error < 2e-2
    found = gradients(sums.loss_sum, leaves)
    assert found["hidden"].dtype == torch.float32
    assert worst(found, gradients(exact.loss_sum, plain)) < 5e-2


@pytest.mark.parametrize("left_out", ["markov", "confidence", "teacher", "l1", "everything"])
def test_parts_may_be_left_out(left_out: str) -> None:
    case = make_case()
    options: dict[str, Any] = {}
    if left_out in ("markov", "everything"):
        case.latents = torch.zeros_like(case.latents)
        options |= {"latents": None, "markov_weight": None}
    if left_out in ("confidence", "teacher", "everything"):
        options |= {"confidence": None}
    if left_out in ("teacher", "everything"):
        options |= {"teacher_hidden": None, "l1_loss_alpha": 0.0}
    if left_out == "l1":
        options |= {"l1_loss_alpha": 0.0}
    leaves, truth = case.leaves(), case.leaves()
    sums, reference = case.fused(leaves, **options), case.reference(truth)
    kept = {name: value for name, value in ALPHAS.items() if name in sums.terms}
    if left_out == "l1":
        kept["l1"] = 0.0
    expected_terms = {"ce", "l1", "confidence"}
    if left_out in ("confidence", "teacher", "everything"):
        expected_terms.remove("confidence")
    if left_out in ("teacher", "everything"):
        expected_terms.remove("l1")
    assert set(sums.terms) == expected_terms
    expected = gradients(
        sum((kept[name] * reference.nums[name] for name in kept), torch.zeros((), dtype=torch.float64)), truth
    )
    found = gradients(sums.loss_sum, leaves)
    for name in LEAVES:
        if options.get(name, 0) is None or (name == "markov" and "latents" in options):
            assert float(found[name].norm()) == 0
        else:
            assert relative_error(found[name], expected[name]) < EXACT


def test_a_frozen_head_and_detached_inputs_get_no_gradient() -> None:
    case = make_case()
    leaves = case.leaves()
    leaves["head"].requires_grad_(False)
    leaves["latents"].requires_grad_(False)
    case.fused(leaves).loss_sum.backward()
    assert leaves["head"].grad is None
    assert leaves["latents"].grad is None
    truth = case.leaves()
    expected = gradients(case.reference(truth).loss_sum(), truth)
    for name in ("hidden", "markov", "confidence"):
        gradient = leaves[name].grad
        assert gradient is not None
        assert relative_error(gradient, expected[name]) < EXACT


@pytest.mark.parametrize("reduced", [False, True])
def test_the_teacher_has_no_gradient(reduced: bool) -> None:
    case = make_case(reduced=reduced)
    leaves = case.leaves()
    case.teacher_hidden.requires_grad_()
    if case.teacher_head is not None:
        case.teacher_head.requires_grad_()
    case.fused(leaves).loss_sum.backward()
    assert case.teacher_hidden.grad is None
    assert case.teacher_head is None or case.teacher_head.grad is None
    # Shared with the drafter, the head has the gradient of the drafter's use alone.
    truth = case.leaves()
    case.teacher_hidden = case.teacher_hidden.detach()
    head = leaves["head"].grad
    assert head is not None
    assert relative_error(head, gradients(case.reference(truth).loss_sum(), truth)["head"]) < EXACT


@pytest.mark.parametrize("part", ["loss_sum", "ce", "l1", "confidence"])
@pytest.mark.parametrize(("first", "reduced"), [(0, False), (1, True)])
def test_gradcheck(part: str, first: int, reduced: bool) -> None:
    case = make_case(first=first, reduced=reduced, sizes=(1, 2, 3, 6), seed=3)
    # The teacher has no gradient, so it must not move with the drafter's head either.
    case.teacher_head = case.head if case.teacher_head is None else case.teacher_head
    plan, leaves = case.plan(), case.leaves()
    # The confidence head's target is a constant: finite differences see that only where nothing else moves.
    moving = ["confidence"] if part == "confidence" else list(LEAVES)
    options = {"confidence_head_alpha": 0.0} if part == "loss_sum" else {}

    def value(*tensors: Tensor) -> Tensor:
        given = leaves | dict(zip(moving, tensors, strict=True))
        sums = case.fused(given, plan=plan, chunk_size=2, **options)
        return sums.loss_sum if part == "loss_sum" else sums.terms[part].numerator

    output = case.output(leaves)
    assert output.aligned_target_logits is not None
    gap = (output.draft_logits.softmax(-1) - output.aligned_target_logits.softmax(-1))[plan.supervised].abs()
    assert float(gap.detach().amin()) > 1e-6, "too near the kink of the L1 term for finite differences"
    inputs = [leaves[name] for name in moving]
    assert torch.autograd.gradcheck(value, inputs, eps=1e-7, atol=1e-6)


def test_where_the_two_distributions_meet_the_sign_is_zero() -> None:
    case = make_case()
    leaves = case.leaves()
    plan = case.plan()
    row = case.positions.clamp(0, case.teacher_hidden.shape[1] - 1)
    batch = torch.arange(len(row)).view(-1, 1, 1)
    same = case.teacher_hidden[batch, row].clone().requires_grad_()
    sums = dspark_objective(
        plan=plan,
        hidden=same,
        head=leaves["head"],
        teacher_hidden=case.teacher_hidden,
        loss_decay_gamma=GAMMA,
        ce_loss_alpha=0.0,
        l1_loss_alpha=1.0,
        confidence_head_alpha=0.0,
        # One slot at a time, so that both products are of the same shape and round alike.
        chunk_size=1,
    )
    assert float(sums.loss_sum.detach()) == 0
    sums.loss_sum.backward()
    assert same.grad is not None
    assert not same.grad.any()
    assert sums.accept_rate is not None
    assert torch.equal(sums.accept_rate, plan.supervised.double())


def test_without_supervised_slots_everything_is_zero_and_has_a_graph() -> None:
    for case in (make_case(empty=True), make_case(empty=True, reduced=True), make_case(sizes=(2, 0, 4, 9))):
        leaves = case.leaves()
        sums = case.fused(leaves)
        assert float(sums.loss_sum.detach()) == 0
        assert float(sums.denominator) == 0
        sums.loss_sum.backward()
        for leaf in leaves.values():
            assert leaf.grad is not None
            assert not leaf.grad.any()
        assert all(ratio.mean is None for ratio in sums.metrics.values())
        again = case.leaves()
        case.fused(again).terms["l1"].numerator.backward()
        assert again["hidden"].grad is not None


def test_backward_twice_and_saved_gradients_stay_whole() -> None:
    case = make_case()
    leaves = case.leaves()
    sums = case.fused(leaves)
    once = torch.autograd.grad(sums.loss_sum, list(leaves.values()), retain_graph=True)
    twice = torch.autograd.grad(3 * sums.loss_sum, list(leaves.values()))
    for one, other in zip(once, twice, strict=True):
        assert relative_error(other, 3 * one) < EXACT
    with pytest.raises(LossUsageError, match="create_graph"):
        torch.autograd.grad(case.fused(leaves).loss_sum, leaves["hidden"], create_graph=True)


def test_nothing_is_kept_without_gradients() -> None:
    case = make_case()
    with torch.no_grad():
        sums = case.fused(case.leaves())
    assert not sums.loss_sum.requires_grad
    assert relative_error(sums.loss_sum, case.fused(case.leaves()).loss_sum) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": torch.zeros(22, 6)}, "head is .* each of 23 tokens"),
        ({"hidden": torch.zeros(2, 5, 4, 7)}, "hidden is"),
        ({"hidden": torch.zeros(3, 6)}, "hidden is"),
        ({"latents": None}, "markov_weight came without latents"),
        ({"markov_weight": torch.zeros(23, 4)}, "latents is"),
        ({"confidence": torch.zeros(2, 5)}, "confidence is"),
        ({"teacher_hidden": None}, "teacher_hidden is None"),
        ({"teacher_hidden": torch.zeros(2, 8, 6)}, "teacher_hidden is"),
        ({"teacher_head": torch.zeros(24, 6)}, "teacher_head is"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"loss_decay_gamma": float("nan")}, "loss_decay_gamma"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    case = make_case()
    with pytest.raises(LossUsageError, match=message):
        case.fused(case.leaves(), **change)


def test_a_reduced_vocabulary_needs_the_teachers_own_head() -> None:
    case = make_case(reduced=True)
    case.teacher_head = None
    with pytest.raises(LossUsageError, match="teacher_head is None"):
        case.fused(case.leaves())
