"""The loss guard by itself: what it refuses, what it remembers, how it recovers, and what it costs and forbids."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tokennorm.errors import DistributedError, KitUsageError
from tokennorm.kit import PerTokenLossGuard, TokenNormedLossKit
from tokennorm.loss import LossTerm
from tokennorm.testing import spawn_ranks

SETTINGS: dict[str, Any] = {"spike_multiplier": 3.0, "window_size": 8, "min_history": 4}


def guard(**options: Any) -> PerTokenLossGuard:
    return PerTokenLossGuard("cpu", **{**SETTINGS, **options})


def feed(judge: PerTokenLossGuard, losses: list[float], tokens: int = 10) -> list[bool]:
    """Verdicts on micro-batches of these losses per token."""
    return [judge.check(torch.tensor(loss * tokens), tokens) for loss in losses]


@pytest.fixture
def kit() -> TokenNormedLossKit:
    return TokenNormedLossKit("cpu", 1, empty_window="skip")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_loss_is_refused_from_the_first_and_leaves_the_history_alone(bad: float) -> None:
    judge = guard()
    assert feed(judge, [bad, 2.0, 2.2, bad, 1.8, 2.1, bad]) == [False, True, True, False, True, True, False]
    assert judge.history.losses == pytest.approx((2.0, 2.2, 1.8, 2.1))
    assert judge.history.limit == pytest.approx(3 * 2.05)
    assert judge.last is not None
    assert (judge.last.reason, judge.last.non_finite_ranks, judge.last.own_offence) == ("non-finite", 1, True)
    assert judge.last.loss is None
    assert judge.refused_total == 3
    # Not poisoned: the spike is still seen, and what is ordinary still taken.
    assert feed(judge, [6.2, 2.0]) == [False, True]


def test_a_spike_is_measured_per_token_and_only_after_min_history() -> None:
    judge = guard()
    assert feed(judge, [2.0, 90.0, 2.0]) == [True, True, True]
    assert judge.history.limit is None
    assert feed(judge, [2.0, 5.9, 6.1]) == [True, True, False]
    assert judge.last is not None
    assert (judge.last.reason, judge.last.loss, judge.last.limit) == ("spike", pytest.approx(6.1), 6.0)
    # Ten times the tokens with ten times the sum are no spike; one token with that sum is.
    assert judge.check(torch.tensor(200.0), torch.tensor(100))
    assert not judge.check(torch.tensor(200.0), 1)


def test_a_rank_without_tokens_is_no_spike_and_is_not_remembered() -> None:
    judge = guard()
    feed(judge, [2.0] * 4)
    assert judge.check(torch.tensor(0.0), 0)
    assert judge.history.losses == (2.0,) * 4
    assert not judge.check(torch.tensor(math.nan), 0)


def test_spikes_in_a_row_stay_refused_but_a_new_level_is_accepted_after_half_the_window() -> None:
    judge = guard()
    feed(judge, [2.0, 2.1, 1.9, 2.0, 2.0, 2.1, 1.9, 2.0])
    assert feed(judge, [40.0, 40.0, 2.0, 40.0, 2.0]) == [False, False, True, False, True]
    judge = guard()
    feed(judge, [2.0] * 8)
    verdicts = feed(judge, [20.0] * 12)
    assert verdicts[:4] == [False] * 4
    assert verdicts[5:] == [True] * 7, "at most window_size // 2 + 1 are refused"
    assert feed(judge, [59.0, 61.0, 20.0]) == [True, False, True], "and the new level is guarded too"


def test_a_mean_in_place_of_the_median_would_let_the_second_spike_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses = [2.0] * 8 + [40.0, 18.0]
    assert feed(guard(), losses)[-2:] == [False, False]
    monkeypatch.setattr(statistics, "median", statistics.fmean)
    assert feed(guard(), losses)[-2:] == [False, True]


def test_a_history_without_refused_losses_would_skip_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = guard()
    feed(judge, [2.0] * 8)
    monkeypatch.setattr(judge.history, "add", lambda loss: None)
    assert not any(feed(judge, [20.0] * 30))


def test_an_infinite_multiplier_and_a_median_of_zero_refuse_non_finite_losses_only() -> None:
    judge = guard(spike_multiplier=math.inf)
    assert feed(judge, [2.0] * 8 + [1e30, math.nan]) == [True] * 9 + [False]
    judge = guard()
    assert feed(judge, [0.0] * 8 + [1e-3, math.nan]) == [True] * 9 + [False]


def test_a_state_carries_the_decisions_over() -> None:
    judge, other = guard(), guard()
    feed(judge, [2.0, 2.1, math.nan, 1.9, 2.0, 50.0])
    other.load_state_dict(judge.state_dict())
    assert other.state_dict() == judge.state_dict()
    assert other.refused_total == 2
    assert feed(other, [6.5, 2.0]) == [False, True]
    assert feed(guard(), [6.5]) == [True], "a fresh one has nothing to compare with"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spike_multiplier": 1.0}, "spike_multiplier is 1.0"),
        ({"spike_multiplier": math.nan}, "spike_multiplier is nan"),
        ({"min_history": 9}, "min_history is 9, window_size 8"),
        ({"min_history": 0}, "min_history is 0"),
        ({"group_world_size": 2}, "group_world_size is 2, but the guard's group has 1 ranks"),
    ],
)
def test_settings_that_can_not_work_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(KitUsageError, match=named):
        guard(**options)
    with pytest.raises(KitUsageError, match="shape"):
        guard().check(torch.ones(3), 3)


def test_without_a_guard_every_loss_takes_part_unread(kit: TokenNormedLossKit) -> None:
    # On the meta device, reading a value is an error.
    assert kit.guard_loss(torch.full((), math.nan, device="meta"), 3)


def test_what_replaces_a_refused_micro_batch_must_have_no_tokens(kit: TokenNormedLossKit) -> None:
    assert kit.build_loss_guard(**SETTINGS) is kit.loss_guard
    weight = torch.ones((), requires_grad=True)
    assert not kit.guard_loss(weight * math.nan, 4)
    with pytest.raises(KitUsageError, match="4 supervised tokens was accumulated in place of one that the loss"):
        kit.accumulate_microbatch(loss_sum=weight * math.nan, effective_tokens=4, total_tokens=4)
    kit.accumulate_microbatch(loss_sum=weight * 0.0, effective_tokens=0, total_tokens=0).backward()
    # The next one is judged for itself.
    assert kit.guard_loss(weight * 6, 3)
    kit.accumulate_microbatch(loss_sum=weight * 6, effective_tokens=3, total_tokens=5).backward()
    stats = kit.reduce_window()
    assert (stats.global_effective_tokens, stats.global_loss_sum) == (3, 6.0)
    kit.rescale_gradients([weight], stats)
    assert weight.grad == 2.0
    with pytest.raises(KitUsageError, match="guard_loss was called after reduce_window"):
        kit.guard_loss(weight * 6, 3)
    with pytest.raises(KitUsageError, match="build_loss_guard was called inside a window"):
        kit.build_loss_guard(**SETTINGS)


def test_a_counted_window_takes_no_guard(kit: TokenNormedLossKit) -> None:
    kit.build_loss_guard(**SETTINGS)
    with pytest.raises(KitUsageError, match="on a kit with a loss guard") as caught:
        kit.begin_window({"loss": 3})
    assert "a count that is already used" in str(caught.value)
    kit.loss_guard = None
    kit.begin_window({"loss": 3})
    with pytest.raises(KitUsageError, match="inside a window"):
        kit.build_loss_guard(**SETTINGS)


def test_the_graph_is_not_touched_and_inference_mode_is_fine(kit: TokenNormedLossKit) -> None:
    kit.build_loss_guard(**SETTINGS)
    weight = torch.ones((), requires_grad=True)
    loss = weight * 3
    assert kit.guard_loss(loss, torch.tensor(3))
    loss.backward()
    assert weight.grad == 3.0
    with torch.inference_mode():
        assert kit.guard_loss(torch.tensor(3.0), 3)


def on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    kit = TokenNormedLossKit("cpu", world_size)
    judge = kit.build_loss_guard(**SETTINGS, group_world_size=world_size)
    calls, all_reduce = 0, dist.all_reduce

    def spy(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = spy  # this process ends with the test
    # 10 tokens on rank 0, 90 on rank 1: the common loss is 0.1 * 1 + 0.9 * 2 = 1.9, not 1.5.
    tokens = (10, 90)[rank]
    losses = [(1.0, 2.0)[rank]] * 4
    ordinary = [kit.guard_loss(torch.tensor(loss * tokens), tokens) for loss in losses]
    nan = kit.guard_loss(torch.tensor((20.0, math.nan)[rank]), tokens)
    assert judge.last is not None
    nan_offence = judge.last.own_offence
    history = judge.history.losses
    # 30 nats per token over few tokens don't move the sum over sums above 5.7; over many they do.
    few = kit.guard_loss(torch.tensor((30.0, 2.0)[rank] * tokens), tokens)
    many = kit.guard_loss(torch.tensor((1.0, 30.0)[rank] * tokens), tokens)
    offence = judge.last.own_offence
    counted = calls
    other = PerTokenLossGuard("cpu", **{**SETTINGS, "spike_multiplier": 3.0 + rank})
    try:
        other.check(torch.tensor(1.0), 1)
        disagreement = ""
    except DistributedError as error:
        disagreement = str(error)
    # Off: not one more collective than the window's own.
    calls = 0
    plain = TokenNormedLossKit("cpu", world_size)
    weight = torch.ones((), requires_grad=True)
    for _ in range(3):
        assert plain.guard_loss(weight * 2, 1)
        term = LossTerm(numerator=weight * 1, denominator=1)
        plain.accumulate_microbatch(
            loss_sum=weight * 2, effective_tokens=1, total_tokens=1, extra_terms={"router": term}
        )
    plain.reduce_window()
    return {
        "verdicts": (ordinary, nan, few, many),
        "offences": (nan_offence, offence),
        "history": history,
        "calls": (counted, calls),
        "disagreement": disagreement,
    }


def test_ranks_decide_together_on_sums_over_sums() -> None:
    zero, one = (result.value for result in spawn_ranks(on_two_ranks, 2, timeout_s=60))
    for found in (zero, one):
        assert found["verdicts"] == ([True] * 4, False, True, False)
        assert found["history"] == pytest.approx((1.9,) * 4), "one rank's NaN is in nobody's history"
        assert found["calls"] == (7, 1)
        assert "different limits" in found["disagreement"]
    assert zero["offences"] == (False, False)
    assert one["offences"] == (True, True)
