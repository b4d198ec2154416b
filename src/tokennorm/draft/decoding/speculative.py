"""Lossless speculative decoding: a drafter proposes a block, one forward pass of the target verifies it.

The state between two rounds is ``length`` verified positions, whose keys and values target and drafter hold, and
the anchor: the last emitted token, at position ``length``, which the target has not seen yet.

    draft      the drafter fills a block behind the anchor and proposes x_1 .. x_P
    verify     the target reads [anchor, x_1 .. x_P]: its rows say what it would have put in their places and after
    accept     the n that agree, and the target's own token after those: n + 1 tokens for one forward pass
    keep       positions of the anchor and the accepted; the rest is cut from the target's cache; the own token is
               the next anchor

Greedy output is the target's own greedy output; sampled output has the target's distribution
(:mod:`tokennorm.draft.decoding.sampling`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.decoding.clock import Stopwatch
from tokennorm.draft.decoding.context import GrowingContext
from tokennorm.draft.decoding.proposals import propose
from tokennorm.draft.decoding.request import Request, check_drafter, make_request
from tokennorm.draft.decoding.rounds import Decoded, Round
from tokennorm.draft.decoding.rules import RoundRule, make_rule
from tokennorm.draft.decoding.schedule import VerificationSchedule
from tokennorm.draft.decoding.target import TargetSteps
from tokennorm.draft.model import DraftModel

__all__ = ["speculative_decode"]


def speculative_decode(
    target: Any,
    drafter: DraftModel,
    input_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    schedule: VerificationSchedule | None = None,
) -> Decoded:
    """Continue a prompt as the target would, with fewer of its forward passes.

    Args:
        target: a Hugging Face causal LM in eval mode, all of whose layers are attention.
        drafter: trained for it, on the same device; of either layout, with or without its heads.
        input_ids: the prompt, ``[1, S]`` or ``[S]``.
        max_new_tokens: at most so many.
        stop_token_ids: the output ends with the first of them, included, as plain decoding would.
        temperature: 0: greedy; else both draw from ``softmax(logits / temperature)``.
        generator: of all random numbers; None: torch's own of the CPU.
        schedule: how many proposals are verified; None: all that the block has.

    Raises:
        ConfigError: settings, a target, or a drafter for another target, that can't be decoded with.
        DataError: an empty prompt, several rows, or more positions than the target has.
    """
    request = make_request(
        target,
        input_ids,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        temperature=temperature,
        generator=generator,
    )
    check_drafter(drafter, target)
    schedule = VerificationSchedule() if schedule is None else schedule
    schedule.check(drafter.config.num_proposals, has_confidence=drafter.confidence_head is not None)
    with torch.inference_mode():
        return _decode(target, drafter, request, schedule)


def _decode(target: Any, drafter: DraftModel, request: Request, schedule: VerificationSchedule) -> Decoded:
    rule = make_rule(request)
    clock = Stopwatch(request.prompt.device)
    steps = TargetSteps(target, drafter.config.target_layer_ids)
    context = GrowingContext(drafter, request.prompt.shape[0] + request.max_new_tokens)
    logits, features = steps.feed(request.prompt, last_only=True)
    context.append(features)
    anchor = rule.choose(logits)
    tokens = anchor.tolist()
    rounds: list[Round] = []
    prefill, target_seconds, draft_seconds, other = clock.lap(), 0.0, 0.0, 0.0
    most = schedule.limit(drafter.config.num_proposals)
    while not request.finished(tokens):
        # What would be cut off by the length is not drafted.
        limit = min(most, request.max_new_tokens - len(tokens) - 1)
        round_rule = rule.round(drafter, limit)
        drafted, confidence = _draft(drafter, anchor, context, limit, round_rule, schedule)
        draft_seconds += clock.lap()
        logits, features = steps.feed(torch.cat([anchor, drafted]))
        accepted, anchor = round_rule.verify(logits, drafted)
        # One wait for the device: the drafted tokens, how many of them count, and the target's own.
        *drafted_ids, count, own = torch.cat([drafted, accepted, anchor]).tolist()
        target_seconds += clock.lap()
        new, ended = _emit(drafted_ids[:count], own, request.stop_token_ids)
        tokens += new
        # What was drafted behind a stop token is no proposal: counted only where the stop token is rejected, it
        # would make the survival of later proposals look worse than it is.
        proposed = up_to_stop(drafted_ids, request.stop_token_ids)
        rounds.append(
            Round(
                proposed=proposed,
                accepted=len(new) if ended else count,
                emitted=len(new),
                ended=ended,
                confidence=None if confidence is None else tuple(confidence[:proposed].tolist()),
            )
        )
        other += clock.lap()
        if request.finished(tokens):
            break
        steps.drop(len(drafted_ids) - count)
        target_seconds += clock.lap()
        context.append(features[:, : count + 1])
        draft_seconds += clock.lap()
    return Decoded(
        token_ids=tuple(tokens),
        rounds=tuple(rounds),
        seconds=target_seconds + draft_seconds + other,
        prefill_seconds=prefill,
        target_seconds=target_seconds,
        draft_seconds=draft_seconds,
    )


def _draft(
    drafter: DraftModel,
    anchor: Tensor,
    context: GrowingContext,
    limit: int,
    rule: RoundRule,
    schedule: VerificationSchedule,
) -> tuple[Tensor, Tensor | None]:
    """At most ``limit`` tokens ``[P]`` of the target's vocabulary, and their confidence logits ``[P]``."""
    if limit == 0:
        nothing = anchor.new_empty(0)
        return nothing, None if drafter.confidence_head is None else nothing
    position = torch.full((1,), context.length, device=anchor.device)
    hidden = drafter.draft_hidden(anchor, position, context.view())
    hidden = hidden[:, : drafter.config.first_supervised_slot + limit]
    proposal = propose(drafter, hidden, anchor, choose=rule.choose, keep_going=schedule.start())
    return proposal.token_ids[0], None if proposal.confidence is None else proposal.confidence[0]


def up_to_stop(drafted: list[int], stop_token_ids: frozenset[int]) -> int:
    """How many tokens there are up to the first stop token, that included."""
    return next((n for n, token in enumerate(drafted, start=1) if token in stop_token_ids), len(drafted))


def _emit(accepted: list[int], own: int, stop_token_ids: frozenset[int]) -> tuple[list[int], bool]:
    """The round's tokens, and whether a stop token among the accepted ones cut them."""
    for number, token in enumerate(accepted):
        if token in stop_token_ids:
            return accepted[: number + 1], True
    return [*accepted, own], False
