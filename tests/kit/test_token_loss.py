"""One process: the gradient of a window is that of the mean over its supervised tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.kit.window_toy import (
    DUMMY,
    ROUTER_WEIGHT,
    WINDOWS,
    Micro,
    ToyLM,
    gradients,
    micro,
    reference_gradients,
    relative_error,
    run_window,
)
from tokennorm.errors import EmptyWindowError, KitUsageError
from tokennorm.kit import TokenLossStats, TokenNormedLossKit
from tokennorm.loss import LossTerm
from tokennorm.testing import HostSyncError, RefuseHostSync

FLOOR = {torch.float64: 1e-14, torch.float32: 5e-7}


def new_kit(**options: object) -> TokenNormedLossKit:
    return TokenNormedLossKit(device="cpu", dp_world_size=1, **options)  # type: ignore[arg-type]


def finish(kit: TokenNormedLossKit, model: nn.Module) -> TokenLossStats:
    stats = kit.reduce_window()
    kit.rescale_gradients(model.parameters(), stats)
    kit.reset()
    return stats


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("counted", "router"),
    [(False, None), (False, "tokens"), (True, None), (True, "tokens"), (True, "routed")],
)
def test_gradient_is_the_float64_gradient_of_the_window(
    dtype: torch.dtype, as_tensors: bool, weighted: bool, counted: bool, router: str | None
) -> None:
    kit, model = new_kit(), ToyLM(dtype)
    expected = reference_gradients(WINDOWS, weighted=weighted, router=router)
    for window, reference in zip(WINDOWS, expected, strict=True):
        model.zero_grad()
        run_window(kit, model, window, weighted=weighted, router=router, counted=counted, as_tensors=as_tensors)
        finish(kit, model)
        assert relative_error(gradients(model), reference) < FLOOR[dtype]


def mean_of_means(model: nn.Module, window: list[Micro]) -> None:
    for batch in window:
        losses, _ = model(batch)
        (losses.sum() / max(batch.supervised, 1) / len(window)).backward()


def forgotten_rescale(model: nn.Module, window: list[Micro]) -> None:
    kit = new_kit()
    run_window(kit, model, window)
    kit.reduce_window()


def divisor_of_the_last_micro_batch(model: nn.Module, window: list[Micro]) -> None:
    for batch in window:
        (model(batch)[0].sum() / max(window[-1].supervised, 1)).backward()


def counted_in_all_tokens(model: nn.Module, window: list[Micro]) -> None:
    total = sum(len(batch.ids) for batch in window)
    for batch in window:
        (model(batch)[0].sum() / total).backward()


@pytest.mark.parametrize(
    "mistake", [mean_of_means, forgotten_rescale, divisor_of_the_last_micro_batch, counted_in_all_tokens]
)
def test_the_comparison_catches_planted_mistakes(mistake: Callable[[nn.Module, list[Micro]], None]) -> None:
    model = ToyLM()
    mistake(model, WINDOWS[0])
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0]) > 1e-2


def test_stats_are_the_sums_over_the_window() -> None:
    kit, model = new_kit(), ToyLM()
    window = WINDOWS[0]
    run_window(kit, model, window, router="tokens")
    stats = finish(kit, model)
    with torch.no_grad():
        outputs = [model(batch) for batch in window]
    supervised = sum(batch.supervised for batch in window)
    loss_sum = sum(float(losses.sum()) for losses, _ in outputs)
    router = sum(float(r) / b.routed * b.supervised for (_, r), b in zip(outputs, window, strict=True))
    assert (stats.global_effective_tokens, stats.global_total_tokens) == (supervised, 91)
    assert isinstance(stats.global_effective_tokens, int)
    assert stats.global_loss_sum == pytest.approx(loss_sum, rel=1e-14)
    assert stats.mean_loss == pytest.approx(loss_sum / supervised, rel=1e-14)
    assert stats.extra["router"].den == supervised
    assert stats.extra["router"].mean == pytest.approx(router / supervised, rel=1e-14)
    assert stats.gradient_scale == stats.backward_divisor / supervised
    assert not stats.skipped


def test_the_returned_loss_is_provisional_or_exact() -> None:
    kit = new_kit()
    term = LossTerm(numerator=torch.tensor(5.0, requires_grad=True), denominator=3, weight=2.0)
    loss_sum = torch.tensor(4.0, requires_grad=True)
    given = {"loss_sum": loss_sum, "effective_tokens": 3, "total_tokens": 4, "extra_terms": {"z": term}}
    assert kit.accumulate_microbatch(**given, backward_divisor=8).item() == (4 + 2 * 5) / 8
    kit.reset(discard=True)
    kit = new_kit(averaging_factor=7)
    totals = kit.begin_window({"loss": 3, "z": 10})
    assert {name: total.item() for name, total in totals.items()} == {"loss": 3, "z": 10}
    term = LossTerm(numerator=term.numerator, denominator=10, weight=2.0)
    loss = kit.accumulate_microbatch(**{**given, "extra_terms": {"z": term}})
    assert loss.item() == pytest.approx(7 * (4 / 3 + 2 * 5 / 10))
    stats = kit.reduce_window()
    assert (stats.gradient_scale, stats.backward_divisor) == (1, 1)


def test_default_divisor_is_a_power_of_two_near_the_tokens_of_a_window() -> None:
    kit, model, divisors = new_kit(), ToyLM(), []
    for window in (*WINDOWS, [micro(8, 8, 1)], [micro(9, 9, 1)]):
        run_window(kit, model, window)
        divisors.append(finish(kit, model).backward_divisor)
    # 58, 63, 5 and 8 supervised tokens; a count that is a power of two may go either way, up to twice.
    assert divisors == [1024, 64, 64, 8, 16]


@pytest.mark.parametrize("divisor", [None, 1, 4096, 2.0**40])
def test_a_power_of_two_rounds_nothing(divisor: float | None) -> None:
    def bits(given: float | None) -> list[torch.Tensor]:
        kit, model = new_kit(), ToyLM(torch.float32)
        run_window(kit, model, WINDOWS[0], backward_divisor=given)
        finish(kit, model)
        return gradients(model)

    assert all(torch.equal(a, b) for a, b in zip(bits(divisor), bits(64), strict=True))
    # The comparison is sharp enough to see one that rounds.
    assert not all(torch.equal(a, b) for a, b in zip(bits(57), bits(64), strict=True))


def test_averaging_factor_is_multiplied_back() -> None:
    kit, model = new_kit(averaging_factor=6), ToyLM()
    for batch in WINDOWS[0]:
        losses, _ = model(batch)
        loss = kit.accumulate_microbatch(
            loss_sum=losses.sum(), effective_tokens=batch.supervised, total_tokens=len(batch.ids)
        )
        (loss / 6).backward()
    finish(kit, model)
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0]) < 1e-14


def test_two_optimizers_and_parameters_given_twice() -> None:
    kit, model = new_kit(), ToyLM()
    run_window(kit, model, WINDOWS[0])
    stats = kit.reduce_window()
    first, second = [model.embed.weight, model.head.weight], list(model.mix.parameters())
    kit.rescale_gradients([*first, *first], stats)
    kit.rescale_gradients([*second, first[0]], stats)
    kit.reset()
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0]) < 1e-14


def test_sums_are_exact_where_float32_is_not() -> None:
    kit = new_kit()
    with torch.no_grad():
        for _ in range(3):
            kit.accumulate_microbatch(
                loss_sum=torch.tensor(2.0**24), effective_tokens=2**24 + 1, total_tokens=2**52 + 1
            )
        kit.accumulate_microbatch(
            loss_sum=torch.tensor(0.5),
            effective_tokens=torch.tensor(2**24 + 1),
            total_tokens=torch.tensor(2**24 + 1),
        )
    with pytest.raises(KitUsageError, match="outside 0"):
        kit.reduce_window()  # 3 * 2**52 total tokens are no longer exact
    kit.reset()
    with torch.no_grad():
        for _ in range(3):
            kit.accumulate_microbatch(
                loss_sum=torch.tensor(2.0**24), effective_tokens=2**24 + 1, total_tokens=2**50 + 1
            )
        kit.accumulate_microbatch(loss_sum=torch.tensor(0.5), effective_tokens=1, total_tokens=1)
    stats = kit.reduce_window()
    assert stats.global_effective_tokens == 3 * (2**24 + 1) + 1
    assert stats.global_total_tokens == 3 * (2**50 + 1) + 1
    assert stats.global_loss_sum == 3 * 2**24 + 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    kit, scale = new_kit(), 1024 / 1300
    parameter = nn.Parameter(torch.zeros(4000, dtype=dtype))
    gradient = torch.randn(4000, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter.grad = gradient.clone()
    kit.accumulate_microbatch(
        loss_sum=torch.tensor(1.0, requires_grad=True), effective_tokens=1300, total_tokens=1300
    )
    kit.rescale_gradients([parameter], kit.reduce_window())
    exact = gradient.double() * scale
    assert torch.equal(parameter.grad, exact.to(dtype))
    # The mistake: a scale that is itself rounded to half precision.
    assert (gradient * torch.tensor(scale, dtype=dtype) != exact.to(dtype)).double().mean() > 0.1


def test_other_kinds_of_gradients() -> None:
    kit = new_kit()
    sparse = nn.Embedding(5, 2, sparse=True)
    sparse(torch.tensor([1, 3, 3])).sum().backward()
    wave = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    wave.grad = torch.full((3,), 2 + 4j)
    without = nn.Parameter(torch.zeros(2))
    kit.accumulate_microbatch(
        loss_sum=torch.tensor(1.0, requires_grad=True), effective_tokens=4, total_tokens=4, backward_divisor=8
    )
    kit.rescale_gradients([sparse.weight, wave, without], kit.reduce_window())
    assert sparse.weight.grad is not None
    expected = torch.tensor([0, 2.0, 0, 4.0, 0]).unsqueeze(1).expand(5, 2)
    assert torch.equal(sparse.weight.grad.to_dense(), expected)
    assert torch.equal(wave.grad, torch.full((3,), 4 + 8j))
    assert without.grad is None


@pytest.mark.parametrize("counted", [False, True])
def test_empty_window_raises(counted: bool) -> None:
    kit, model = new_kit(), ToyLM()

    def empty_window() -> None:
        run_window(kit, model, [DUMMY, DUMMY], counted=counted)
        kit.reduce_window()

    with pytest.raises(EmptyWindowError, match="no token of this window is supervised"):
        empty_window()
    kit.reset()
    run_window(kit, model, WINDOWS[0])
    assert finish(kit, model).global_effective_tokens == 58


@pytest.mark.parametrize("counted", [False, True])
def test_empty_window_is_skipped_on_request(counted: bool) -> None:
    kit, model = new_kit(empty_window="skip"), ToyLM()
    run_window(kit, model, [DUMMY, DUMMY], counted=counted, router="tokens")
    stats = finish(kit, model)
    assert stats.is_empty
    assert stats.skipped
    assert stats.gradient_scale == 0
    assert stats.mean_loss is None
    assert stats.extra["router"].mean is None
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients(model))
    model.zero_grad()
    run_window(kit, model, WINDOWS[0], counted=counted, router="tokens")
    finish(kit, model)
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1], router="tokens")[0]) < 1e-14


def test_declared_terms_may_be_absent() -> None:
    kit, model = new_kit(extra_terms=("router", "z")), ToyLM()
    run_window(kit, model, WINDOWS[0], router="tokens")
    stats = finish(kit, model)
    assert list(stats.extra) == ["router", "z"]
    assert (stats.extra["router"].den, stats.extra["z"].den, stats.extra["z"].mean) == (58, 0, None)
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1], router="tokens")[0]) < 1e-14


@pytest.mark.parametrize("declared", [None, ("router",), ("router", "z")])
def test_a_declared_term_is_counted_once_in_a_counted_window(declared: tuple[str, ...] | None) -> None:
    kit, model = new_kit(extra_terms=declared), ToyLM()
    count = sum(batch.supervised for batch in WINDOWS[0])
    assert kit.begin_window({"loss": count, "router": count})["router"].item() == count
    run_window(kit, model, WINDOWS[0], router="tokens")
    finish(kit, model)
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1], router="tokens")[0]) < 1e-14


def test_more_extra_terms_than_one_message_block() -> None:
    kit, names = new_kit(), [f"term{i:02d}" for i in range(30)]
    with torch.no_grad():
        for _ in range(2):
            terms = {
                name: LossTerm(numerator=torch.tensor(float(i)), denominator=2) for i, name in enumerate(names)
            }
            kit.accumulate_microbatch(
                loss_sum=torch.tensor(1.0), effective_tokens=2, total_tokens=2, extra_terms=terms
            )
    extra = kit.reduce_window().extra
    assert {name: ratio.num for name, ratio in extra.items()} == {name: 2.0 * i for i, name in enumerate(names)}


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_nothing_waits_for_the_device(counted: bool, as_tensors: bool) -> None:
    kit, model = new_kit(), ToyLM()
    kit._read_at_reduce = False  # as on an accelerator
    expected = reference_gradients(WINDOWS[:2], router="tokens")
    for window, reference in zip(WINDOWS[:2], expected, strict=True):
        model.zero_grad()
        outputs = [model(batch) for batch in window]
        counts = [torch.tensor(b.supervised) if as_tensors else b.supervised for b in window]
        with RefuseHostSync():
            if counted:
                total = sum(counts[1:], counts[0])
                kit.begin_window({"loss": total, "router": total})
            for batch, (losses, routed), count in zip(window, outputs, counts, strict=True):
                term = LossTerm(numerator=routed / batch.routed * count, denominator=count, weight=ROUTER_WEIGHT)
                kit.accumulate_microbatch(
                    loss_sum=losses.sum(),
                    effective_tokens=count,
                    total_tokens=len(batch.ids),
                    extra_terms={"router": term},
                ).backward()
            stats = kit.reduce_window()
            kit.rescale_gradients(model.parameters(), stats)
            kit.reset()
            repr(stats)
        assert relative_error(gradients(model), reference) < 1e-14
        with RefuseHostSync(), pytest.raises(HostSyncError):
            _ = stats.gradient_scale


def test_a_device_without_float64_counts_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokennorm.kit.token_loss.supports_float64", lambda device: False)
    kit = new_kit()
    assert kit._window.sums.join().device.type == "cpu"
    model = ToyLM(torch.float32)
    run_window(kit, model, WINDOWS[0])
    finish(kit, model)
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0]) < FLOOR[torch.float32]


def test_evaluation_in_inference_mode_leaves_the_kit_fit_for_training() -> None:
    kit, model = new_kit(), ToyLM()
    with torch.inference_mode():
        for batch in WINDOWS[0]:
            kit.accumulate_microbatch(
                loss_sum=model(batch)[0].sum(), effective_tokens=batch.supervised, total_tokens=len(batch.ids)
            )
        mean = kit.reduce_window().mean_loss
        kit.reset()
    run_window(kit, model, WINDOWS[0])
    assert finish(kit, model).mean_loss == mean
    assert relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0]) < 1e-14
