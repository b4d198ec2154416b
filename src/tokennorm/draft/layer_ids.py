"""Two ways to number the target's layers, and the way between them.

The trainer's id ``i`` is the output of decoder layer ``i``, counted from 0; -1 is the output of the embedding (the
input of layer 0); the last layer's is taken after the final norm. In the ``hidden_states`` of Hugging Face that is
index ``i + 1``. vLLM and the speculators format count the same tensors from the embedding: ``j = i + 1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokennorm.errors import ConfigError

__all__ = ["check_layer_ids", "default_layer_ids", "layer_ids_from_server", "layer_ids_to_server"]


def layer_ids_to_server(layer_ids: Iterable[int]) -> tuple[int, ...]:
    """Trainer ids as vLLM and the speculators format write them: ``j = i + 1``."""
    return tuple(i + 1 for i in layer_ids)


def layer_ids_from_server(layer_ids: Iterable[int]) -> tuple[int, ...]:
    """Ids of vLLM or the speculators format as trainer ids: ``i = j - 1``."""
    return tuple(j - 1 for j in layer_ids)


def default_layer_ids(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """``count`` layers spread evenly from the second one to the third from the end, as DFlash and DSpark do.

    36 layers and five of them: 1, 9, 17, 25, 33. A target with fewer layers than that gives as many as it has.

    Args:
        num_target_layers: decoder layers of the target.
        count: how many to take.
    """
    if num_target_layers < 1 or count < 1:
        raise ConfigError(f"can't take {count} of {num_target_layers} layers")
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, min(1, num_target_layers - 1))
    if count == 1:
        return (num_target_layers // 2,)
    spread = [round(first + step * (last - first) / (count - 1)) for step in range(count)]
    return tuple(dict.fromkeys(spread))


def check_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Refuse ids that the target does not have.

    Raises:
        ConfigError: none, one twice, or one outside ``[-1, num_target_layers)``.
    """
    if not layer_ids:
        raise ConfigError("target_layer_ids is empty", why="the drafter reads the target's hidden states there.")
    outside = [i for i in layer_ids if not -1 <= i < num_target_layers]
    if outside:
        raise ConfigError(
            f"target_layer_ids {list(layer_ids)} name layers {outside}; the target has {num_target_layers}",
            fix=f"use -1 (the embedding's output) to {num_target_layers - 1} (after the final norm); vLLM and the "
            "speculators format count one higher.",
        )
    if len(set(layer_ids)) != len(layer_ids):
        raise ConfigError(f"target_layer_ids {list(layer_ids)} name a layer twice")
