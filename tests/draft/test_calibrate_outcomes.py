"""What is known of a drafted prefix after a round, and what isn't."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draft.calibrate_toy import by_prompt, known_outcomes, known_rounds
from tokennorm.draft.calibration.metrics import calibration_report
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.calibration.sts import fit_sts
from tokennorm.draft.decoding.rounds import Round
from tokennorm.errors import ConfigError, DataError


def one(
    proposed: int, accepted: int, *, ended: bool = False, confidence: tuple[float, ...] | None = None
) -> Round:
    logits = tuple(0.5 * k - 0.3 for k in range(proposed)) if confidence is None else confidence
    return Round(proposed=proposed, accepted=accepted, emitted=accepted + 1, ended=ended, confidence=logits)


def test_rounds_of_every_kind() -> None:
    yes, no, unknown = True, False, None
    cases = [
        (one(3, 3), [yes, yes, yes]),
        (one(3, 1), [yes, no, no]),
        (one(3, 0), [no, no, no]),
        (one(3, 2, ended=True), [yes, yes, unknown]),
        (one(3, 3, ended=True), [yes, yes, yes]),
        (one(2, 1), [yes, no, unknown]),
        (one(2, 1, ended=True), [yes, unknown, unknown]),
        (one(0, 0), [unknown, unknown, unknown]),
    ]
    outcomes = PrefixOutcomes.of([each for each, _ in cases])
    known = [[value is not None for value in row] for _, row in cases]
    assert outcomes.observed.tolist() == known
    assert outcomes.survived.tolist() == [[bool(value) for value in row] for _, row in cases]
    assert outcomes.confidence[0].tolist() == [-0.3, 0.2, 0.7]
    assert (outcomes.num_proposals, outcomes.num_rounds, outcomes.num_prompts) == (3, 7, 7)
    assert PrefixOutcomes.of([cases[5][0]], num_proposals=4).observed.tolist() == [[True, True, False, False]]


@st.composite
def any_round(draw) -> Round:
    proposed = draw(st.integers(0, 4))
    accepted = draw(st.integers(0, proposed))
    logits = draw(st.lists(st.floats(-20, 20), min_size=proposed, max_size=proposed))
    ended = accepted > 0 and draw(st.booleans())
    return one(proposed, accepted, ended=ended, confidence=tuple(logits))


@given(st.lists(any_round(), max_size=12))
@settings(max_examples=60, deadline=None)
def test_estimates_are_products_over_the_prefix(rounds: list[Round]) -> None:
    temperatures = [0.5, 1.0, 2.0, 4.0]
    outcomes = PrefixOutcomes.of(rounds, num_proposals=4)
    survival, acceptance = outcomes.survival(temperatures), outcomes.acceptance(temperatures)
    for n, each in enumerate(rounds):
        product = 1.0
        for k in range(4):
            if k >= each.proposed or (each.ended and k >= each.accepted):
                assert not outcomes.observed[n, k]
                assert survival[n, k] == acceptance[n, k] == 0
                continue
            probability = 1 / (1 + math.exp(-each.confidence[k] / temperatures[k]))
            product *= probability
            assert outcomes.observed[n, k]
            assert bool(outcomes.survived[n, k]) == (each.accepted > k)
            assert float(acceptance[n, k]) == pytest.approx(probability, rel=1e-12)
            assert float(survival[n, k]) == pytest.approx(product, rel=1e-12)


def test_what_is_unobserved_is_not_read() -> None:
    outcomes = known_outcomes(rounds=400, end=0.3, seed=2)
    assert not outcomes.observed.all()
    poisoned = dataclasses.replace(
        outcomes, confidence=torch.where(outcomes.observed, outcomes.confidence, float("nan"))
    )
    assert calibration_report(poisoned, [0.5, 1, 2, 3]) == calibration_report(outcomes, [0.5, 1, 2, 3])
    assert fit_sts(poisoned) == fit_sts(outcomes)


def test_an_end_token_counted_as_a_rejection_would_show() -> None:
    """The head is right. Taking what follows an end token for rejected makes it look far too sure."""
    rounds = known_rounds(rounds=16000, end=0.05, seed=3)
    right = calibration_report(PrefixOutcomes.of(rounds))
    # The planted mistake: the round ended, and everything after the end token "did not survive".
    mistaken = calibration_report(PrefixOutcomes.of([dataclasses.replace(each, ended=False) for each in rounds]))
    assert right.positions[0] == mistaken.positions[0]
    for good, bad in zip(right.positions[1:], mistaken.positions[1:], strict=True):
        assert bad.count > good.count
        assert bad.ece > 2 * good.ece
        assert abs(good.mean_predicted - good.frequency) < 0.015
        assert bad.mean_predicted - bad.frequency > 0.016


def test_nothing_proposed_after_a_drafted_end_token_is_free_of_bias() -> None:
    """Even with very many end tokens, where leaving out what follows the accepted ones alone is biased."""
    exact = calibration_report(known_outcomes(rounds=8000, end=0.3, cut=True, seed=5))
    biased = calibration_report(known_outcomes(rounds=8000, end=0.3, seed=5))
    for right, high in zip(exact.positions[1:], biased.positions[1:], strict=True):
        deviation = math.sqrt(right.frequency * (1 - right.frequency) / right.count)
        assert abs(right.mean_predicted - right.frequency) < 3 * deviation
        assert high.mean_predicted - high.frequency > 4 * deviation


def test_conditional_estimates_taken_for_cumulative_ones_would_show() -> None:
    outcomes = known_outcomes(rounds=8000, seed=4)
    right = calibration_report(outcomes)
    assert all(each.ece < 2 * each.ece_floor for each in (*right.positions, *right.conditional))
    # The planted mistake: sigmoid(c_k) alone as the survival of the prefix.
    alone = outcomes.acceptance()
    for k in range(1, 4):
        gap = float(alone[:, k].mean() - outcomes.survived[:, k].to(torch.float64).mean())
        assert gap > 0.15
        assert abs(right.positions[k].mean_predicted - right.positions[k].frequency) < 0.02


def test_halves_share_no_prompt() -> None:
    prompts = by_prompt(known_rounds(rounds=130, seed=5), size=10)
    outcomes = PrefixOutcomes.of([*prompts, []])
    assert outcomes.num_prompts == 13
    first, second = outcomes.split(0)
    numbers = [set(half.prompt.tolist()) for half in (first, second)]
    assert not numbers[0] & numbers[1]
    assert numbers[0] | numbers[1] == set(range(13))
    assert (len(numbers[0]), len(numbers[1])) == (7, 6)
    assert first.num_rounds + second.num_rounds == 130
    for half in (first, second):
        for number in half.prompt.unique().tolist():
            own = half.select(half.prompt == number)
            assert own.confidence.tolist() == [list(each.confidence) for each in prompts[number]]
    assert torch.equal(outcomes.split(0)[0].prompt, first.prompt)
    assert any(
        not torch.equal(outcomes.split(seed)[0].prompt.unique(), first.prompt.unique()) for seed in (1, 2, 3)
    )
    # Plain rounds are prompts of their own.
    assert PrefixOutcomes.of(known_rounds(rounds=6)).split(0)[0].num_prompts == 3


@pytest.mark.parametrize(
    "empty",
    [[], [[]], [[], []], [one(0, 0)], [Round(proposed=0, accepted=0, emitted=1, ended=False, confidence=None)]],
)
def test_nothing_proposed(empty: list) -> None:
    outcomes = PrefixOutcomes.of(empty)
    assert (outcomes.num_proposals, outcomes.num_rounds, outcomes.num_prompts) == (0, 0, 0)
    assert calibration_report(outcomes).overall.count == 0
    assert fit_sts(outcomes) == []
    assert fit_sts(PrefixOutcomes.of(empty, num_proposals=2)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("rounds", "message"),
    [
        ([one(2, 1, confidence=(0.1,))], "2 proposals were verified, but there are 1 confidence logits"),
        ([Round(proposed=1, accepted=0, emitted=1, ended=False, confidence=None)], "has a confidence head"),
        ([one(1, 2, confidence=(0.1,))], "2 accepted of 1 verified"),
        ([one(1, -1)], "-1 accepted"),
        ([one(2, 0, ended=True)], "contradict"),
        ([one(4, 0)], "at most 3 proposals"),
        ([one(1, 1), [one(1, 1)]], "plain rounds stand among lists"),
        ([one(1, 1), one(2, 1, confidence=(0.1, float("inf")))], "round 1 has a logit that is not finite"),
    ],
)
def test_rounds_that_contradict_themselves(rounds: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PrefixOutcomes.of(rounds, num_proposals=3)


def test_impossible_outcomes() -> None:
    good = PrefixOutcomes.of([one(3, 3), one(3, 1), one(2, 0)])
    for change, message in (
        (
            {"survived": torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()},
            "survivor after a rejection",
        ),
        ({"observed": torch.tensor([[1, 1, 1], [1, 1, 1], [0, 1, 0]]).bool()}, "round 2 has observed after"),
        (
            {"observed": torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]]).bool()},
            "round 1 has a survivor in",
        ),
        ({"confidence": good.confidence.float()}, "dtypes"),
        ({"prompt": good.prompt[:2]}, "shapes"),
        ({"survived": good.survived[:, :2]}, "shapes"),
    ):
        with pytest.raises(DataError, match=message):
            dataclasses.replace(good, **change)


@pytest.mark.parametrize("temperatures", [[1.0], [1.0, 0.0], [1.0, -2.0], [1.0, math.inf], [1.0, math.nan]])
def test_temperatures_that_fit_no_proposal(temperatures: list[float]) -> None:
    with pytest.raises(ConfigError, match="one positive, finite temperature for each"):
        PrefixOutcomes.of([one(2, 1)]).survival(temperatures)
