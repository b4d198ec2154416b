"""Each misuse that can be known is an error that names the cause and the fix."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kit.window_toy import WINDOWS, ToyLM, run_window
from tokennorm.errors import KitUsageError
from tokennorm.kit import TokenNormedLossKit
from tokennorm.kit.extra_loss import ExtraLossWatch
from tokennorm.loss import LossTerm


def new_kit(**options: Any) -> TokenNormedLossKit:
    return TokenNormedLossKit(device="cpu", dp_world_size=1, **options)


def loss(value: float = 2.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def term(denominator: Any = 3, weight: float = 1.0, numerator: Tensor | None = None) -> LossTerm:
    return LossTerm(numerator=loss() if numerator is None else numerator, denominator=denominator, weight=weight)


def add(kit: TokenNormedLossKit, **changed: Any) -> Tensor:
    given = {"loss_sum": loss(), "effective_tokens": 3, "total_tokens": 4}
    return kit.accumulate_microbatch(**{**given, **changed})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_world_size": 2}, "dp_world_size is 2, but torch.distributed is not initialised"),
        ({"dp_world_size": 0}, "not a number of ranks"),
        ({"empty_window": "ignore"}, 'neither "raise" nor "skip"'),
        ({"averaging_factor": 0}, "averaging_factor is 0"),
        ({"averaging_factor": float("nan")}, "averaging_factor is nan"),
        ({"averaging_factor": "2"}, "averaging_factor is '2'"),
    ],
)
def test_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KitUsageError, match=message):
        TokenNormedLossKit(**{"device": "cpu", "dp_world_size": 1, **options})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_sum": loss().detach()}, "no graph although gradients are enabled"),
        ({"loss_sum": torch.ones(5, requires_grad=True)}, r"shape \[5\].*not one floating-point number"),
        ({"loss_sum": 2.0}, "loss_sum is a float"),
        ({"effective_tokens": -1}, "effective_tokens is -1"),
        ({"effective_tokens": float("nan")}, "effective_tokens is nan"),
        ({"total_tokens": float("inf")}, "total_tokens is inf"),
        ({"total_tokens": 2**53 + 1}, "not a count between 0 and 2"),
        ({"effective_tokens": True}, "effective_tokens is True"),
        ({"effective_tokens": None}, "effective_tokens is None"),
        ({"effective_tokens": torch.ones(2)}, "must be a number or a 0-d tensor"),
        ({"effective_tokens": torch.tensor(True)}, "must be a number or a 0-d tensor"),
        ({"effective_tokens": 5}, "effective_tokens is 5, above total_tokens 4"),
        ({"backward_divisor": 0}, "backward_divisor is 0, not a positive finite number"),
        ({"backward_divisor": float("inf")}, "backward_divisor is inf"),
        ({"extra_terms": {"loss": term()}}, 'named "loss"'),
        ({"extra_terms": {"router": term(4)}}, "'router' has denominator 4, the micro-batch 3"),
        ({"extra_terms": {"router": term(numerator=torch.tensor(1.0))}}, "'router' has no graph"),
    ],
)
def test_a_bad_micro_batch_is_refused_and_leaves_the_window_as_it_was(
    changed: dict[str, Any], message: str
) -> None:
    kit = new_kit()
    add(kit)
    with pytest.raises(KitUsageError, match=message):
        add(kit, **changed)
    stats = kit.reduce_window()
    assert (stats.global_loss_sum, stats.global_effective_tokens, stats.global_total_tokens) == (2.0, 3, 4)
    assert stats.extra == {}


def test_what_looks_like_misuse_but_is_right() -> None:
    kit = new_kit()
    # Weights above 1: more weight than tokens. A term over no token: a constant. A term without weight: logged.
    add(kit, effective_tokens=7.5)
    add(kit, effective_tokens=torch.tensor(7.5))
    add(kit, effective_tokens=0, extra_terms={"router": term(0, numerator=torch.tensor(0.0))})
    assert kit.reduce_window().global_effective_tokens == 15.0


@pytest.mark.parametrize(("first", "second"), [(8, 16), (None, 8), (8, None)])
def test_divisor_changed_inside_a_window(first: float | None, second: float | None) -> None:
    kit = new_kit()
    add(kit, backward_divisor=first)
    with pytest.raises(KitUsageError, match="backward_divisor changed inside a window"):
        add(kit, backward_divisor=second)
    kit.reset(discard=True)
    add(kit, backward_divisor=second)


def test_weight_changed_inside_a_window() -> None:
    kit = new_kit()
    add(kit, extra_terms={"router": term(weight=1.0)})
    with pytest.raises(KitUsageError, match=r"weight of the extra term 'router' changed .*: 1.0, then 2.0"):
        add(kit, extra_terms={"router": term(weight=2.0)})


def test_a_term_that_was_not_declared() -> None:
    kit = new_kit(extra_terms=("router",))
    with pytest.raises(KitUsageError, match=r"\['z'\] were not declared"):
        add(kit, extra_terms={"z": term()})
    with pytest.raises(KitUsageError, match=r"\['z'\] were not declared"):
        kit.begin_window({"loss": 3, "z": 3})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"effective_tokens": torch.tensor(-1)}, "1 times over all ranks: counts given as tensors"),
        ({"effective_tokens": torch.tensor(float("nan"))}, "counts given as tensors"),
        ({"effective_tokens": torch.tensor(5)}, "more effective tokens than total tokens"),
        ({"extra_terms": {"router": term(torch.tensor(4))}}, "in something else than the micro-batch's effective"),
        ({"effective_tokens": 0}, "no supervised token but a loss of 2"),
        ({"effective_tokens": 1e-300, "backward_divisor": 1e30}, "the gradient scale is inf"),
        ({"effective_tokens": 1e-30, "backward_divisor": 1e30}, "the gradient scale is 1e[+]60"),
    ],
)
@pytest.mark.parametrize("at_read", [False, True])
def test_what_only_the_sums_show(changed: dict[str, Any], message: str, at_read: bool) -> None:
    kit = new_kit(empty_window="skip")
    kit._read_at_reduce = not at_read
    add(kit, **changed)
    if not at_read:
        with pytest.raises(KitUsageError, match=message):
            kit.reduce_window()
    else:
        stats = kit.reduce_window()
        for _ in range(2):
            with pytest.raises(KitUsageError, match=message):
                _ = stats.global_loss_sum
    kit.reset()
    add(kit)
    assert kit.reduce_window().global_effective_tokens == 3


def test_order_of_calls() -> None:
    kit, parameter = new_kit(), nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    add(kit)
    with pytest.raises(KitUsageError, match="reset was called on a window without reduce_window and rescale"):
        kit.reset()
    stats = kit.reduce_window()
    with pytest.raises(KitUsageError, match="reduce_window was called twice without reset"):
        kit.reduce_window()
    with pytest.raises(KitUsageError, match="accumulate_microbatch was called after reduce_window"):
        add(kit)
    with pytest.raises(KitUsageError, match="reset was called on a window without rescale_gradients"):
        kit.reset()
    kit.rescale_gradients([parameter], stats)
    kit.reset()
    add(kit)
    with pytest.raises(KitUsageError, match="before reduce_window"):
        kit.rescale_gradients([parameter], stats)
    kit.reduce_window()
    with pytest.raises(KitUsageError, match="stats of another window"):
        kit.rescale_gradients([parameter], stats)
    kit.reset(discard=True)


@pytest.mark.parametrize("counted", [False, True])
def test_rescaling_twice(counted: bool) -> None:
    kit, model = new_kit(), ToyLM()
    run_window(kit, model, WINDOWS[0], counted=counted)
    stats = kit.reduce_window()
    kit.rescale_gradients(model.parameters(), stats)
    assert model.head.weight.grad is not None
    before = model.head.weight.grad.clone()
    with pytest.raises(KitUsageError, match="all 4 parameters with a gradient were already rescaled"):
        kit.rescale_gradients(model.parameters(), stats)
    with pytest.raises(KitUsageError, match="all 1 parameters"):
        kit.rescale_gradients(model.head.weight, stats)
    assert torch.equal(model.head.weight.grad, before)


def test_rescaling_nothing() -> None:
    kit, model = new_kit(), ToyLM()
    run_window(kit, model, WINDOWS[0])
    stats, parameters = kit.reduce_window(), model.parameters()
    list(parameters)
    with pytest.raises(KitUsageError, match="got no parameters"):
        kit.rescale_gradients(parameters, stats)
    with pytest.raises(KitUsageError, match="got a module"):
        kit.rescale_gradients(model, stats)  # type: ignore[arg-type]


def test_counted_windows() -> None:
    kit = new_kit()
    with pytest.raises(KitUsageError, match='none for "loss"'):
        kit.begin_window({"router": 3})
    kit.begin_window({"loss": 3})
    with pytest.raises(KitUsageError, match="begin_window was called inside a window"):
        kit.begin_window({"loss": 3})
    with pytest.raises(KitUsageError, match="backward_divisor=8 in a counted window"):
        add(kit, backward_divisor=8)
    with pytest.raises(KitUsageError, match=r"\['router'\] were not announced"):
        add(kit, extra_terms={"router": term()})
    kit.reset(discard=True)
    add(kit)
    with pytest.raises(KitUsageError, match="begin_window was called inside a window"):
        kit.begin_window({"loss": 3})


@pytest.mark.parametrize(
    ("announced", "effective"),
    [(4, 3), (2, 3), (torch.tensor(4), 3), (4, torch.tensor(3)), (3.01, 3.0), (torch.tensor(3.01), 3.0)],
)
def test_a_counted_window_that_brings_something_else(announced: Any, effective: Any) -> None:
    kit = new_kit()
    kit.begin_window({"loss": announced})
    add(kit, effective_tokens=effective)
    with pytest.raises(KitUsageError, match="differ from what it announced"):
        kit.reduce_window()


def test_a_counted_window_takes_weight_sums_added_in_another_order() -> None:
    kit, weights = new_kit(), [0.1, 0.2, 0.3, 0.7]
    kit.begin_window({"loss": sum(reversed(weights))})
    for weight in weights:
        add(kit, effective_tokens=weight)
    assert kit.reduce_window().global_effective_tokens == pytest.approx(1.3)


class RouterModel(nn.Module):
    """Answers like a patched model: per-token losses and the family's own additional loss."""

    def __init__(self, coefficient: float) -> None:
        super().__init__()
        self.weight, self.coefficient = nn.Parameter(torch.ones(3)), coefficient

    def forward(self) -> SimpleNamespace:
        return SimpleNamespace(loss=self.weight * 2, extra_loss=self.coefficient * self.weight.sum())


def watched(coefficient: float) -> tuple[TokenNormedLossKit, RouterModel]:
    kit, model = new_kit(), RouterModel(coefficient)
    kit._watch.watch(model)
    return kit, model


def test_an_extra_loss_that_nobody_accumulates() -> None:
    kit, model = watched(0.1)
    for _ in range(2):
        add(kit, loss_sum=model().loss.sum())
    with pytest.raises(KitUsageError, match=r"2 times over all ranks: .*extra_loss.* that nobody accumulated"):
        kit.reduce_window()


def test_an_extra_loss_that_somebody_accumulates_or_that_is_none() -> None:
    kit, model = watched(0.1)
    outputs = model()
    extra_terms = {"router": term(numerator=outputs.extra_loss * 3)}
    add(kit, loss_sum=outputs.loss.sum(), extra_terms=extra_terms)
    with torch.no_grad():
        model()  # an evaluation in between trains nothing
    add(kit)
    assert kit.reduce_window().global_effective_tokens == 6
    kit, model = watched(0.0)
    add(kit, loss_sum=model().loss.sum())
    assert kit.reduce_window().global_effective_tokens == 3


def test_copies_of_a_watched_model_report_to_nobody() -> None:
    kit, model = watched(0.1)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    twin(), loaded()
    add(kit)
    assert kit.reduce_window().global_effective_tokens == 3
    assert all(isinstance(hook, ExtraLossWatch) for hook in twin._forward_hooks.values())
