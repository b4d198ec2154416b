"""Causal attention inside documents only: no work and no memory for pairs of different documents.

On CUDA in half precision this is one call of PyTorch's variable-length kernel over all tokens of a micro-batch.
Anywhere else documents come one after the other (neighbours of equal length together), each by PyTorch's
``scaled_dot_product_attention``, in any dtype; the kernel is checked against that.
"""

from __future__ import annotations

from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tokennorm.kit.document_layout import DocumentLayout

__all__ = ["by_kernel", "document_attention", "each_document", "kernel_serves"]

# Of the flash attention that PyTorch ships: half precision, heads of up to 256 in steps of 8, Ampere or later.
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_KERNEL_MAX_HEAD, _KERNEL_HEAD_STEP = 256, 8
_KERNEL_CAPABILITY = (8, 0)


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, *, scale: float | None = None
) -> Tensor:
    """Attend, causally and in its own document only, from each token.

    Under autocast everything but float64 is cast to its dtype first, as PyTorch's attention does.

    Args:
        query: ``[B, H, S, D]``.
        key: ``[B, G, S, D]``; H is a multiple of G, and each of its heads serves H / G neighbouring ones of query.
        value: ``[B, G, S, E]``.
        layout: the documents, of shape ``(B, S)``.
        scale: factor of the scores; by default ``1 / sqrt(D)``.

    Returns:
        ``[B, S, H, E]``, in the dtype of ``value`` (or of autocast).
    """
    query, key, value = (_tokens_first(it) for it in (query, key, value))
    served = kernel_serves(query.device, query.dtype, query.shape[-1], value.shape[-1])
    attend = by_kernel if served and query.dtype == key.dtype == value.dtype else each_document
    return attend(query, key, value, layout, scale).unflatten(0, layout.shape)


def kernel_serves(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int) -> bool:
    """Whether PyTorch's variable-length kernel takes heads of ``head_dim`` (of value: ``value_dim``) there."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in _KERNEL_DTYPES
        and head_dim == value_dim
        and head_dim <= _KERNEL_MAX_HEAD
        and head_dim % _KERNEL_HEAD_STEP == 0
        and torch.cuda.get_device_capability(device) >= _KERNEL_CAPABILITY
    )


def by_kernel(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float | None = None
) -> Tensor:
    """The same as :func:`each_document` in one call of the kernel, where :func:`kernel_serves`."""
    # The kernel counts the tokens to the left of the query, a window counts the query as well.
    left = -1 if layout.window is None else layout.window - 1
    attended = varlen_attn(
        query,
        key,
        value,
        layout.offsets,
        layout.offsets,
        layout.max_length,
        layout.max_length,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def each_document(
    query: Tensor, key: Tensor, value: Tensor, layout: DocumentLayout, scale: float | None = None
) -> Tensor:
    """The same document by document, in any dtype and on any device: ``[B * S, H, D]`` and so on, tokens first.

    A document that is longer than the window costs a square mask of its own length.
    """
    runs = [(length, len(list(group))) for length, group in groupby(layout.lengths)]
    sizes = [length * count for length, count in runs]
    groups = query.shape[1] // key.shape[1]
    attended = []
    # split, not slices: its backward is one concatenation, where each slice's would be a tensor of full length.
    for (length, _), *parts in zip(runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
        q, k, v = (part.unflatten(0, (-1, length)).transpose(1, 2) for part in parts)
        band = None
        if layout.window is not None and length > layout.window:
            band = _band(length, layout.window, query.device)
            # With a mask, grouped heads would go to the slow kernel.
            k, v = (it.repeat_interleave(groups, dim=1) for it in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """``[L, L]`` bool: a query sees itself and the ``window - 1`` keys before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril_().triu_(1 - window)


def _tokens_first(heads: Tensor) -> Tensor:
    """``[B, H, S, D]`` -> ``[B * S, H, D]``."""
    device = heads.device.type
    if (
        heads.dtype != torch.float64
        and torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
    ):
        heads = heads.to(torch.get_autocast_dtype(device))
    return heads.transpose(1, 2).flatten(0, 1)
