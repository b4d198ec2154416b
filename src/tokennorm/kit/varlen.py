"""Attention of packed rows without a square mask, for any model of transformers that lets its attention be chosen.

transformers asks a mask function once per forward pass for what every layer gets as ``attention_mask``, and an
attention function in every layer. Ours answer a packed forward pass with a :class:`DocumentLayout` and attention
inside documents; everything else (padded rows, generation with a cache) takes the way of ``sdpa``, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.errors import MissingDependencyError, PatchError
from tokennorm.kit.document_attention import document_attention
from tokennorm.kit.document_layout import DocumentLayout, document_layout

__all__ = ["VARLEN_ATTENTION", "AttentionShape", "AttentionWatch", "register_varlen_attention", "watched"]

VARLEN_ATTENTION = "tokennorm_varlen"
"""Name of this attention among those of transformers."""

# What a layer may hand over that changes nothing here. The window is the mask's, as it is for sdpa.
_WITHOUT_EFFECT = frozenset({"sliding_window", "position_ids", "use_cache", "cache_position", "is_causal"})
# What changes the result, and is not done here.
_REFUSED = {
    "softcap": "a softcap on its scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on its scores",
    "block_indices": "chosen blocks of keys",
    "output_attentions": "its weights as an output",
}
_INSTEAD = 'choose another attention: model.set_attn_implementation("sdpa") or "eager"'


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Heads of query and of key, their size, that of value's, and the scores' factor."""

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    scale: float | None


@dataclass(kw_only=True)
class AttentionWatch:
    """What went by while :data:`watched` was set.

    Attributes:
        modules: the attention layers that were called with a layout.
        shapes: what they computed.
        elsewhere: calls that took the way of sdpa.
        unknown: names of arguments that a layer gave and nobody here knows.
    """

    modules: list[nn.Module] = field(default_factory=list)
    shapes: set[AttentionShape] = field(default_factory=set)
    elsewhere: int = 0
    unknown: set[str] = field(default_factory=set)


watched: ContextVar[AttentionWatch | None] = ContextVar("watched", default=None)
"""Where calls are noted, for the check of a model before it is trusted."""


def register_varlen_attention() -> None:
    """Make :data:`VARLEN_ATTENTION` known to transformers, in this process.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise MissingDependencyError(
            "variable-length attention needs transformers", fix='pip install "tokennorm[train]"'
        ) from error
    AttentionInterface.register(VARLEN_ATTENTION, _attention)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _mask)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> DocumentLayout | Tensor | None:
    """What every layer of one kind gets as ``attention_mask``; arguments are those of transformers' sdpa_mask."""
    from transformers.masking_utils import sdpa_mask

    # A cache has offsets (an int, or a tensor nobody should wait for) or other lengths.
    whole = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    plain = allow_is_causal_skip and local_size is None
    if whole and attention_mask is None and mask_function is not None and not plain and not use_vmap:
        layout = document_layout(mask_function, shape=(batch_size, q_length), window=local_size, device=device)
        if layout is not None:
            return layout
    given = {} if mask_function is None else {"mask_function": mask_function}
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,  # pyright: ignore[reportArgumentType]
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        use_vmap=use_vmap,
        device=device,
        **given,
        **options,
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, ``[B, H, S, D]`` -> ``[B, S, H, E]``; arguments are those of transformers."""
    watch = watched.get()
    if not isinstance(attention_mask, DocumentLayout):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if watch is not None:
            watch.elsewhere += 1
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    _refuse(module, dropout, options)
    if query.shape[2] != key.shape[2] or (query.shape[0], query.shape[2]) != attention_mask.shape:
        raise PatchError(
            f"{type(module).__name__} attends from {list(query.shape)} to {list(key.shape)} (rows, heads, tokens, "
            f"size), and the documents were found in {list(attention_mask.shape)} tokens",
            why="documents would be cut at the wrong places",
            fix=_INSTEAD,
        )
    if watch is not None:
        _note(watch, module, query, key, value, scaling, options)
    return document_attention(query, key, value, attention_mask, scale=scaling), None


def _refuse(module: nn.Module, dropout: float, options: dict[str, Any]) -> None:
    """Raise where something else than plain causal attention is wanted."""
    wants = [what for name, what in _REFUSED.items() if not (options.get(name) is None or options[name] is False)]
    if dropout:
        wants.append(f"dropout of {dropout:g} on its weights")
    causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        wants.append("to see later tokens")
    if wants:
        raise PatchError(
            f"{type(module).__name__} wants {' and '.join(wants)}",
            why="variable-length attention does not do that, and leaving it out would train another model",
            fix=_INSTEAD + (", or set config.attention_dropout to 0" if dropout else ""),
        )


def _note(
    watch: AttentionWatch,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    options: dict[str, Any],
) -> None:
    watch.modules.append(module)
    watch.shapes.add(
        AttentionShape(
            heads=query.shape[1],
            key_heads=key.shape[1],
            head_dim=query.shape[-1],
            value_dim=value.shape[-1],
            scale=scale,
        )
    )
    watch.unknown.update(
        name
        for name, it in options.items()
        if it is not None and name not in _WITHOUT_EFFECT and not name.startswith("output_")
    )
