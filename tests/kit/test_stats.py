"""Stats become Python numbers when somebody reads them, once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokennorm.errors import EmptyWindowError, LabelError
from tokennorm.kit import TokenLossStats, TokenNormedLossKit
from tokennorm.kit.window import Slot, agreed, fingerprint
from tokennorm.loss import LossTerm, RatioSum, label_checks, linear_cross_entropy
from tokennorm.testing import RefuseHostSync


def reduced(kit: TokenNormedLossKit, effective: int | float | Tensor = 3) -> TokenLossStats:
    """As on an accelerator: nothing is read before somebody asks."""
    kit._read_at_reduce = False
    with torch.no_grad():
        kit.accumulate_microbatch(
            loss_sum=torch.tensor(6.0),
            effective_tokens=effective,
            total_tokens=8,
            backward_divisor=4,
            extra_terms={"z": LossTerm(numerator=torch.tensor(1.5), denominator=effective, weight=0.1)},
        )
    return kit.reduce_window()


def test_values_are_copied_once() -> None:
    stats = reduced(TokenNormedLossKit("cpu", 1))
    with RefuseHostSync(refuse=False) as watch:
        assert "not read yet" in repr(stats)
        assert stats.gradient_scale_tensor.shape == ()
    assert watch.syncs == []
    with RefuseHostSync(refuse=False) as watch:
        assert (stats.global_loss_sum, stats.global_effective_tokens, stats.global_total_tokens) == (6.0, 3, 8)
        assert (stats.backward_divisor, stats.gradient_scale, stats.mean_loss) == (4, 4 / 3, 2.0)
        assert stats.extra == {"z": RatioSum(1.5, 3.0)}
        assert (stats.is_empty, stats.skipped) == (False, False)
        assert "global_effective_tokens=3" in repr(stats)
    assert watch.syncs == ["Tensor.tolist"]
    assert stats.gradient_scale_tensor.item() == stats.gradient_scale


@pytest.mark.parametrize("effective", [3, torch.tensor(3)])
def test_a_number_of_tokens_is_an_int(effective: int | Tensor) -> None:
    assert isinstance(reduced(TokenNormedLossKit("cpu", 1), effective).global_effective_tokens, int)


@pytest.mark.parametrize("effective", [3.0, 9.25, torch.tensor(3.0)])
def test_a_sum_of_weights_is_a_float(effective: float | Tensor) -> None:
    stats = reduced(TokenNormedLossKit("cpu", 1), effective)
    assert isinstance(stats.global_effective_tokens, float)
    assert stats.global_effective_tokens == float(effective)


def test_stats_of_a_window_outlive_the_next_one() -> None:
    kit = TokenNormedLossKit("cpu", 1)
    first = reduced(kit)
    kit.reset()
    second = reduced(kit, 8)
    assert (first.global_effective_tokens, second.global_effective_tokens) == (3, 8)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_empty_window_that_nobody_has_read_scales_gradients_to_zero(policy: str) -> None:
    kit = TokenNormedLossKit("cpu", 1, empty_window=policy)  # type: ignore[arg-type]
    kit._read_at_reduce = False
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    kit.accumulate_microbatch(loss_sum=torch.tensor(0.0, requires_grad=True), effective_tokens=0, total_tokens=5)
    stats = kit.reduce_window()
    kit.rescale_gradients([parameter], stats)
    assert torch.equal(parameter.grad, torch.zeros(2))
    if policy == "skip":
        assert stats.skipped
    else:
        with pytest.raises(EmptyWindowError, match=r"on any of 1 ranks \(5 tokens in all\)"):
            _ = stats.skipped
    kit.reset()


def test_agreement_sees_every_difference() -> None:
    def message(*values: object) -> list[float]:
        marks = [fingerprint(value) for value in values]
        return [0.0] * Slot.SETUP_AGREEMENT + [
            float(len(marks)),
            float(sum(marks)),
            float(sum(mark * mark for mark in marks)),
        ]

    many = [("deferred", ("router",))] * 4096
    assert agreed(message(*many), Slot.SETUP_AGREEMENT)
    assert agreed(message(), Slot.SETUP_AGREEMENT)
    assert not agreed(message(*many, ("deferred", ("routers",))), Slot.SETUP_AGREEMENT)
    assert not agreed(message(8.0, 8.000000001), Slot.SETUP_AGREEMENT)


def test_a_label_found_bad_on_the_device_is_raised_when_the_window_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(label_checks, "defers", lambda device: True)
    linear_cross_entropy(torch.randn(2, 4), torch.randn(5, 4), torch.tensor([1, 7]), num_supervised=2)
    stats = reduced(TokenNormedLossKit("cpu", 1))
    with pytest.raises(LabelError, match="label 7 at row 1"):
        _ = stats.mean_loss
