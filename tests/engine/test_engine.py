"""One step of the engine: the exact gradient of the window, in the right order, or nothing at all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engine.toy import (
    ToyLM,
    ToyWindows,
    build_engine,
    gradients,
    micro_batch,
    reference_loss,
    skipping_kit,
    weights,
)
from tokennorm.engine import CausalLMObjective, ObjectiveOutput
from tokennorm.errors import EmptyWindowError, NonFiniteError, PatchError
from tokennorm.loss import RatioSum, label_checks
from tokennorm.testing import RefuseHostSync


def capture_gradients(engine: Any) -> list[torch.Tensor]:
    """The gradients that reach the optimizer, one entry per step."""
    seen: list[torch.Tensor] = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(engine.model).clone()))
    return seen


@pytest.mark.parametrize("router", [0.0, 0.7])
def test_each_step_applies_the_gradient_of_the_whole_window(router: float) -> None:
    model = ToyLM(router=router)
    engine = build_engine(model, max_grad_norm=None)
    seen = capture_gradients(engine)
    for window in ToyWindows().windows:
        reference = ToyLM(router=router)
        reference.load_state_dict(model.state_dict())
        loss = reference_loss(reference, window)
        loss.backward()
        report = engine.train_step(window)
        expected = gradients(reference)
        assert (seen[-1] - expected).norm() <= 1e-12 * expected.norm()
        total = sum(batch["effective_tokens"] for batch in window)
        router_mean = report.metrics["router"] if router else 0.0
        assert report.loss is not None
        assert router_mean is not None
        assert report.loss + router_mean == pytest.approx(loss.item(), rel=1e-12)
        assert report.grad_norm == pytest.approx(expected.norm().item(), rel=1e-12)
        assert (report.effective_tokens, report.total_tokens) == (
            total,
            sum(batch["total_tokens"] for batch in window),
        )
        # The planted mistake: the mean of the micro-batches' means is far from it.
        naive = ToyLM(router=router)
        naive.load_state_dict(reference.state_dict())
        used = [batch for batch in window if batch["effective_tokens"]]
        (sum(reference_loss(naive, [batch]) for batch in used) / len(used)).backward()
        if len(used) > 1:
            assert (gradients(naive) - expected).norm() > 1e-2 * expected.norm()


def test_order_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    calls: list[str] = []

    def record(target: Any, name: str, label: str) -> None:
        original = getattr(target, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            calls.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, spy)

    for name in ("accumulate_microbatch", "reduce_window", "rescale_gradients", "reset"):
        record(engine.token_loss_kit, name, name)
    record(engine.scaler, "unscale_", "unscale")
    record(engine, "_clip_gradients", "clip")
    engine.optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer"))
    record(engine.scheduler, "step", "scheduler")
    record(engine, "_report", "report")
    engine.train_step(ToyWindows().windows[0])
    assert calls == [
        *["accumulate_microbatch"] * 4,
        "reduce_window",
        "unscale",
        "rescale_gradients",
        "clip",
        "optimizer",
        "scheduler",
        "report",
        "reset",
    ]


def test_clipping_limits_the_exact_gradient_and_reports_its_norm() -> None:
    window = ToyWindows().windows[1]
    free = build_engine(max_grad_norm=None)
    free_seen = capture_gradients(free)
    norm = free.train_step(window).grad_norm
    assert norm is not None
    assert norm > 0.1
    clipped = build_engine(max_grad_norm=0.1)
    seen = capture_gradients(clipped)
    assert clipped.train_step(window).grad_norm == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(seen[0], free_seen[0] * 0.1 / norm, rtol=1e-5, atol=0)


def state_of(engine: Any) -> list[Any]:
    return [
        weights(engine.model).tolist(),
        [{k: float(v.sum()) for k, v in s.items()} for s in engine.optimizer.state.values()],
        engine.scheduler.state_dict()["last_epoch"],
        engine.scaler.state_dict(),
        engine.step,
        engine.optimizer.param_groups[0]["lr"],
    ]


EMPTY = [micro_batch(0, 5, 1), micro_batch(0, 3, 2)]


def test_an_empty_window_moves_nothing_and_is_reported() -> None:
    engine = build_engine(token_loss_kit=skipping_kit())
    engine.train_step(ToyWindows().windows[0])
    before = state_of(engine)
    report = engine.train_step(EMPTY)
    assert (report.skipped, report.loss, report.grad_norm) == ("empty window", None, None)
    assert (report.step, report.effective_tokens, report.total_tokens) == (1, 0, 8)
    assert state_of(engine) == before
    assert all(p.grad is None for p in engine.model.parameters())
    report = engine.train_step(ToyWindows().windows[1])
    assert (report.step, report.skipped) == (2, None)
    assert state_of(engine) != before


def test_an_empty_window_is_an_error_by_default() -> None:
    engine = build_engine()
    before = weights(engine.model)
    with pytest.raises(EmptyWindowError):
        engine.train_step(EMPTY)
    assert torch.equal(weights(engine.model), before)
    assert engine.step == 0


def test_a_gradient_that_is_not_finite_stops_before_the_weights() -> None:
    engine = build_engine()
    engine.train_step(ToyWindows().windows[0])
    with torch.no_grad():
        engine.model.mix.weight[0, 0] = math.inf
    before = weights(engine.model)
    with pytest.raises(NonFiniteError, match="gradient norm of step 2 is nan"):
        engine.train_step(ToyWindows().windows[1])
    assert torch.equal(weights(engine.model), before)


def test_fp16_overflow_skips_the_step_and_the_schedule() -> None:
    def steep() -> ToyLM:
        model = ToyLM(dtype=torch.float32)
        with torch.no_grad():
            model.head.weight.mul_(1000)
        return model

    model = steep()
    engine = build_engine(model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1))
    window = ToyWindows().windows[0]
    before = weights(model)
    reports = []
    while not reports or reports[-1].skipped:
        reports.append(engine.train_step(window))
        if reports[-1].skipped:
            assert torch.equal(weights(model), before)
    assert len(reports) > 1
    assert {report.skipped for report in reports[:-1]} == {"fp16 overflow"}
    assert [report.step for report in reports] == [0] * (len(reports) - 1) + [1]
    assert engine.scheduler is not None
    assert engine.scheduler.state_dict()["last_epoch"] == 1
    plain = build_engine(steep())
    plain.train_step(window)
    torch.testing.assert_close(weights(model), weights(plain.model), rtol=1e-4, atol=1e-6)


class MetricObjective(CausalLMObjective):
    """Adds a metric whose denominator is something else than tokens."""

    def __call__(self, model: Any, batch: Any) -> ObjectiveOutput:
        outputs = super().__call__(model, batch)
        metric = RatioSum(float(batch["total_tokens"]), 1)
        return ObjectiveOutput(loss_sum=outputs.loss_sum, metrics={"tokens_per_micro_batch": metric})


def test_metrics_are_ratios_of_sums_over_the_window() -> None:
    engine = build_engine()
    engine.objective = MetricObjective()
    first, second = ToyWindows().windows[:2]
    assert engine.train_step(first).metrics == {"tokens_per_micro_batch": (9 + 40 + 12 + 7) / 4}
    assert engine.train_step(second).metrics == {"tokens_per_micro_batch": (25 + 30 + 4 + 20) / 4}


def test_a_model_that_returns_a_mean_is_refused() -> None:
    class Mean(ToyLM):
        def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {"loss": super().forward(*args, **kwargs)["loss"].mean(), "extra_loss": None}

    with pytest.raises(PatchError, match=r"a loss of shape \[\] for labels of shape \[1, 9\]"):
        build_engine(Mean()).train_step([micro_batch(1, 9, 0)])


def test_a_router_loss_over_no_token_cannot_poison_the_window() -> None:
    class NoTokenNoRouter(ToyLM):
        def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            outputs = super().forward(*args, **kwargs)
            supervised = (kwargs["shift_labels"] != -100).sum()
            return {**outputs, "extra_loss": outputs["extra_loss"] * supervised / supervised}

    engine = build_engine(NoTokenNoRouter(router=0.5))
    report = engine.train_step([micro_batch(0, 6, 1), micro_batch(4, 6, 2)])
    assert report.metrics["router"] is not None
    assert math.isfinite(report.metrics["router"])
    assert torch.isfinite(weights(engine.model)).all()


def test_a_micro_batch_never_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, accounting and backward, router term included; only the end of a window reads numbers."""
    # An accelerator leaves the check of the labels to a flag that the end of the window reads.
    monkeypatch.setattr(label_checks, "defers", lambda _: True)
    engine = build_engine(ToyLM(router=0.3))
    window = ToyWindows().windows[0]
    with RefuseHostSync():
        for batch in window:
            engine.backward_step(engine.forward_step(batch), batch)
    with RefuseHostSync(refuse=False) as watch:
        engine.optimizer_step()
        engine.train_post_step()
    assert watch.syncs, "the mode sees what the end of a window reads"
