"""Optimizer groups and the learning-rate schedule, against formulas written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tokennorm.engine import OptimConfig, build_optimizer, build_scheduler, learning_rate_factor
from tokennorm.errors import ConfigError


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def test_only_matrices_decay_unless_asked() -> None:
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }
    everything = build_optimizer(model, OptimConfig(weight_decay=0.1, decay_vectors=True))
    assert [group["weight_decay"] for group in everything.param_groups] == [0.1]


def test_frozen_parameters_are_left_out_and_tied_ones_count_once() -> None:
    model = small_model()
    model[2].weight.requires_grad_(False)
    model.register_parameter("tied", model[0].weight)
    optimizer = build_optimizer([*model.named_parameters(remove_duplicate=False)], OptimConfig())
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert len(ids) == len(set(ids)) == 5
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_optimizer(model, OptimConfig())


def test_the_step_is_decoupled_adamw() -> None:
    """One step against the formula in float64, decay applied to the weight and not to the gradient."""
    config = OptimConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    before, gradient = weight.detach().clone(), torch.randn(3, 4, dtype=torch.float64)
    weight.grad = gradient.clone()
    build_optimizer([("w", weight)], config).step()
    # With bias correction the first step's moments are the gradient and its square.
    expected = before * (1 - 0.01 * 0.3) - 0.01 * gradient / (gradient.abs() + 1e-6)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-14)
    coupled = before - 0.01 * (gradient + 0.3 * before) / ((gradient + 0.3 * before).abs() + 1e-6)
    assert (coupled - expected).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1]),
        (
            "cosine",
            [0.25, 0.5, 0.75, 1.0] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(1, 7)],
        ),
    ],
)
@pytest.mark.parametrize("warmup", [4, 0.4])
def test_schedule(schedule: str, warmup: float, expected: list[float]) -> None:
    config = OptimConfig(lr=2.0, schedule=schedule, warmup=warmup, min_lr_ratio=0.1)  # type: ignore[arg-type]
    optimizer = build_optimizer(small_model(), config)
    scheduler = build_scheduler(optimizer, config, total_steps=10)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(expected, abs=1e-12)


def test_schedule_without_warmup_starts_at_the_peak_and_never_rises_again() -> None:
    factor = learning_rate_factor(OptimConfig(warmup=0.0, schedule="linear"), 5)
    assert [factor(step) for step in range(7)] == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0])
    one = learning_rate_factor(OptimConfig(warmup=0.0, schedule="cosine"), 1)
    assert one(0) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0.0},
        {"lr": math.nan},
        {"warmup": -1.0},
        {"warmup": 1.5},
        {"schedule": "sine"},
        {"min_lr_ratio": 1.1},
        {"weight_decay": -0.1},
        {"betas": (0.9, 1.0)},
        {"eps": 0.0},
        {"max_grad_norm": 0.0},
    ],
)
def test_impossible_values_are_refused_where_they_are_given(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=rf"optim\.{next(iter(wrong))} is "):
        OptimConfig(**wrong)


def test_a_run_without_steps_or_shorter_than_its_warmup_is_refused() -> None:
    optimizer = build_optimizer(small_model(), OptimConfig())
    with pytest.raises(ConfigError, match="0 optimizer steps"):
        build_scheduler(optimizer, OptimConfig(), 0)
    with pytest.raises(ConfigError, match="warm-up takes 20 steps, but the run has 10"):
        build_scheduler(optimizer, OptimConfig(warmup=20), 10)
