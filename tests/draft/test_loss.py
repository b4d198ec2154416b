"""compute_dspark_loss and its helpers: worked values, the definition, gradients, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.draft.case import LOSS_OPTIONS, make_case
from tests.draft.reference import ALPHAS, relative_error
from tokennorm.draft import DSparkForwardOutput, checks
from tokennorm.draft import loss as module
from tokennorm.draft.loss import compute_dspark_loss
from tokennorm.errors import LossUsageError
from tokennorm.testing import RefuseHostSync

TERMS = {
    "loss",
    "ce_loss",
    "l1_loss",
    "confidence_loss",
    "accept_rate_per_pos_num",
    "accept_rate_per_pos_den",
    "tau_num",
    "tau_den",
    "confidence_abs_error_num",
    "confidence_bias_num",
    "confidence_cumprod_bias_num",
    "confidence_diag_den",
}


KEYWORDS = {
    "_all_reduce_loss_denominators": ["loss_terms", "process_group"],
    "_build_loss_weight_mask": [
        "eval_mask",
        "block_size",
        "device",
        "loss_decay_gamma",
        "first_supervised_slot",
    ],
    "_l1_probability_distance_chunk": ["draft_logits", "target_logits"],
    "_compute_l1_dist_per_token": ["draft_logits", "aligned_target_logits", "chunk_size"],
    "_compute_accept_rate_3d": ["l1_dist_per_token"],
    "_compute_local_l1_term": ["l1_dist_per_token", "loss_weight_mask"],
    "_collect_acceptance_diagnostics": ["outputs", "accept_rate_3d", "loss_weight_mask", "has_confidence"],
    "_collect_local_terms": ["outputs", "loss_decay_gamma", "l1_loss_alpha"],
    "compute_dspark_loss": [
        "outputs",
        "loss_decay_gamma",
        "ce_loss_alpha",
        "l1_loss_alpha",
        "confidence_head_alpha",
        "process_group",
        "return_terms",
    ],
}


def test_names_and_keywords_that_other_code_relies_on() -> None:
    assert module.__all__ == ["compute_dspark_loss"]
    assert module._PROBABILITY_CHUNK_TOKENS == 128
    for name, keywords in KEYWORDS.items():
        parameters = inspect.signature(getattr(module, name)).parameters
        assert list(parameters) == keywords
        if name not in ("_compute_accept_rate_3d", "_all_reduce_loss_denominators"):
            assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters.values())


def test_denominators_of_one_process_are_copies() -> None:
    terms = {f"{name}_loss_den": torch.tensor(float(i)) for i, name in enumerate(("ce", "l1", "confidence"), 1)}
    found = module._all_reduce_loss_denominators(terms, process_group=None)
    assert {name: float(value) for name, value in found.items()} == {name: float(v) for name, v in terms.items()}
    found["ce_loss_den"].add_(1)
    assert float(terms["ce_loss_den"]) == 1


def evaluate(outputs: DSparkForwardOutput, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    result = compute_dspark_loss(outputs=outputs, **{**LOSS_OPTIONS, **options}, return_terms=True)
    assert isinstance(result, tuple)
    return result


def worked(first: int) -> DSparkForwardOutput:
    """One block with accept rates .8, .5, .25 (after slot 0 in the bonus-anchor layout), over two tokens.

    With q = (x, 1 - x) and p = (y, 1 - y) the accept rate is 1 - |x - y|. The label is token 0.
    """
    drafted, taught = [0.9, 0.75, 0.95], [0.7, 0.25, 0.2]

    def logits(values: list[float]) -> Tensor:
        pad = [float("nan")] * first
        x = torch.tensor(pad + values, dtype=torch.float64)
        return torch.stack([x, 1 - x], dim=-1).log().view(1, 1, -1, 2)

    slots = 3 + first
    eval_mask = torch.arange(slots).view(1, 1, -1) >= first
    return DSparkForwardOutput(
        draft_logits=logits(drafted).requires_grad_(),
        target_ids=torch.where(eval_mask, 0, -100),
        eval_mask=eval_mask,
        block_keep_mask=torch.ones(1, 1, dtype=torch.bool),
        confidence_pred=torch.where(eval_mask, 0.0, torch.nan).double().requires_grad_(),
        aligned_target_logits=logits(taught),
        first_supervised_slot=first,
    )


@pytest.mark.parametrize("first", [0, 1])
def test_worked_values_in_both_layouts(first: int) -> None:
    loss, terms = evaluate(worked(first))
    assert set(terms) == TERMS
    assert float(terms["tau_num"]) == pytest.approx(1 + 0.8 + 0.4 + 0.1, abs=1e-12)
    assert float(terms["tau_den"]) == 1
    assert terms["accept_rate_per_pos_num"].tolist() == pytest.approx([0.8, 0.5, 0.25], abs=1e-12)
    assert terms["accept_rate_per_pos_den"].tolist() == [1, 1, 1]
    # Weights count proposals: 1 for the first one in both layouts, then exp(-k / 4).
    w = [float(torch.tensor(math.exp(-k / 4), dtype=torch.float32)) for k in range(3)]
    ce = sum(wk * -math.log(x) for wk, x in zip(w, (0.9, 0.75, 0.95), strict=True)) / sum(w)
    l1 = sum(wk * d for wk, d in zip(w, (0.4, 1.0, 1.5), strict=True)) / sum(w)
    # A confidence logit of 0 costs log 2, whatever the target.
    for name, value in {"ce_loss": ce, "l1_loss": l1, "confidence_loss": math.log(2)}.items():
        assert float(terms[name]) == pytest.approx(value, abs=1e-7)
    assert float(loss.detach()) == pytest.approx(0.1 * ce + 0.9 * l1 + math.log(2), abs=1e-7)
    a = (0.8, 0.5, 0.25)
    assert float(terms["confidence_bias_num"]) == pytest.approx(
        sum(wk * (0.5 - ak) for wk, ak in zip(w, a, strict=True)), abs=1e-6
    )
    assert float(terms["confidence_abs_error_num"]) == pytest.approx(
        sum(wk * abs(0.5 - ak) for wk, ak in zip(w, a, strict=True)), abs=1e-6
    )
    survival = [(0.5, 0.8), (0.25, 0.4), (0.125, 0.1)]
    assert float(terms["confidence_cumprod_bias_num"]) == pytest.approx(
        sum(wk * (c - s) for wk, (c, s) in zip(w, survival, strict=True)), abs=1e-6
    )
    assert float(terms["confidence_diag_den"]) == pytest.approx(sum(w), abs=1e-6)


@pytest.mark.parametrize("gamma", [None, 0.0, -2.0, 4.0, math.inf])
def test_weights(gamma: float | None) -> None:
    eval_mask = torch.tensor([[[False, True, True, False, True]]])
    weights = module._build_loss_weight_mask(
        eval_mask=eval_mask,
        block_size=5,
        device=torch.device("cpu"),
        loss_decay_gamma=gamma,
        first_supervised_slot=1,
    )
    decay = [1.0] * 5 if gamma != 4.0 else [1.0, 1.0, math.exp(-0.25), math.exp(-0.5), math.exp(-0.75)]
    assert weights.dtype == torch.float32
    assert weights.flatten().tolist() == pytest.approx([0, decay[1], decay[2], 0, decay[4]], rel=1e-6)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_float64_is_the_definition(first: int, upstream: float) -> None:
    case = make_case(first=first, seed=4)
    leaves, truth = case.leaves(), case.leaves()
    loss, terms = evaluate(case.output(leaves))
    reference = case.reference(truth)
    expected = reference.loss_sum() / reference.den
    assert loss.dtype == torch.float64
    assert relative_error(loss, expected) < 1e-12
    found = torch.autograd.grad(upstream * loss, list(leaves.values()))
    want = torch.autograd.grad(upstream * expected, list(truth.values()))
    assert max(relative_error(a, b) for a, b in zip(found, want, strict=True)) < 1e-12
    assert relative_error(terms["l1_loss"], reference.nums["l1"] / reference.den) < 1e-12
    for k in range(1, case.eval_mask.shape[2] - first + 1):
        num, den = reference.diagnostics[f"accept_rate_{k}"]
        assert float(terms["accept_rate_per_pos_num"][k - 1]) == pytest.approx(num, abs=1e-12)
        assert float(terms["accept_rate_per_pos_den"][k - 1]) == den
    assert float(terms["tau_num"]) == pytest.approx(reference.diagnostics["tau"][0], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_get_float32_losses(dtype: torch.dtype) -> None:
    outputs = make_case(seed=5, dtype=torch.float64)
    full = outputs.output(outputs.leaves())
    assert full.aligned_target_logits is not None
    low = dataclasses.replace(
        full,
        draft_logits=full.draft_logits.detach().to(dtype).requires_grad_(),
        aligned_target_logits=full.aligned_target_logits.to(dtype),
        confidence_pred=None,
    )
    exact = dataclasses.replace(
        low,
        draft_logits=low.draft_logits.detach().double().requires_grad_(),
        aligned_target_logits=full.aligned_target_logits.to(dtype).double(),
    )
    (loss, terms), (want, _) = evaluate(low), evaluate(exact)
    assert loss.dtype == terms["ce_loss"].dtype == torch.float32
    # Of the logits as they were given: rounding happened before, nothing is lost here.
    assert relative_error(loss, want) < 3e-7
    loss.backward()
    want.backward()
    assert low.draft_logits.grad is not None
    assert exact.draft_logits.grad is not None
    floor = {torch.float32: 3e-7, torch.bfloat16: 3e-3, torch.float16: 1e-3}[dtype]
    assert relative_error(low.draft_logits.grad, exact.draft_logits.grad) < floor


@pytest.mark.parametrize("chunk_size", [1, 3, 128])
def test_l1_distance_in_chunks(chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of the cache are smaller than chunks here.
    monkeypatch.setattr("tokennorm.draft.slot_math._BLOCK_BYTES_PER_THREAD", 4 * 7 * 2)
    generator = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(2, 3, 2, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    upstream = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    ours, plain = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    found = module._compute_l1_dist_per_token(
        draft_logits=ours, aligned_target_logits=target, chunk_size=chunk_size
    )
    want = module._l1_probability_distance_chunk(draft_logits=plain, target_logits=target)
    assert relative_error(found, want) < 1e-14
    assert relative_error(want, (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)) < 1e-14
    found.backward(upstream)
    want.backward(upstream)
    assert ours.grad is not None
    assert plain.grad is not None
    assert relative_error(ours.grad, plain.grad) < 1e-13
    assert torch.autograd.gradcheck(
        lambda z: module._compute_l1_dist_per_token(draft_logits=z, aligned_target_logits=target, chunk_size=2),
        [ours],
        eps=1e-7,
        atol=1e-6,
    )


def test_equal_distributions_have_distance_and_gradient_zero() -> None:
    logits = torch.randn(1, 2, 3, 9).requires_grad_()
    distance = module._compute_l1_dist_per_token(draft_logits=logits, aligned_target_logits=logits.detach())
    assert not distance.any()
    distance.sum().backward()
    assert logits.grad is not None
    assert not logits.grad.any()
    assert module._compute_accept_rate_3d(distance.detach()).eq(1).all()  # pyright: ignore[reportOptionalMemberAccess]


def test_helpers_without_a_teacher() -> None:
    weights = torch.ones(1, 2, 3)
    assert module._compute_accept_rate_3d(None) is None
    assert [float(x) for x in module._compute_local_l1_term(l1_dist_per_token=None, loss_weight_mask=weights)] == [
        0,
        0,
    ]
    outputs = dataclasses.replace(worked(1), aligned_target_logits=None, confidence_pred=None)
    sums = module._collect_acceptance_diagnostics(
        outputs=outputs, accept_rate_3d=None, loss_weight_mask=torch.ones(1, 1, 4), has_confidence=False
    )
    assert sums["accept_rate_pos_num"].shape == (3,)
    assert all(not value.any() for value in sums.values())
    terms, has_confidence = module._collect_local_terms(outputs=outputs, loss_decay_gamma=4.0, l1_loss_alpha=0.0)
    assert not has_confidence
    assert float(terms["ce_loss_den"]) > 0
    assert float(terms["l1_loss_den"]) == float(terms["confidence_loss_den"]) == 0


def test_a_teacher_is_needed_only_where_it_counts() -> None:
    without = dataclasses.replace(worked(0), aligned_target_logits=None)
    with pytest.raises(LossUsageError, match=r"l1_loss_alpha is 0\.9"):
        evaluate(without)
    with pytest.raises(LossUsageError, match="confidence head"):
        evaluate(without, l1_loss_alpha=0.0)
    loss, terms = evaluate(without, l1_loss_alpha=0.0, confidence_head_alpha=0.0)
    assert relative_error(loss, ALPHAS["ce"] * terms["ce_loss"]) < 1e-15
    assert float(terms["ce_loss"]) > 0
    assert float(terms["tau_den"]) == 0


def test_the_confidence_target_and_the_teacher_are_detached() -> None:
    outputs = worked(0)
    assert outputs.aligned_target_logits is not None
    outputs.aligned_target_logits.requires_grad_()
    loss, _ = evaluate(outputs, ce_loss_alpha=0.0, l1_loss_alpha=0.0)
    loss.backward()
    assert outputs.aligned_target_logits.grad is None
    assert outputs.draft_logits.grad is not None
    assert not outputs.draft_logits.grad.any()


def test_nothing_supervised_is_zero_with_gradient_zero() -> None:
    outputs = dataclasses.replace(worked(1), eval_mask=torch.zeros(1, 1, 4, dtype=torch.bool))
    loss, terms = evaluate(outputs)
    assert float(loss.detach()) == 0
    assert all(not value.any() for value in terms.values())
    loss.backward()
    for leaf in (outputs.draft_logits, outputs.confidence_pred):
        assert leaf is not None
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_tiny_weights_are_divided_by_what_they_sum_to() -> None:
    # Only the last slot of a long block counts: sum w = exp(-8), and no epsilon may show beside it.
    slots = 33
    eval_mask = torch.arange(slots).view(1, 1, -1) == slots - 1
    logits = torch.randn(1, 1, slots, 5, dtype=torch.float64)
    outputs = DSparkForwardOutput(
        draft_logits=logits,
        target_ids=torch.zeros(1, 1, slots, dtype=torch.int64),
        eval_mask=eval_mask,
        block_keep_mask=torch.ones(1, 1, dtype=torch.bool),
    )
    loss = compute_dspark_loss(
        outputs=outputs, loss_decay_gamma=0.5, ce_loss_alpha=1.0, l1_loss_alpha=0.0, confidence_head_alpha=0.0
    )
    assert isinstance(loss, Tensor)
    expected = F.cross_entropy(logits[0, 0, -1:], torch.zeros(1, dtype=torch.int64))
    assert relative_error(loss, expected) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Both divide the chunks of 128 evenly, so a chunked comparison would not notice.
        ({"aligned_target_logits": torch.zeros(1, 1, 3, 4)}, "2 logits per slot, the teacher 4"),
        ({"aligned_target_logits": torch.zeros(1, 3, 1, 2)}, "aligned_target_logits has shape"),
        ({"target_ids": torch.zeros(1, 3, dtype=torch.int64)}, "target_ids has shape"),
        ({"target_ids": torch.zeros(1, 1, 3)}, "must be integers"),
        ({"eval_mask": torch.ones(1, 2, 3, dtype=torch.bool)}, "eval_mask has shape"),
        ({"block_keep_mask": torch.ones(1, 1, 1, dtype=torch.bool)}, "block_keep_mask has shape"),
        ({"confidence_pred": torch.zeros(1, 1, 3, 1)}, "confidence_pred has shape"),
        ({"draft_logits": torch.zeros(1, 3, 2)}, "draft_logits must be"),
        ({"first_supervised_slot": 3}, "first_supervised_slot is 3"),
        ({"num_supervised": 2}, r"num_supervised is off by -1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LossUsageError, match=message):
        evaluate(dataclasses.replace(worked(0), **change))
    with pytest.raises(LossUsageError, match="one shape"):
        module._compute_l1_dist_per_token(draft_logits=torch.zeros(4, 2), aligned_target_logits=torch.zeros(2, 4))


def test_second_derivatives_are_refused() -> None:
    outputs = worked(0)
    loss, _ = evaluate(outputs)
    with pytest.raises(LossUsageError, match="create_graph"):
        torch.autograd.grad(loss, outputs.draft_logits, create_graph=True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("surplus", [None, 0, 3])
def test_no_host_sync_and_the_same_numbers(
    first: int, surplus: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(first=first, seed=6)
    leaves, other = case.leaves(), case.leaves()
    want, want_terms = evaluate(case.output(leaves))
    want.backward()
    monkeypatch.setattr(checks, "defers", lambda device: True)
    outputs = case.output(other)
    # Unsupervised slots are computed here, unless the host knows the number; they must do no harm.
    supervised = case.plan().supervised
    outputs.target_ids = torch.where(supervised, outputs.target_ids, -100)
    assert outputs.confidence_pred is not None
    outputs.confidence_pred = torch.where(supervised, outputs.confidence_pred, torch.nan)
    outputs.draft_logits = torch.where(supervised.unsqueeze(-1), outputs.draft_logits, torch.nan)
    outputs.num_supervised = None if surplus is None else int(supervised.sum()) + surplus
    with RefuseHostSync():
        loss, terms = evaluate(outputs)
        loss.backward()
    assert relative_error(loss, want) < 1e-14
    for name, value in terms.items():
        assert relative_error(value, want_terms[name]) < 1e-14
    for name, leaf in other.items():
        grad = leaves[name].grad
        assert leaf.grad is not None
        assert grad is not None
        assert relative_error(leaf.grad, grad) < 1e-14
    if surplus:
        with pytest.raises(LossUsageError, match="off by \\+3"):
            checks.raise_pending_slot_errors()
    checks.raise_pending_slot_errors()
