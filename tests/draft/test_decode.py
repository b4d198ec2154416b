"""Greedy speculative decoding is the target's own greedy decoding, and reads every position once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import tokennorm.draft.decoding.rules as rules_module
from tests.draft.decode_toy import VOCAB, Oracle, drafter_for, lively_target, prompts
from tokennorm.draft import Decoded, HiddenStateCapture, plain_decode, speculative_decode
from tokennorm.draft.decoding.sampling import verify_greedy
from tokennorm.draft.decoding.speculative import up_to_stop
from tokennorm.draft.decoding.target import TargetSteps

HEADS: dict[str, dict[str, Any]] = {
    "none": {"markov_rank": 0, "enable_confidence_head": False},
    "no-markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "enable_confidence_head": False},
    "reduced": {"draft_vocab_size": 25},
}


def generated(target: Any, prompt: torch.Tensor, count: int) -> list[int]:
    ids = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, prompt.shape[1] :].tolist()


def check_counts(decoded: Decoded, most: int) -> None:
    """What holds whatever the drafter does."""
    assert len(decoded.token_ids) == 1 + sum(r.emitted for r in decoded.rounds)
    for number, r in enumerate(decoded.rounds):
        assert 0 <= r.accepted <= r.proposed <= most
        assert r.emitted == r.accepted + (not r.ended)
        assert not r.ended or number == len(decoded.rounds) - 1
        assert r.confidence is None or len(r.confidence) == r.proposed


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gpt_neox", "opt", "phi", "mistral"])
def test_plain_decoding_is_that_of_transformers(family: str) -> None:
    target = lively_target(family)
    outputs = []
    for prompt in prompts(3):
        decoded = plain_decode(target, prompt, max_new_tokens=16)
        assert list(decoded.token_ids) == generated(target, prompt, 16)
        assert decoded.rounds == ()
        outputs.append(decoded.token_ids)
    assert len({token for tokens in outputs for token in tokens}) > 5, "outputs that repeat a token show little"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_greedy_output_is_plain_greedy_output(dtype: torch.dtype) -> None:
    target = lively_target(dtype=dtype)
    # Two layers: the first one's keys and values must be as right as the second's.
    layouts = itertools.product(HEADS.values(), (0, 1))
    drafters = [drafter_for(target, num_layers=2, first_supervised_slot=at, **heads) for heads, at in layouts]
    for prompt in prompts(2):
        plain = plain_decode(target, prompt, max_new_tokens=16)
        for drafter in drafters:
            decoded = speculative_decode(target, drafter, prompt, max_new_tokens=16)
            assert decoded.token_ids == plain.token_ids
            check_counts(decoded, drafter.config.num_proposals)


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
@pytest.mark.parametrize("first", [0, 1], ids=["next-token", "bonus-anchor"])
@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab_size": 25}, {"markov_rank": 0}], ids=["", "reduced", "bare"]
)
def test_a_drafter_that_is_often_right(family: str, first: int, options: dict[str, Any]) -> None:
    target = lively_target(family)
    options = {"confidence_head_with_markov": options.get("markov_rank") != 0, "intermediate_size": 24, **options}
    drafter = drafter_for(target, kind=Oracle, first_supervised_slot=first, **options)
    accepted = set()
    for number, prompt in enumerate(prompts(2)):
        answer = plain_decode(target, prompt, max_new_tokens=40).token_ids
        drafter.know(answer, prompt.shape[1], chance=0.7)
        decoded = speculative_decode(target, drafter, prompt, max_new_tokens=40 - number)
        assert decoded.token_ids == answer[: 40 - number]
        check_counts(decoded, drafter.config.num_proposals)
        accepted |= {r.accepted for r in decoded.rounds}
    assert len(accepted) > 2


@pytest.mark.parametrize("first", [0, 1], ids=["next-token", "bonus-anchor"])
def test_a_perfect_drafter_is_always_accepted(first: int) -> None:
    target = lively_target()
    drafter = drafter_for(target, kind=Oracle, first_supervised_slot=first)
    (prompt,) = prompts(1)
    answer = plain_decode(target, prompt, max_new_tokens=33).token_ids
    drafter.know(answer, prompt.shape[1])
    most = drafter.config.num_proposals
    for count in (*range(1, 8), 32, 33):
        decoded = speculative_decode(target, drafter, prompt, max_new_tokens=count)
        assert decoded.token_ids == answer[:count]
        assert all(r.accepted == r.proposed for r in decoded.rounds)
        # Every round but the last is full; nothing is drafted that the length would cut off.
        assert [r.proposed for r in decoded.rounds[:-1]] == [most] * (len(decoded.rounds) - 1)
        assert sum(r.proposed + 1 for r in decoded.rounds) == count - 1


def test_output_ends_at_the_first_stop_token() -> None:
    target = lively_target()
    drafter = drafter_for(target, kind=Oracle)
    (prompt,) = prompts(1)
    answer = plain_decode(target, prompt, max_new_tokens=24).token_ids
    endings = set()
    for chance in (1.0, 0.6, 0.0):
        for stop in sorted(set(answer))[:8]:
            drafter.know(answer, prompt.shape[1], chance)
            end = answer.index(stop) + 1
            options: dict[str, Any] = {"max_new_tokens": 24, "stop_token_ids": {stop, VOCAB + 5}}
            assert plain_decode(target, prompt, **options).token_ids == answer[:end]
            decoded = speculative_decode(target, drafter, prompt, **options)
            assert decoded.token_ids == answer[:end]
            check_counts(decoded, 5)
            if decoded.rounds:
                last = decoded.rounds[-1]
                endings.add((last.ended, last.accepted < last.proposed))
                # An accepted one is counted, the ones behind it are not, neither as accepted nor as proposed.
                assert last.ended == (last.emitted == last.accepted)
    # As an accepted token, as the target's own after a rejection or after all.
    assert endings == {(True, False), (False, True), (False, False)}


def test_nothing_counts_as_proposed_behind_a_drafted_stop_token() -> None:
    """Also where the stop token is rejected: otherwise later proposals would be counted only where they fail."""
    for drafted, proposed in (([], 0), ([1, 2], 2), ([7], 1), ([1, 7, 2], 2), ([1, 2, 7, 7], 3)):
        assert up_to_stop(drafted, frozenset({7})) == proposed


def test_every_position_goes_through_the_target_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = lively_target()
    drafter = drafter_for(target, kind=Oracle)
    (prompt,) = prompts(1)
    answer = plain_decode(target, prompt, max_new_tokens=40).token_ids
    drafter.know(answer, prompt.shape[1], chance=0.7)
    fed: list[tuple[int, list[int]]] = []

    def record(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        fed.append((kwargs["cache"].get_seq_length(), kwargs["input_ids"][0].tolist()))

    handle = target.model.register_forward_pre_hook(record, with_kwargs=True)
    decoded = speculative_decode(target, drafter, prompt, max_new_tokens=40)
    handle.remove()
    whole = [*prompt[0].tolist(), *decoded.token_ids]
    assert fed[0] == (0, prompt[0].tolist())
    verified = prompt.shape[1]
    for (length, tokens), r in zip(fed[1:], decoded.rounds, strict=True):
        # The cache holds what is verified, and nothing else; what is fed is the anchor and the proposals.
        assert length == verified
        assert len(tokens) == 1 + r.proposed
        assert tokens[: r.accepted + 1] == whole[length : length + r.accepted + 1]
        verified += r.accepted + 1
    assert sum(len(tokens) for _, tokens in fed) == prompt.shape[1] + sum(r.proposed + 1 for r in decoded.rounds)
    # The drafter's context: the verified positions, as one forward without any cache makes them. Its norms
    # are float32 in any case.
    states = HiddenStateCapture(target, drafter.config.target_layer_ids)(input_ids=torch.tensor([whole])).features
    with torch.no_grad():
        expected = drafter.context(states, torch.arange(len(whole)).unsqueeze(0))
    drafting = [r for r in decoded.rounds if r.proposed]
    lengths = [length for (length, _), r in zip(fed[1:], decoded.rounds, strict=True) if r.proposed]
    assert [context.length for context in drafter.contexts] == lengths
    assert len(drafting) == len(drafter.contexts) > 10
    last = drafter.contexts[-1]
    for mine, right in zip((*last.keys, *last.values), (*expected.keys, *expected.values), strict=True):
        assert (mine - right[:, :, : last.length]).abs().max() < 1e-5


def test_the_drafter_sees_what_it_was_trained_to_see() -> None:
    """Its proposals are those of a training forward with the anchor at the same place."""
    from tokennorm.draft import Blocks, make_blocks
    from tokennorm.draft.anchors import Anchors

    bare = {"markov_rank": 0, "confidence_head_with_markov": False}
    for first in (0, 1):
        target = lively_target()
        drafter = drafter_for(target, first_supervised_slot=first, **bare)
        (prompt,) = prompts(1)
        length = prompt.shape[1]
        decoded = speculative_decode(target, drafter, prompt, max_new_tokens=12)
        whole = torch.cat([prompt, torch.tensor([decoded.token_ids])], dim=1)
        places, drafted = [], []
        at = length
        seen: list[list[int]] = []

        def record(_module: Any, _args: Any, kwargs: dict[str, Any], seen: list[list[int]] = seen) -> None:
            seen.append(kwargs["input_ids"][0].tolist())

        handle = target.model.register_forward_pre_hook(record, with_kwargs=True)
        speculative_decode(target, drafter, prompt, max_new_tokens=12)
        handle.remove()
        for tokens, r in zip(seen[1:], decoded.rounds, strict=True):
            if r.proposed:
                places.append(at)
                drafted.append(tokens[1:])
            at += r.accepted + 1
        anchors = Anchors(positions=torch.tensor([places]), keep=torch.ones(1, len(places), dtype=torch.bool))
        blocks: Blocks = make_blocks(
            whole,
            torch.ones_like(whole, dtype=torch.bool),
            anchors,
            block_size=drafter.config.block_size,
            first_supervised_slot=first,
        )
        features = HiddenStateCapture(target, drafter.config.target_layer_ids)(input_ids=whole).features
        with torch.no_grad():
            forward = drafter(
                blocks=blocks, features=features, position_ids=torch.arange(whole.shape[1]).unsqueeze(0)
            )
        best = forward.logits()[0, :, first:].argmax(dim=-1).tolist()
        assert len(places) > 5
        for tokens, row in zip(drafted, best, strict=True):
            assert tokens == row[: len(tokens)]


def keep_everything(_steps: TargetSteps, _count: int) -> None:
    """Planted: rejected tokens stay in the cache."""


def forget_one_more(steps: TargetSteps, count: int, drop: Any = TargetSteps.drop) -> None:
    """Planted: the last accepted token goes too."""
    drop(steps, count + 1)


def one_too_many(best: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Planted: the first rejected token is accepted."""
    accepted, own = verify_greedy(best, drafted)
    return (accepted + 1).clamp(max=drafted.shape[1]), own


def own_of_the_last_row(best: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Planted: the target's token after all proposals, whatever was rejected."""
    return verify_greedy(best, drafted)[0], best[:, -1]


@pytest.mark.parametrize("mistake", [keep_everything, forget_one_more, one_too_many, own_of_the_last_row])
def test_planted_mistakes_change_the_output(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = lively_target()
    drafter = drafter_for(target)
    (prompt,) = prompts(1)
    plain = plain_decode(target, prompt, max_new_tokens=20)
    if mistake in (keep_everything, forget_one_more):
        monkeypatch.setattr(TargetSteps, "drop", mistake)
    else:
        monkeypatch.setattr(rules_module, "verify_greedy", mistake)
    assert speculative_decode(target, drafter, prompt, max_new_tokens=20).token_ids != plain.token_ids


def test_the_seconds_are_parts_of_a_whole() -> None:
    target = lively_target()
    decoded = speculative_decode(target, drafter_for(target), prompts(1)[0], max_new_tokens=20)
    parts = decoded.target_seconds + decoded.draft_seconds + decoded.other_seconds
    assert parts == pytest.approx(decoded.seconds, abs=1e-9)
    assert min(decoded.target_seconds, decoded.draft_seconds, decoded.prefill_seconds) > 0
    assert decoded.other_seconds < 0.3 * decoded.seconds
    assert decoded.total_seconds == decoded.prefill_seconds + decoded.seconds
