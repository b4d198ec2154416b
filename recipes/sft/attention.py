"""Which attention packed rows get: inside their documents only, where the model's can be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokennorm.engine import autocast_dtype
from tokennorm.errors import PatchError
from tokennorm.kit import use_varlen_attention
from tokennorm.recipes.sft.config import SftConfig

__all__ = ["choose_attention"]


def choose_attention(
    model: Any, config: SftConfig, device: torch.device, *, say: Callable[[str], None], compare: bool = True
) -> None:
    """Give ``model`` the attention that ``model.attention`` asks for; call it before anything wraps it.

    Args:
        model: from transformers, on the CPU.
        config: ``model.attention``, and whether rows are packed.
        device: where training will compute.
        say: told when auto leaves a square mask, and why.
        compare: False on a rank without weights, where another rank looks at what the model computes.

    Raises:
        PatchError: ``model.attention`` is varlen and the model can't have it.
    """
    wanted = config.model.attention
    own = getattr(model.config, "_attn_implementation", None)
    if wanted == "model" or not config.data.packing:
        return
    # Somebody chose another one than the default (flash_attention_2, eager), or will compile, which this can't be.
    if wanted == "auto" and (own != "sdpa" or config.model.compile):
        return
    try:
        use_varlen_attention(
            model,
            device=device,
            dtype=autocast_dtype(config.model.autocast),
            # Document by document is a call for each, which a GPU would wait for.
            require_kernel=wanted == "auto" and device.type != "cpu",
            compare=compare,
        )
    except PatchError as error:
        if wanted == "varlen":
            raise
        say(f"note: packed rows attend with a square mask: {str(error).splitlines()[0]}")
