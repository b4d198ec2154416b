"""Held-out loss is one sum over one count, whatever the batches and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.toy import ToyLM, micro_batch, reference_loss
from tokennorm.engine import CausalLMObjective, evaluate
from tokennorm.testing import spawn_ranks

BATCHES = [micro_batch(1, 10, 1), micro_batch(30, 31, 2), micro_batch(0, 4, 3), micro_batch(5, 9, 4)]


def test_sum_over_sum_and_everything_is_left_as_it_was() -> None:
    model = ToyLM(router=0.3, dropout=0.5)
    model.train()
    model.norm.eval()  # someone keeps a part in evaluation mode: it stays so
    generator = torch.get_rng_state()
    report = evaluate(model, CausalLMObjective(), BATCHES)
    model.eval()
    plain = ToyLM(router=0.0)
    plain.load_state_dict(model.state_dict())
    assert report.loss == pytest.approx(reference_loss(plain, BATCHES).item(), rel=1e-12)
    assert report.metrics["router"] is not None
    assert report.loss + report.metrics["router"] == pytest.approx(
        reference_loss(model, BATCHES).item(), rel=1e-12
    )
    mean_of_means = sum(reference_loss(plain, [b]).item() for b in BATCHES if b["effective_tokens"]) / 3
    assert abs(report.loss - mean_of_means) > 1e-2
    assert (report.effective_tokens, report.total_tokens) == (36, 54)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is None for p in model.parameters())


def test_training_modes_are_restored_module_by_module() -> None:
    model = ToyLM()
    model.train()
    model.norm.eval()
    evaluate(model, CausalLMObjective(), BATCHES[:1])
    assert (model.training, model.mix.training, model.norm.training) == (True, True, False)


def test_nothing_to_evaluate_has_no_loss() -> None:
    assert evaluate(ToyLM(), CausalLMObjective(), []).loss is None
    report = evaluate(ToyLM(), CausalLMObjective(), [micro_batch(0, 4, 1)])
    assert (report.loss, report.effective_tokens, report.total_tokens) == (None, 0, 4)


def evaluate_share(rank: int, world_size: int) -> Any:
    # Three batches on one rank, one on the other, none on the last.
    share = [BATCHES[:3], BATCHES[3:], []][rank]
    report = evaluate(ToyLM(router=0.3), CausalLMObjective(), share)
    return report.loss, report.effective_tokens, report.total_tokens, report.metrics


def test_ranks_may_hold_different_numbers_of_batches() -> None:
    results = [result.value for result in spawn_ranks(evaluate_share, 3)]
    one = evaluate(ToyLM(router=0.3), CausalLMObjective(), BATCHES)
    assert results[0] == results[1] == results[2]
    loss, effective, total, metrics = results[0]
    assert (effective, total) == (36, 54)
    assert loss == pytest.approx(one.loss, rel=1e-13)
    assert metrics["router"] == pytest.approx(one.metrics["router"], rel=1e-13)
