"""The rotary embedding of the drafter, as transformers computes the target's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.config import DraftConfig
from tokennorm.errors import MissingDependencyError

__all__ = ["RotaryEmbedding", "rotate"]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions.

    The frequencies are float32 whatever the module is cast to: in bf16 the positions of a long context would be
    told apart by two or three digits. They are no part of a checkpoint.
    """

    inv_freq: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self._config = config
        inv_freq, self.scaling = _frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryEmbedding:
        super()._apply(fn, recurse)
        # Recomputed rather than kept: after a move from the meta device there is nothing to keep.
        device = self.inv_freq.device
        if device.type == "meta":
            self.inv_freq = self.inv_freq.to(torch.float32)
        else:
            with torch.device("cpu"):
                self.inv_freq = _frequencies(self._config)[0].to(device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``[..., T]`` positions to cosines and sines ``[..., T, head_dim]`` in ``dtype``.

        Angles are computed in float32; in float64 for float64.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions.unsqueeze(-1).to(wide) * self.inv_freq.to(wide)
            angles = torch.cat([angles, angles], dim=-1)
            return (angles.cos() * self.scaling).to(dtype), (angles.sin() * self.scaling).to(dtype)


def rotate(states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``[B, heads, T, head_dim]`` by angles ``[B, T, head_dim]``; the pairs are i and i + head_dim / 2."""
    cos, sin = (part.unsqueeze(1) for part in rotary)
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat([-second, first], dim=-1) * sin


def _frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type == "default":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_parameters["rope_theta"] ** exponent, 1.0
    try:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError as error:
        raise MissingDependencyError(
            f"rotary embeddings of type {rope_type!r} need transformers",
            fix='install it: pip install "tokennorm[train]"',
        ) from error
    shape = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),  # pyright: ignore[reportArgumentType]
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](shape, device=None)
    return inv_freq.to(torch.float32), float(scaling)
