"""Sampled output has the target's distribution, by chi-squared; wrong rules of acceptance do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokennorm.draft.decoding.rules as rules_module
import tokennorm.draft.decoding.speculative as decode_module
from tests.draft.decode_statistics import (
    VOCAB,
    Outcome,
    PairTarget,
    chi_squared,
    exact_distribution,
    fair_drafter,
)
from tests.draft.decode_toy import drafter_for, lively_target
from tokennorm.draft import Proposal, VerificationSchedule, plain_decode, propose, speculative_decode
from tokennorm.draft.decoding.sampling import draw, probabilities, verify_sampled
from tokennorm.draft.decoding.target import TargetSteps

PROMPT = [3, 1]
Verify = Callable[..., tuple[Tensor, Tensor]]


def test_draws_have_the_weights_they_are_given() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0, 0.0], [2.0, 0.0, 0.0, 0.0, 2.0]], dtype=torch.float64)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for row, expected in zip(weights, ([0, 250, 0, 750, 0], [500, 0, 0, 0, 500]), strict=True):
        found = draw(row.expand(1000, -1), uniforms)
        assert found.bincount(minlength=5).tolist() == expected
    # The ends: 0, and a product that is rounded up to the total.
    almost = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights[:1].expand(2, -1), almost).tolist() == [1, 3]
    assert draw(weights[:1].float().expand(2, -1) * 1e-30, almost).tolist() == [1, 3]
    # A rare token of a large vocabulary is as likely as it should be: float32 sums would lose it.
    many = torch.full((1, 100_000), 1.0)
    many[0, 50_000] = 1e-3
    edge = (50_000 + torch.tensor([-1e-6, 5e-4, 1e-3 + 1e-6], dtype=torch.float64)) / (99_999 + 1e-3)
    assert draw(many.expand(3, -1), edge).tolist() == [49_999, 50_000, 50_001]


def test_probabilities_are_those_of_the_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0]], dtype=torch.float64)
    assert torch.allclose(probabilities(logits, 0.7), (logits / 0.7).softmax(-1), atol=1e-15)
    assert probabilities(logits, 0.7).dtype == torch.float64
    assert probabilities(logits.bfloat16(), 1.0).dtype == torch.float32
    assert torch.equal(probabilities(logits.float(), 1e-42), torch.tensor([[0.0, 1.0, 0.0]]))


def tables(temperature: float, *, reduced: bool) -> tuple[Tensor, Tensor]:
    """Target ``[V, V, V]`` by the two tokens before, drafter ``[2, V, V]`` by slot and the token before."""
    generator = torch.Generator().manual_seed(11)
    single = torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    target = single + 0.8 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    drafter = single + 0.8 * torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    if reduced:
        drafter[:, :, [0, 5]] = -torch.inf
    return probabilities(target, temperature), probabilities(drafter, temperature)


def simulate(count: int, temperature: float, verify: Verify, *, reduced: bool = False) -> list[Outcome]:
    """The first three tokens of ``count`` independent rows, after the same prompt, by rounds of two proposals."""
    target, drafter = tables(temperature, reduced=reduced)
    generator = torch.Generator().manual_seed(5)
    rows = torch.arange(count)
    # Each round emits at least one token, so three rounds make three; 3 tokens each at most, and the prompt's two.
    tokens = torch.zeros(count, 2 + 9, dtype=torch.int64)
    tokens[:, :2] = torch.tensor(PROMPT)
    length = torch.full((count,), 2)
    for _ in range(3):
        uniforms = torch.rand(5, count, generator=generator, dtype=torch.float64)
        before, last = tokens[rows, length - 2], tokens[rows, length - 1]
        first_q = drafter[0, last]
        first = draw(first_q, uniforms[0])
        second_q = drafter[1, first]
        second = draw(second_q, uniforms[1])
        accepted, own = verify(
            torch.stack([target[before, last], target[last, first], target[first, second]], dim=1),
            torch.stack([first_q, second_q], dim=1),
            torch.stack([first, second], dim=1),
            uniforms[2:4].t(),
            uniforms[4],
        )
        for place, drafted in enumerate((first, second)):
            keep = accepted > place
            tokens[rows[keep], length[keep] + place] = drafted[keep]
        tokens[rows, length + accepted] = own
        length = length + accepted + 1
    return [tuple(row) for row in tokens[:, 2:5].tolist()]


def expected(temperature: float) -> dict[Outcome, float]:
    target, _ = tables(temperature, reduced=False)
    one = target[PROMPT[0], PROMPT[1]]
    joint = one[:, None, None] * target[PROMPT[1]][:, :, None] * target
    outcomes = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3).tolist()
    return dict(zip(map(tuple, outcomes), joint.flatten().tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_verified_tokens_have_the_distribution_of_the_target(temperature: float, reduced: bool) -> None:
    assert (
        chi_squared(simulate(100_000, temperature, verify_sampled, reduced=reduced), expected(temperature)) > 1e-4
    )


def residual_is_the_target(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Planted: a rejected token is replaced by one of p instead of the residual."""
    accepted, _ = verify_sampled(target, drafter, drafted, uniforms, last_uniform)
    return accepted, draw(target[torch.arange(len(target)), accepted], last_uniform)


def accepted_with_p(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Planted: accepted with probability p instead of p / q."""
    q = drafter.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    return verify_sampled(target, drafter, drafted, uniforms / q, last_uniform)


def accepted_with_its_inverse(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Planted: accepted with probability q / p."""
    p = target[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    q = drafter.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    return verify_sampled(target, drafter, drafted, uniforms * (p / q) ** 2, last_uniform)


def one_number_for_both(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, _last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Planted: the number that accepts the first token draws the last one too."""
    return verify_sampled(target, drafter, drafted, uniforms, uniforms[:, 0])


def later_ones_too(
    target: Tensor, drafter: Tensor, drafted: Tensor, uniforms: Tensor, last_uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Planted: the first token is accepted if the second is."""
    p = target[:, :-1].gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    q = drafter.gather(-1, drafted.unsqueeze(-1)).squeeze(-1)
    both = (uniforms * q < p).any(dim=1, keepdim=True)
    return verify_sampled(target, drafter, drafted, torch.where(both, 0.0, uniforms), last_uniform)


PLANTED = [residual_is_the_target, accepted_with_p, accepted_with_its_inverse, one_number_for_both, later_ones_too]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_in_the_rule_are_found(mistake: Verify, temperature: float) -> None:
    assert chi_squared(simulate(20_000, temperature, mistake), expected(temperature)) < 1e-6


def test_a_residual_of_nothing_is_the_target() -> None:
    """It can only come of rounding: the token was rejected, and p is nowhere above q."""
    p = torch.tensor([[[0.5, 0.5], [0.2, 0.8]]], dtype=torch.float64)
    q = torch.tensor([[[0.5, 0.5 + 1e-16]]], dtype=torch.float64) + torch.tensor([0.0, 1e-15])
    drafted = torch.tensor([[1]])
    accepted, own = verify_sampled(
        p, q, drafted, torch.tensor([[1 - 2**-53]]).double(), torch.tensor([0.25]).double()
    )
    assert (accepted.tolist(), own.tolist()) == ([0], [0])
    accepted, own = verify_sampled(p, q, drafted, torch.tensor([[0.5]]).double(), torch.tensor([0.25]).double())
    assert (accepted.tolist(), own.tolist()) == ([1], [1])


# -- the decoders themselves --------------------------------------------------------------------------------------

TARGET = PairTarget()


def samples(count: int, temperature: float, *, seed: int = 0, **options: Any) -> list[Outcome]:
    """The first three tokens; more are asked for, so that rounds of two proposals are among what made them."""
    schedule = options.pop("schedule", None)
    drafter = fair_drafter(TARGET, **options)
    generator = torch.Generator().manual_seed(seed)
    found = []
    accepted = proposed = 0
    for _ in range(count):
        decoded = speculative_decode(
            TARGET,
            drafter,
            PROMPT,
            max_new_tokens=4,
            temperature=temperature,
            generator=generator,
            schedule=schedule,
        )
        found.append(decoded.token_ids[:3])
        accepted += sum(one.accepted for one in decoded.rounds)
        proposed += sum(one.proposed for one in decoded.rounds)
    assert 0.25 < accepted / proposed < 0.75, "acceptance and rejection must both be common"
    return found


def p_value(found: list[Outcome], temperature: float) -> float:
    return chi_squared(found, exact_distribution(TARGET, PROMPT, temperature, 3))


def test_twenty_thousand_samples_have_the_distribution_of_the_target() -> None:
    assert p_value(samples(20_000, 1.0), 1.0) > 1e-4


@pytest.mark.parametrize(
    ("temperature", "options"),
    [
        (0.7, {}),
        (0.7, {"draft_vocab_size": 5, "first_supervised_slot": 1, "block_size": 4}),
        (1.0, {"markov_head_type": "rnn", "schedule": VerificationSchedule(threshold=0.4)}),
    ],
    ids=["next-token", "bonus-anchor-reduced", "rnn-schedule"],
)
def test_other_drafters_and_a_schedule(temperature: float, options: dict[str, Any]) -> None:
    assert p_value(samples(1200, temperature, **options), temperature) > 1e-4


def test_plain_samples_too() -> None:
    generator = torch.Generator().manual_seed(0)
    found = [
        plain_decode(TARGET, PROMPT, max_new_tokens=3, temperature=0.7, generator=generator).token_ids
        for _ in range(1200)
    ]
    assert p_value(found, 0.7) > 1e-4


def stop_at_what_was_drawn(*args: Any, **options: Any) -> Proposal:
    """Planted: a schedule that anticipates: whether a token is verified depends on which one it is."""
    proposal = propose(*args, **options)
    odd = (proposal.token_ids[0] % 2 == 1).tolist()
    count = odd.index(True) if True in odd else len(odd)
    return dataclasses.replace(
        proposal,
        token_ids=proposal.token_ids[:, :count],
        draft_ids=proposal.draft_ids[:, :count],
        logits=proposal.logits[:, :count],
        confidence=None,
    )


def without_temperature(self: Any, scores: Tensor, number: int) -> Tensor:
    """Planted: drafted at temperature 1 and verified as if at the request's."""
    self._drawn_from.append(probabilities(scores, self._temperature))
    return draw(probabilities(scores, 1.0), self._uniforms[number : number + 1])


def test_planted_mistakes_in_the_decoder_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rules_module, "verify_sampled", residual_is_the_target)
        assert p_value(samples(1000, 1.0), 1.0) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(rules_module._SampledRound, "_choose", without_temperature)
        assert p_value(samples(1000, 0.5), 0.5) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(TargetSteps, "drop", lambda _self, _count: None)
        assert p_value(samples(1000, 1.0), 1.0) < 1e-6
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "propose", stop_at_what_was_drawn)
        assert p_value(samples(1000, 1.0, enable_confidence_head=False), 1.0) < 1e-6


def test_all_randomness_comes_from_the_generator() -> None:
    target = lively_target()
    drafter = drafter_for(target)

    def run(seed: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "generator": generator}
        plain = plain_decode(target, [3, 1], **options).token_ids
        return plain + speculative_decode(target, drafter, [3, 1], **options).token_ids

    before = torch.random.get_rng_state()
    first = run(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert run(0) == first
    assert run(1) != first
    torch.manual_seed(4)
    some = speculative_decode(target, drafter, [3, 1], max_new_tokens=12, temperature=1.0).token_ids
    torch.manual_seed(4)
    assert speculative_decode(target, drafter, [3, 1], max_new_tokens=12, temperature=1.0).token_ids == some
