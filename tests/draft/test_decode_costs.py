"""The chosen schedule is the one that a search by hand finds, and it follows the costs."""

from __future__ import annotations

import pytest
import torch

from tests.draft.decode_toy import Oracle, drafter_for, lively_target, prompts
from tokennorm.draft import (
    DecodeCosts,
    Round,
    VerificationSchedule,
    choose_schedule,
    measure_costs,
    plain_decode,
    speculative_decode,
)
from tokennorm.errors import DataError


def recorded(count: int = 400, *, acceptance: float = 0.6, skill: float = 0.0, seed: int = 0) -> list[Round]:
    """Rounds of 5 proposals; with skill the confidence knows more about what will be accepted."""
    generator = torch.Generator().manual_seed(seed)
    rounds = []
    for _ in range(count):
        chances = (acceptance + skill * (torch.rand(5, generator=generator) - 0.5)).clamp(0.02, 0.98)
        hits = (torch.rand(5, generator=generator) < chances).long()
        accepted = int(hits.cumprod(0).sum())
        logits = tuple(chances.logit().tolist())
        rounds.append(Round(proposed=5, accepted=accepted, emitted=accepted + 1, ended=False, confidence=logits))
    return rounds


def by_hand(rounds: list[Round], costs: DecodeCosts, schedule: VerificationSchedule) -> float:
    """Tokens per second of a schedule, round by round with the rule that decodes."""
    tokens = seconds = 0.0
    limit = schedule.limit(5)
    for one in rounds:
        keep_going = schedule.start()
        verified = 0
        assert one.confidence is not None
        for k in range(min(limit, one.proposed)):
            if keep_going is not None and not keep_going(torch.tensor([one.confidence[k]]).double(), k):
                break
            verified += 1
        ended = one.ended and verified >= one.accepted
        tokens += min(one.accepted, verified) + (not ended)
        seconds += costs.target_seconds[verified] + costs.draft_seconds[limit]
    return tokens / seconds


FLAT = DecodeCosts(target_seconds=(1.0,) * 6, draft_seconds=(0.01,) * 6)
JUMP = DecodeCosts(target_seconds=(1.0, 1.05, 1.1, 2.0, 2.0, 2.0), draft_seconds=(0.0, 0.1, 0.1, 0.1, 0.1, 0.1))
STEEP = DecodeCosts(target_seconds=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), draft_seconds=(0.0, 0.5, 0.5, 0.5, 0.5, 0.5))


@pytest.mark.parametrize("skill", [0.0, 1.5])
@pytest.mark.parametrize("costs", [FLAT, JUMP, STEEP], ids=["flat", "jump", "steep"])
@pytest.mark.parametrize("temperatures", [None, (0.5, 1.0, 2.0, 2.0, 2.0)])
def test_nothing_in_the_grid_is_better(
    skill: float, costs: DecodeCosts, temperatures: tuple[float, ...] | None
) -> None:
    rounds = recorded(skill=skill)
    rounds[3:9] = [
        Round(proposed=2, accepted=2, emitted=2, ended=True, confidence=(0.5, 1.0)),
        Round(proposed=3, accepted=1, emitted=2, ended=False, confidence=(0.5, 1.0, -2.0)),
    ] * 3
    choice = choose_schedule(rounds, costs, sts_temperatures=temperatures)
    assert choice.speedup == pytest.approx(by_hand(rounds, costs, choice.schedule) * costs.target_seconds[0])
    assert choice.speedup_of_all == pytest.approx(by_hand(rounds, costs, VerificationSchedule()))
    for limit in range(6):
        for threshold in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
            other = VerificationSchedule(threshold=threshold, max_proposals=limit, sts_temperatures=temperatures)
            if limit or not threshold:
                assert by_hand(rounds, costs, other) <= choice.speedup * (1 + 1e-9)


def test_the_choice_follows_the_costs() -> None:
    everything = choose_schedule(recorded(), FLAT)
    assert everything.schedule == VerificationSchedule()
    assert everything.speedup == everything.speedup_of_all > 1.5
    assert everything.mean_verified == 5
    short = choose_schedule(recorded(), JUMP)
    assert short.schedule.max_proposals == 2
    assert short.speedup > short.speedup_of_all
    # Drafting that does not pay is not done.
    assert choose_schedule(recorded(), STEEP).schedule == VerificationSchedule(max_proposals=0)
    assert choose_schedule(recorded(), STEEP).speedup == 1.0
    # Behind the jump it pays to go to the end, with a drafter that gets there.
    assert choose_schedule(recorded(acceptance=0.97), JUMP).schedule.max_proposals is None
    # A confidence that knows what will be accepted is asked.
    medium = DecodeCosts(target_seconds=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5), draft_seconds=(0.0,) + (0.05,) * 5)
    asked = choose_schedule(recorded(acceptance=0.5, skill=3.0), medium)
    assert asked.schedule.threshold > 0
    assert asked.mean_verified < 5


def test_rounds_without_confidence_and_rounds_that_are_missing() -> None:
    blind = [
        Round(proposed=5, accepted=one.accepted, emitted=one.emitted, ended=False, confidence=None)
        for one in recorded()
    ]
    choice = choose_schedule(blind, JUMP, sts_temperatures=(1.0,) * 5)
    assert choice.schedule == VerificationSchedule(max_proposals=2)
    nothing = Round(proposed=0, accepted=0, emitted=1, ended=False, confidence=None)
    with pytest.raises(DataError, match="no rounds"):
        choose_schedule([nothing], JUMP)
    with pytest.raises(DataError, match="rounds of 5 proposals, and costs of up to 2"):
        choose_schedule(blind, DecodeCosts(target_seconds=(1.0,) * 3, draft_seconds=(1.0,) * 3))
    with pytest.raises(DataError, match="3 target_seconds and 2"):
        DecodeCosts(target_seconds=(1.0,) * 3, draft_seconds=(1.0,) * 2)


@pytest.mark.parametrize("first", [0, 1], ids=["next-token", "bonus-anchor"])
def test_costs_are_measured_with_passes_of_every_size(first: int) -> None:
    target = lively_target()
    drafter = drafter_for(target, first_supervised_slot=first)
    (prompt,) = prompts(1)
    fed: list[tuple[int, int]] = []
    handle = target.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: fed.append((kwargs["cache"].get_seq_length(), kwargs["input_ids"].shape[1])),
        with_kwargs=True,
    )
    costs = measure_costs(target, drafter, prompt, repeats=2)
    handle.remove()
    most = drafter.config.num_proposals
    assert len(costs.target_seconds) == len(costs.draft_seconds) == most + 1
    assert min(costs.target_seconds) > 0
    assert costs.draft_seconds[0] < costs.draft_seconds[1]
    assert fed[0] == (0, prompt.shape[1])
    assert sorted(set(fed[1:])) == [(prompt.shape[1], size) for size in range(1, most + 2)]


def test_a_chosen_schedule_decodes() -> None:
    target = lively_target()
    drafter = drafter_for(target, kind=Oracle)
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, max_new_tokens=40)
    drafter.know(plain.token_ids, prompt.shape[1], chance=0.6)
    rounds = speculative_decode(target, drafter, prompt, max_new_tokens=40).rounds
    choice = choose_schedule(rounds, JUMP)
    drafter.know(plain.token_ids, prompt.shape[1], chance=0.6)
    again = speculative_decode(target, drafter, prompt, max_new_tokens=40, schedule=choice.schedule)
    assert again.token_ids == plain.token_ids
    assert max(one.proposed for one in again.rounds) == (choice.schedule.max_proposals or 5)
