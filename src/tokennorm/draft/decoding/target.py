"""The target as a decoder uses it: tokens in, logits and hidden states out, keys and values kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tokennorm.draft.decoding.request import text_config
from tokennorm.draft.states.capture import HiddenStateCapture
from tokennorm.errors import MissingDependencyError

__all__ = ["TargetSteps"]


class TargetSteps:
    """One sequence that grows, and can be cut back. Every position goes through the target once.

    Args:
        target: a Hugging Face causal LM in eval mode.
        layer_ids: trainer ids of the hidden states that :meth:`feed` returns; by default the last layer's, which
            cost nothing.
    """

    def __init__(self, target: Any, layer_ids: Sequence[int] | None = None) -> None:
        try:
            from transformers import DynamicCache
        except ImportError as error:
            raise MissingDependencyError(
                "the target's cache needs transformers", fix='install it: pip install "tokennorm[train]"'
            ) from error
        last = int(text_config(target).num_hidden_layers) - 1
        self._capture = HiddenStateCapture(target, (last,) if layer_ids is None else layer_ids)
        self._head = target.get_output_embeddings()
        # Made without the target's configuration: layers with a sliding window keep everything, so that they can
        # be cut back; their mask hides what is outside the window.
        self._cache = DynamicCache()
        self.length = 0

    def feed(self, token_ids: Tensor, *, last_only: bool = False) -> tuple[Tensor, Tensor]:
        """The next tokens.

        Args:
            token_ids: ``[T]``.
            last_only: logits of the last token alone.

        Returns:
            Logits ``[T, V]`` (or ``[1, V]``) and hidden states ``[1, T, len(layer_ids) * D]``.
        """
        captured = self._capture(input_ids=token_ids.unsqueeze(0), cache=self._cache, use_cache=True)
        self.length += token_ids.shape[0]
        hidden = captured.last_hidden[0]
        return self._head(hidden[-1:] if last_only else hidden), captured.features

    def drop(self, count: int) -> None:
        """Forget the last ``count`` tokens."""
        if count:
            # A negative number is how many to remove, in all versions of transformers; 0 would mean all in some.
            self._cache.crop(-count)
            self.length -= count
