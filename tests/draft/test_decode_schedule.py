"""How many proposals are verified depends on what is known before each of them, and on nothing later."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.draft.decode_toy import drafter_for, lively_target, prompts
from tokennorm.draft import VerificationSchedule, plain_decode, propose, speculative_decode
from tokennorm.errors import ConfigError

LOGITS = st.floats(-50, 50)


def decisions(schedule: VerificationSchedule, logits: list[float]) -> list[bool]:
    keep_going = schedule.start()
    assert keep_going is not None
    return [keep_going(torch.tensor([logit], dtype=torch.float64), k) for k, logit in enumerate(logits)]


@given(st.lists(LOGITS, min_size=5, max_size=5), st.lists(LOGITS, min_size=5, max_size=5), st.integers(0, 5))
def test_later_confidences_change_no_earlier_decision(
    first: list[float], second: list[float], shared: int
) -> None:
    schedule = VerificationSchedule(threshold=0.3, sts_temperatures=(0.5, 1.0, 2.0, 1.5, 3.0))
    mixed = first[:shared] + second[shared:]
    assert decisions(schedule, mixed)[:shared] == decisions(schedule, first)[:shared]


def test_the_rule_is_a_threshold_on_the_estimated_survival_of_the_prefix() -> None:
    logits = [2.0, 1.0, 0.5, -0.2]
    plain = list(itertools.accumulate((1 / (1 + math.exp(-c)) for c in logits), lambda a, b: a * b))
    for threshold in (0.1, 0.3, 0.5, 0.7, 0.9):
        schedule = VerificationSchedule(threshold=threshold)
        assert decisions(schedule, logits) == [survival >= threshold for survival in plain]
    temperatures = (2.0, 0.5, 1.0, 4.0)
    scaled = [1 / (1 + math.exp(-c / t)) for c, t in zip(logits, temperatures, strict=True)]
    calibrated = list(itertools.accumulate(scaled, lambda a, b: a * b))
    for threshold in (0.3, 0.5, 0.6, 0.8):
        schedule = VerificationSchedule(threshold=threshold, sts_temperatures=temperatures)
        assert decisions(schedule, logits) == [survival >= threshold for survival in calibrated]
    assert decisions(schedule, logits) != decisions(VerificationSchedule(threshold=0.8), logits)
    # Every round starts anew; extremes are numbers.
    assert decisions(schedule, logits) == decisions(schedule, logits)
    assert decisions(VerificationSchedule(threshold=0.5), [1e4, -1e4, 1e4]) == [True, False, False]
    assert VerificationSchedule(max_proposals=3).start() is None


def test_a_proposal_knows_only_what_comes_before_it() -> None:
    """In ``propose`` itself: other hidden states behind slot k change nothing up to it."""
    target = lively_target()
    drafter = drafter_for(target)
    schedule = VerificationSchedule(threshold=0.3)
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(15):
        hidden = torch.randn(1, 5, 16, generator=generator, dtype=torch.float64)
        anchor = torch.randint(39, (1,), generator=generator)
        with torch.no_grad():
            whole = propose(drafter, hidden, anchor, keep_going=schedule.start())
            lengths.add(whole.token_ids.shape[1])
            for k in range(4):
                other = hidden.clone()
                other[:, k + 1 :] = torch.randn(1, 4 - k, 16, generator=generator, dtype=torch.float64)
                changed = propose(drafter, other, anchor, keep_going=schedule.start())
                assert (changed.token_ids.shape[1] > k) == (whole.token_ids.shape[1] > k)
                assert torch.equal(changed.token_ids[:, : k + 1], whole.token_ids[:, : k + 1])
    assert len(lengths) >= 4


@pytest.mark.parametrize("first", [0, 1], ids=["next-token", "bonus-anchor"])
def test_output_is_the_same_whatever_is_verified(first: int) -> None:
    target = lively_target()
    drafter = drafter_for(target, first_supervised_slot=first)
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, max_new_tokens=16)
    most = drafter.config.num_proposals
    proposed = {}
    for threshold in (0.0, 0.2, 0.6, 1.0):
        for limit in (None, 0, 2, 9) if threshold == 0.0 else (None, 2):
            schedule = VerificationSchedule(threshold=threshold, max_proposals=limit)
            decoded = speculative_decode(target, drafter, prompt, max_new_tokens=16, schedule=schedule)
            assert decoded.token_ids == plain.token_ids
            assert all(r.proposed <= (most if limit is None else min(limit, most)) for r in decoded.rounds)
            assert all(len(r.confidence or ()) == r.proposed for r in decoded.rounds)
            proposed[threshold, limit] = sum(r.proposed for r in decoded.rounds) / len(decoded.rounds)
    assert proposed[0.0, None] >= proposed[0.2, None] > proposed[0.6, None] > proposed[1.0, None] == 0
    assert proposed[0.0, 9] == proposed[0.0, None]
    assert proposed[0.0, 0] == 0


def test_schedules_that_cannot_work_are_refused() -> None:
    for wrong, message in (
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"max_proposals": -1}, "max_proposals"),
        ({"sts_temperatures": (1.0, 0.0)}, "sts_temperatures"),
    ):
        with pytest.raises(ConfigError, match=message):
            VerificationSchedule(**wrong)
    target = lively_target()
    blind = drafter_for(target, enable_confidence_head=False)
    with pytest.raises(ConfigError, match="no confidence head"):
        speculative_decode(target, blind, [1], max_new_tokens=4, schedule=VerificationSchedule(threshold=0.2))
    limited = VerificationSchedule(max_proposals=2)
    assert speculative_decode(target, blind, [1], max_new_tokens=4, schedule=limited).rounds
    few = VerificationSchedule(threshold=0.2, sts_temperatures=[1.0, 1.0])
    with pytest.raises(ConfigError, match="2 sts_temperatures for 5"):
        speculative_decode(target, drafter_for(target), [1], max_new_tokens=4, schedule=few)
