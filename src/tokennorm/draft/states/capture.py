"""The target's hidden states, from one forward pass without its head."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.layer_ids import check_layer_ids
from tokennorm.draft.target import decoder_of, layers_of
from tokennorm.errors import ConfigError

__all__ = ["Captured", "HiddenStateCapture"]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a drafter reads of one forward pass of its target; nothing has a graph.

    Attributes:
        features: ``[B, S, len(layer_ids) * D]``, the hidden states in the order of the ids.
        last_hidden: ``[B, S, D]`` after the final norm: the teacher's, and what the target's head makes logits of.
        cache: the target's keys and values, where ``use_cache`` or a cache was given.
    """

    features: Tensor
    last_hidden: Tensor
    cache: Any = None


class HiddenStateCapture:
    """Runs a Hugging Face causal LM and keeps the hidden states of some layers.

    Hooks take them while the layers run, and nothing else is kept. (``output_hidden_states`` of transformers keeps
    all of them, and counts them differently in some families: Mamba's has no embedding.)

    Args:
        target: in eval mode. Its head is not run.
        layer_ids: trainer ids (:mod:`tokennorm.draft.layer_ids`): -1 is the embedding's output (what enters layer
            0), the last layer's is after the final norm.

    Raises:
        ConfigError: ids that the target does not have, or a family whose layers can't be found.
    """

    def __init__(self, target: nn.Module, layer_ids: Sequence[int]) -> None:
        config: Any = target.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.num_layers = int(text.num_hidden_layers)
        self.layer_ids = tuple(layer_ids)
        check_layer_ids(self.layer_ids, self.num_layers)
        self.target = target
        self._decoder = decoder_of(target)
        layers = layers_of(target)
        if layers is None:
            raise ConfigError(
                f"{type(target).__name__} has no list of its {self.num_layers} layers",
                why="hidden states are taken from the layers.",
                fix="take a target of another family.",
            )
        self._layers = layers
        # Renamed in transformers 5.24; families that keep their own state call it otherwise.
        known = inspect.signature(self._decoder.forward).parameters
        self._cache_name = next((name for name in ("cache", "cache_params") if name in known), "past_key_values")

    @torch.no_grad()
    def __call__(self, *, cache: Any = None, **arguments: Any) -> Captured:
        """One forward pass.

        Args:
            cache: keys and values of earlier positions (a cache of transformers, such as :attr:`Captured.cache`);
                it is extended in place.
            **arguments: of the target: ``input_ids`` and ``position_ids`` ``[B, S]``, for a padded batch
                ``attention_mask`` too. ``use_cache`` is off unless it or a cache is given: with one transformers
                does not isolate packed documents.

        Raises:
            ConfigError: the target is in training mode, where dropout would blur what is captured.
        """
        if self._decoder.training:
            raise ConfigError(
                "the target is in training mode",
                why="the drafter would learn from other hidden states than it meets in service.",
                fix="target.eval()",
            )
        arguments.setdefault("use_cache", cache is not None)
        if cache is not None:
            arguments[self._cache_name] = cache
        states = self._run(arguments)
        outputs = states.pop("outputs")
        last = outputs.last_hidden_state
        states[self.num_layers - 1] = last
        features = torch.cat([states[i] for i in self.layer_ids], dim=-1)
        return Captured(features=features, last_hidden=last, cache=outputs.get(self._cache_name))

    def _run(self, arguments: dict[str, Any]) -> dict[Any, Any]:
        states: dict[Any, Any] = {}
        handles = []
        try:
            for i in self.layer_ids:
                if i == -1:
                    hook = functools.partial(_keep_input, states)
                    handles.append(self._layers[0].register_forward_pre_hook(hook, with_kwargs=True))
                elif i < self.num_layers - 1:
                    hook = functools.partial(_keep_output, states, i)
                    handles.append(self._layers[i].register_forward_hook(hook))
            states["outputs"] = self._decoder(**arguments, return_dict=True)
        finally:
            for handle in handles:
                handle.remove()
        missing = [i for i in self.layer_ids if i not in states and i != self.num_layers - 1]
        if missing:
            raise ConfigError(
                f"layers {missing} of {type(self.target).__name__} were not run",
                why="their hidden states are what the drafter reads.",
            )
        return states


def _keep_input(states: dict[Any, Any], _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states[-1] = args[0] if args else kwargs["hidden_states"]


def _keep_output(states: dict[Any, Any], i: int, _layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
    states[i] = output[0] if isinstance(output, tuple) else output
