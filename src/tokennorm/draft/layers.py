"""One draft layer: the target's decoder layer, with keys and values of the context in front of the block's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tokennorm.draft.config import DraftConfig
from tokennorm.draft.norm import RMSNorm
from tokennorm.draft.rope import rotate

__all__ = ["AttentionMask", "DraftLayer", "LayerContext"]

AttentionMask = Tensor | BlockMask | None
"""A dense bool mask, flex attention's, or None: everything is visible."""

LayerContext = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]
"""``(keys, values)``, or the states that they are made of: ``(states, cosines, sines)``."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    # Uncompiled, flex attention materialises the scores of all slots and keys.
    return torch.compile(flex_attention)


class DraftAttention(nn.Module):
    """Queries from the block; keys and values from ``[context ; block]``."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.num_key_value_heads != config.num_attention_heads
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def keys_values(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[B, T, D]`` to keys, normalised and rotated, and values, ``[B, heads, T, head_dim]``."""
        keys, values = self._heads(self.k_proj(states)), self._heads(self.v_proj(states))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        # Under autocast norms and rotations are float32, products are not.
        return rotate(keys, rotary).to(values.dtype), values

    def forward(
        self, states: Tensor, rotary: tuple[Tensor, Tensor], context: LayerContext, mask: AttentionMask
    ) -> Tensor:
        """``[B, Q, D]`` to ``[B, Q, D]``; ``mask`` over ``[context ; block]``."""
        if len(context) == 3:
            context = self.keys_values(context[0], context[1:])
        queries = self._heads(self.q_proj(states))
        queries = rotate(queries if self.q_norm is None else self.q_norm(queries), rotary)
        own = self.keys_values(states, rotary)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
        queries = queries.to(values.dtype)
        if isinstance(mask, BlockMask):
            flex = _compiled_flex() if queries.is_cuda else flex_attention
            mixed = flex(queries, keys, values, block_mask=mask, enable_gqa=self.grouped)
        else:
            mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=self.grouped)
        assert isinstance(mixed, Tensor)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DraftMLP(nn.Module):
    """``down(act(gate x) * up x)``."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = _ACTIVATIONS[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., D]``."""
        return self.down_proj(self.act(self.gate_proj(states)) * self.up_proj(states))


class DraftLayer(nn.Module):
    """Attention and MLP, each after a norm and added to its input. The context enters the attention as it is."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, states: Tensor, rotary: tuple[Tensor, Tensor], context: LayerContext, mask: AttentionMask
    ) -> Tensor:
        """``[B, Q, D]`` to ``[B, Q, D]``.

        In training the context comes as states: a sharded layer has its weights only inside its own forward, and
        a checkpointed one computes keys and values again. The tensors are arguments, not fields of an object, so
        that FSDP sees which of them need a gradient.
        """
        states = states + self.self_attn(self.input_layernorm(states), rotary, context, mask)
        return states + self.mlp(self.post_attention_layernorm(states))
