"""Plain decoding, one token per forward pass: what speculative decoding is measured against and agrees with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.decoding.clock import Stopwatch
from tokennorm.draft.decoding.request import make_request
from tokennorm.draft.decoding.rounds import Decoded
from tokennorm.draft.decoding.rules import make_rule
from tokennorm.draft.decoding.target import TargetSteps

__all__ = ["plain_decode"]


@torch.inference_mode()
def plain_decode(
    target: Any,
    input_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Continue a prompt with the target alone, with the modules and the cache that speculative decoding uses.

    Args:
        target: a Hugging Face causal LM in eval mode, all of whose layers are attention.
        input_ids: the prompt, ``[1, S]`` or ``[S]``.
        max_new_tokens: at most so many.
        stop_token_ids: the output ends with the first of them, included.
        temperature: 0: the likeliest token; else tokens are drawn from ``softmax(logits / temperature)``.
        generator: of the random numbers; None: torch's own of the CPU.

    Raises:
        ConfigError: settings, or a target, that can't be decoded with.
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
    rule = make_rule(request)
    clock = Stopwatch(request.prompt.device)
    steps = TargetSteps(target)
    logits, _ = steps.feed(request.prompt, last_only=True)
    token = rule.choose(logits)
    tokens = token.tolist()
    prefill = clock.lap()
    seconds = 0.0
    while not request.finished(tokens):
        logits, _ = steps.feed(token)
        token = rule.choose(logits)
        tokens += token.tolist()
        seconds += clock.lap()
    return Decoded(
        token_ids=tuple(tokens),
        rounds=(),
        seconds=seconds,
        prefill_seconds=prefill,
        target_seconds=seconds,
        draft_seconds=0.0,
    )
