"""What is to be decoded, checked before any work is done."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.config import refuse_changed_logits
from tokennorm.draft.model import DraftModel
from tokennorm.errors import ConfigError, DataError

__all__ = ["Request", "check_drafter", "make_request"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: ``[S]`` int64 on the target's device.
        max_new_tokens: at least 1.
        stop_token_ids: the output ends with the first of them.
        temperature: 0: greedy.
        generator: of all random numbers; None: torch's own of the CPU.
    """

    prompt: Tensor
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    temperature: float
    generator: torch.Generator | None

    def finished(self, tokens: Sequence[int]) -> bool:
        """Whether nothing comes after these new tokens (one at least)."""
        return len(tokens) >= self.max_new_tokens or tokens[-1] in self.stop_token_ids


def make_request(
    target: Any,
    input_ids: Tensor | Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int],
    temperature: float,
    generator: torch.Generator | None,
) -> Request:
    """See :func:`tokennorm.draft.plain_decode` for the arguments.

    Raises:
        ConfigError: a target or settings that can't be decoded with.
        DataError: a prompt that can't be continued.
    """
    if getattr(target, "_is_stateful", False):
        raise ConfigError(
            f"{type(target).__name__} keeps a running state instead of keys and values",
            why="a state that has seen a rejected token can't be taken back.",
            fix="take a target whose layers are all attention.",
        )
    config = text_config(target)
    refuse_changed_logits(config)
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}", fix="1 or more.")
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature is {temperature}", fix="0 for greedy decoding, or more.")
    embedding: Tensor = target.get_input_embeddings().weight
    prompt = _prompt(input_ids, embedding.shape[0])
    positions = prompt.shape[0] + max_new_tokens
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and positions > limit:
        raise DataError(
            f"{prompt.shape[0]} prompt tokens and {max_new_tokens} new ones make {positions} positions; "
            f"the target has {limit}",
            fix=f"at most {max(limit - prompt.shape[0], 0)} new tokens after this prompt.",
        )
    return Request(
        prompt=prompt.to(embedding.device),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        temperature=float(temperature),
        generator=generator,
    )


def _prompt(input_ids: Tensor | Sequence[int], vocab_size: int) -> Tensor:
    prompt = torch.as_tensor(input_ids)
    if prompt.dim() == 2:
        if prompt.shape[0] != 1:
            raise DataError(
                f"input_ids has {prompt.shape[0]} rows",
                why="prompts are decoded one at a time.",
                fix="[1, S] or [S].",
            )
        prompt = prompt[0]
    if prompt.dim() != 1:
        raise DataError(f"input_ids has shape {list(prompt.shape)}", fix="[1, S] or [S].")
    if prompt.numel() == 0:
        raise DataError("the prompt is empty", why="there is no token to continue.")
    if prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise DataError(f"input_ids are {prompt.dtype}, not token ids")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise DataError(f"prompt tokens run from {low} to {high}, the target has {vocab_size} tokens")
    return prompt.to(torch.int64)


def check_drafter(drafter: DraftModel, target: Any) -> None:
    """A drafter made for this target.

    Raises:
        ConfigError: another vocabulary, width or number of layers, or another device.
    """
    config, text = drafter.config, text_config(target)
    embedding: Tensor = target.get_input_embeddings().weight
    for what, own, theirs in (
        ("a vocabulary of", config.vocab_size, embedding.shape[0]),
        ("hidden states of width", config.hidden_size, text.hidden_size),
        ("as many target layers as", config.num_target_layers, text.num_hidden_layers),
    ):
        if own != theirs:
            raise ConfigError(
                f"the drafter is made for {what} {own}, the target has {theirs}",
                why="it would propose from hidden states or tokens that mean something else.",
                fix="take the drafter that was trained for this target.",
            )
    device = drafter.fc.weight.device
    if device != embedding.device:
        raise ConfigError(
            f"the drafter is on {device}, the target on {embedding.device}", fix="drafter.to(target.device)"
        )


def text_config(target: nn.Module) -> Any:
    """The configuration of the part that makes text."""
    config: Any = target.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
