"""The reference against the objective written out once more, in another way."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.audit.loop_pieces import TinyMoE, build_plain, supervised
from tokennorm.audit import Layout, TinyCausalLM, TokenLoss, collate, make_samples
from tokennorm.audit.evidence import window_evidence
from tokennorm.audit.jobs import LoopUnderTest, flatten
from tokennorm.audit.observe import WindowRecord
from tokennorm.audit.reference import ReferenceJob
from tokennorm.audit.token_loss import CausalTokenLoss, as_token_loss
from tokennorm.audit.unwrap import bare_model, check_deterministic, parameters_by_name, silence_dropout
from tokennorm.errors import AuditError

LAYOUT = Layout(name="two ranks", windows=((((0, 5), (11,)), ((3,), (10,))),), packed=False)
SAMPLES = make_samples(29, seed=4)


def moe():
    model = TinyMoE()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def evidence_of(build=build_plain, token_loss=None):
    """The reference of the layout for a loop whose gradient is zero."""
    loop = LoopUnderTest(
        build=build,
        step=lambda *_: None,
        token_loss=token_loss or CausalTokenLoss(),
        make_batch=collate,
        reference_model=None,
        seed=0,
    )
    model = loop.reference(LAYOUT)
    shapes = {name: tuple(p.shape) for name, p in parameters_by_name(model).items()}
    state = {name: p.detach().clone() for name, p in parameters_by_name(model).items()}
    job = ReferenceJob(layouts=[LAYOUT], samples=SAMPLES, states=[state], windows={(0, 0): 0}, shapes=shapes)
    records = [WindowRecord(parameters=state, steps=[dict.fromkeys(shapes)]) for _ in range(2)]
    return model, shapes, window_evidence([LAYOUT], (0, 0), records, 0, job(loop, 0), shapes)


def written_out(model, shapes, *, means=False, router=False):
    """The objective on the batches that the ranks get, padded and all."""
    model = model.double()
    batches = [collate([SAMPLES[n] for n in numbers], False) for rank in LAYOUT.windows[0] for numbers in rank]
    total = sum(map(supervised, batches))
    loss = torch.zeros(()).double()
    for batch in batches:
        outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        share = F.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        divisor = max(supervised(batch), 1) * len(batches) if means else total
        loss = loss + share / divisor
        if router:
            loss = loss + outputs.aux_loss * supervised(batch) / total
    loss.backward()
    return loss.item(), flatten({name: p.grad for name, p in parameters_by_name(model).items()}, shapes)


def test_the_reference_is_the_objective():
    model, shapes, evidence = evidence_of()
    loss, gradient = written_out(model, shapes)
    assert torch.allclose(evidence.reference, gradient, rtol=0, atol=1e-14)
    assert evidence.reference.norm() > 0.1
    assert evidence.reference_loss == pytest.approx(loss, rel=1e-12)
    # The planted mistake is seen.
    _, wrong = written_out(evidence_of()[0], shapes, means=True)
    assert (wrong - evidence.reference).norm() > 0.1 * gradient.norm()
    # In float32 the definition itself is off by rounding, and the audit knows by how much.
    assert 1e-9 < evidence.floor < 1e-6


def test_a_router_loss_keeps_the_loops_own_micro_batches():
    model, shapes, evidence = evidence_of(moe)
    loss, gradient = written_out(model, shapes, router=True)
    assert torch.allclose(evidence.reference, gradient, rtol=0, atol=1e-14)
    assert evidence.reference_loss == pytest.approx(loss, rel=1e-12)
    assert evidence.reference_token_loss < evidence.reference_loss


def test_groups_add_up():
    _, _, evidence = evidence_of()
    assert evidence.due == sum(SAMPLES[n].supervised_tokens for n in (0, 5, 3, 10, 11))
    assert [(g.rank, g.micro_batch, g.sample) for g in evidence.groups] == [
        (0, 0, 0),
        (0, 0, 5),
        (1, 0, 3),
        (1, 1, 10),
    ]
    assert torch.allclose(evidence.gradients.sum(0) / evidence.due, evidence.reference)


def by_token(model: nn.Module, batch) -> TokenLoss:
    plain = as_token_loss(CausalTokenLoss()(model, batch))
    return TokenLoss(loss=plain.loss, segment=torch.arange(len(plain.loss)))


def test_segments_split_a_sample():
    _, _, whole = evidence_of()
    _, _, single = evidence_of(token_loss=by_token)
    assert len(single.groups) == single.due
    assert set(single.counts.tolist()) == {1.0}
    assert torch.allclose(single.reference, whole.reference, rtol=0, atol=1e-14)


def test_tokens_that_do_not_count_may_be_anything():
    loss = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    outcome = as_token_loss((loss, torch.tensor([1.0, 0.0, 0.5])))
    (outcome.weight_or_ones() * outcome.loss).sum().backward()
    assert loss.grad is not None
    assert loss.grad.tolist() == [1.0, 0.0, 0.5]


def test_what_token_loss_must_return():
    with pytest.raises(AuditError, match="returned a dict"):
        as_token_loss({"loss": torch.ones(2)})
    with pytest.raises(AuditError, match="different lengths"):
        as_token_loss((torch.ones(2), torch.ones(3)))
    with pytest.raises(AuditError, match="without logits"):
        CausalTokenLoss()(nn.Embedding(5, 4), {"input_ids": torch.ones(3, dtype=torch.long), "labels": None})


def test_label_smoothing_is_that_of_torch():
    model = TinyCausalLM()
    batch = collate(SAMPLES[:3], packed=False)
    outcome = CausalTokenLoss(label_smoothing=0.2)(model, batch)
    logits, targets = model(**batch).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2)
    assert outcome.loss.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    uniform = -logits[targets != -100].log_softmax(-1).mean(-1)
    assert torch.allclose(outcome.parts["label_smoothing"], 0.2 * uniform, rtol=1e-5)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_seen_through():
    model = TinyCausalLM()
    plain = bare_model(Wrapper(Wrapper(model)))
    assert type(plain) is TinyCausalLM
    assert plain is not model
    assert set(parameters_by_name(Wrapper(model))) == set(parameters_by_name(model))


class FullyShardedDataParallel(nn.Linear):
    """Named as torch's old wrapper."""


def test_a_wrapper_that_hides_its_parameters_is_refused():
    with pytest.raises(AuditError, match="reference_model"):
        bare_model(nn.Sequential(FullyShardedDataParallel(2, 2)))


def test_random_models_are_refused_and_dropout_is_silenced():
    dropout = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    assert silence_dropout(dropout)
    assert not silence_dropout(dropout)
    check_deterministic(dropout(torch.ones(4, 2)), dropout(torch.ones(4, 2)))
    with pytest.raises(AuditError, match="differs between two calls"):
        check_deterministic(torch.tensor([1.0]), torch.tensor([1.1]))
