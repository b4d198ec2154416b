"""The target, a Hugging Face causal LM: where its layers, its embedding and its head are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.model import DraftModel
from tokennorm.errors import ConfigError

__all__ = ["decoder_of", "init_from_target", "layers_of", "target_weights"]


def decoder_of(target: nn.Module) -> nn.Module:
    """The part that turns tokens into hidden states after the final norm, without the head."""
    get_decoder = getattr(target, "get_decoder", None)
    decoder = get_decoder() if callable(get_decoder) else None
    if decoder is None or decoder is target:
        decoder = getattr(target, "base_model", None)
    if not isinstance(decoder, nn.Module) or decoder is target:
        raise ConfigError(
            f"{type(target).__name__} has no decoder without a head",
            fix="pass a Hugging Face causal LM (AutoModelForCausalLM).",
        )
    return decoder


def layers_of(target: nn.Module) -> nn.ModuleList | None:
    """Its decoder layers, or None where they can't be told from the structure."""
    decoder = decoder_of(target)
    count = _text_config(target).num_hidden_layers
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    # The first is the outermost; a list of as many experts inside a layer comes after it.
    return lists[0] if lists else None


def target_weights(target: Any) -> tuple[Tensor, Tensor]:
    """``embed_tokens`` and ``lm_head``, ``[V, D]`` each, as they are (not copied).

    Raises:
        ConfigError: no head, or one with a bias: drafter and teacher are compared by ``hidden @ head`` alone.
    """
    head = target.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise ConfigError(f"{type(target).__name__} has no head with a weight")
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"the head of {type(target).__name__} has a bias",
            why="drafter and teacher are compared as softmax(hidden @ head), which would leave it out.",
            fix="take a target whose head has none.",
        )
    return target.get_input_embeddings().weight, head.weight


def init_from_target(drafter: DraftModel, target: nn.Module, layer_ids: Sequence[int] | None = None) -> list[str]:
    """Start the draft layers from layers of the target; it helps a little.

    Copies every weight of the same name and shape; biases and what the target's layers don't have (the norms of
    queries and keys, for a Llama) stay as they are.

    Args:
        drafter: changed in place.
        target: of the same widths.
        layer_ids: one per draft layer; by default the target's last ones.

    Returns:
        The names of the copied weights, in the drafter.

    Raises:
        ConfigError: the wrong number of ids, or a target without a single weight that fits.
    """
    layers = layers_of(target)
    if layers is None:
        raise ConfigError(f"the decoder layers of {type(target).__name__} can't be found")
    count = drafter.config.num_layers
    ids = list(range(len(layers) - count, len(layers))) if layer_ids is None else list(layer_ids)
    if len(ids) != count or not all(0 <= i < len(layers) for i in ids):
        raise ConfigError(f"layers {ids} of {len(layers)} for {count} draft layers")
    copied = []
    with torch.no_grad():
        for number, i in enumerate(ids):
            source = dict(layers[i].named_parameters())
            for name, parameter in drafter.layers[number].named_parameters():
                value = source.get(name)
                if value is not None and value.shape == parameter.shape:
                    parameter.copy_(value)
                    copied.append(f"layers.{number}.{name}")
    if not copied:
        raise ConfigError(
            f"no weight of {type(layers[0]).__name__} has the name and shape of a draft layer's",
            fix="leave the layers as they are; this start is an option.",
        )
    return copied


def _text_config(target: Any) -> Any:
    config = target.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config
