"""Autocast around the objective, the loss scaler's step, and what is said about sums in half precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.engine.toy import (
    ToyLM,
    ToyWindows,
    build_engine,
    gradients,
    micro_batch,
    reference_loss,
    weights,
)
from tokennorm.engine import (
    AutocastObjective,
    CausalLMObjective,
    CheckpointStore,
    autocast_dtype,
    build_scaler,
    evaluate,
    fixed_divisor,
    precision_notes,
)
from tokennorm.errors import ConfigError, NonFiniteError
from tokennorm.kit import TokenLossStats

WINDOW = ToyWindows().windows[0]


def float16_engine(scale: float = 1024.0) -> Any:
    return build_engine(ToyLM(dtype=torch.float32), scaler=torch.amp.GradScaler("cpu", init_scale=scale))


def test_training_dummies_and_evaluation_run_under_autocast() -> None:
    model = ToyLM(dtype=torch.float32)
    seen: list[torch.dtype] = []
    model.mix.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    objective = AutocastObjective(CausalLMObjective(), torch.bfloat16)
    engine = build_engine(model)
    engine.objective = objective
    report = engine.train_step(WINDOW)
    assert report.skipped is None
    evaluate(model, objective, WINDOW[:1])
    objective(model, objective.dummy(WINDOW[0]))
    assert seen == [torch.bfloat16] * (len(WINDOW) + 2)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert objective.model_kwargs == {"use_cache": False}
    assert not hasattr(AutocastObjective(lambda *_: None, torch.bfloat16), "dummy")  # type: ignore[arg-type]


def test_a_scale_grows_falls_and_gives_up() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    engine = build_engine(ToyLM(dtype=torch.float32), scaler=scaler)
    scales = []
    for window in (WINDOW, WINDOW, WINDOW):
        engine.train_step(window)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 8.0, 8.0]
    before = weights(engine.model)
    with torch.no_grad():
        engine.model.norm.weight[0] = torch.nan
    broken = [engine.train_step(WINDOW).skipped for _ in range(3)]
    assert broken == ["fp16 overflow"] * 3
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert {engine.train_step(WINDOW).skipped for _ in range(14)} == {"fp16 overflow"}
    with pytest.raises(NonFiniteError, match="overflow in float16 even at a loss scale of 6"):
        engine.train_step(WINDOW)
    with torch.no_grad():
        engine.model.norm.weight[0] = 1.0
    assert (weights(engine.model) - before).abs().max() < 1.0
    assert engine.step == 3


def test_a_rescale_factor_that_is_not_finite_is_an_error() -> None:
    engine = float16_engine()
    before = weights(engine.model)
    infinite = mock.PropertyMock(return_value=float("inf"))
    with (
        mock.patch.object(TokenLossStats, "gradient_scale", infinite),
        pytest.raises(NonFiniteError, match="factor that makes gradients exact is inf"),
    ):
        engine.train_step(WINDOW)
    assert torch.equal(weights(engine.model), before)


def test_a_scaled_step_is_the_unscaled_one() -> None:
    scaled, plain = float16_engine(), build_engine(ToyLM(dtype=torch.float32))
    for window in ToyWindows().windows:
        assert scaled.train_step(window).grad_norm == pytest.approx(plain.train_step(window).grad_norm, rel=1e-6)
    torch.testing.assert_close(weights(scaled.model), weights(plain.model), rtol=1e-5, atol=1e-6)


# A window of one token, then one of 400 of which a rank's micro-batches have very different shares.
UNEVEN = [[micro_batch(1, 9, 5)], [micro_batch(390, 400, 1), micro_batch(0, 5, 2), micro_batch(10, 40, 3)]]


def half_engine(**options: Any) -> Any:
    engine = build_engine(ToyLM(dtype=torch.float32), scaler=build_scaler(torch.float16, "cpu"), **options)
    engine.objective = AutocastObjective(engine.objective, torch.float16)
    engine.max_grad_norm = None
    return engine


def test_a_long_window_after_a_short_one_is_not_lost_in_float16() -> None:
    engine = half_engine(backward_divisor=fixed_divisor(400, 1))
    assert engine.backward_divisor == 512
    reports = [engine.train_step(window) for window in UNEVEN]
    assert [report.skipped for report in reports] == [None, None]
    # The kit's own divisor after the window of one token is 1: the scaled gradients leave float16's range.
    own = half_engine()
    assert [own.train_step(window).skipped for window in UNEVEN] == [None, "fp16 overflow"]


def test_uneven_windows_in_float16_are_as_exact_as_a_naive_mean_of_one_micro_batch() -> None:
    window = UNEVEN[1]
    engine = half_engine(backward_divisor=fixed_divisor(400, 1))
    found: list[torch.Tensor] = []
    engine.optimizer.register_step_pre_hook(lambda *_: found.append(gradients(engine.model).double()))
    engine.train_step(window)
    truth_model = ToyLM()
    truth_model.load_state_dict(ToyLM(dtype=torch.float32).state_dict())
    reference_loss(truth_model, window).backward()
    truth = gradients(truth_model)
    naive_model = ToyLM(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = sum(
            CausalLMObjective()(naive_model, batch).loss_sum / 400 for batch in window if batch["effective_tokens"]
        )
    (loss * 2.0**16).backward()
    naive = gradients(naive_model).double() / 2.0**16
    errors = [float((value - truth).norm() / truth.norm()) for value in (found[0], naive)]
    print(f"float16, uneven: {errors[0]:.1e}, divided by the right count at once {errors[1]:.1e}")
    assert errors[0] < max(1.1 * errors[1], 1e-4)


def test_a_kit_goes_on_with_the_divisor_of_its_checkpoint(tmp_path: Path) -> None:
    """Whatever came before: bit for bit, also where gradients are subnormal in float16."""
    whole = half_engine()
    whole.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
    whole.train_step(WINDOW)
    CheckpointStore(tmp_path).save(whole)
    whole.train_step(UNEVEN[1])
    again = half_engine()
    again.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-10)
    CheckpointStore(tmp_path).restore(again)
    again.train_step(UNEVEN[1])
    assert torch.equal(weights(again.model), weights(whole.model))
    forgetful = half_engine()
    CheckpointStore(tmp_path).restore(forgetful)
    forgetful.token_loss_kit.load_state_dict({"default_divisor": 1024.0})
    forgetful.train_step(UNEVEN[1])
    assert not torch.equal(weights(forgetful.model), weights(whole.model)), "or this test can't fail"


def test_what_adds_up_in_half_precision_is_said() -> None:
    assert precision_notes(nn.Linear(2, 2), torch.bfloat16) == []
    half = nn.Linear(2, 2).bfloat16()
    (sums, useless) = precision_notes(half, torch.bfloat16)
    assert "gradients add up in bfloat16, which rounds each sum to 8 bits" in sums
    assert "autocast changes little" in useless
    assert precision_notes(half.requires_grad_(False), None) == []
    assert build_scaler(torch.bfloat16, "cpu") is None
    scaler = build_scaler(torch.float16, "cpu")
    assert scaler is not None
    assert scaler.is_enabled()
    assert (autocast_dtype("none"), autocast_dtype("float16")) == (None, torch.float16)
    with pytest.raises(ConfigError, match="autocast is 'int8'"):
        autocast_dtype("int8")  # type: ignore[arg-type]
