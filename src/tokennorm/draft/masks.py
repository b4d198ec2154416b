"""What a slot may attend to: the context before its anchor, in the anchor's document, and its own block.

The keys of row ``b`` are ``[context of S positions ; A blocks of K slots]``, the queries the ``A * K`` slots. The
anchor itself is not context: when a block is drafted in service, the target has not computed the anchor's hidden
state yet. Visibility of the context goes by position. Anchors can be closer together than a block, so a block's
number says nothing about where it starts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["MaskMod", "block_attention_mask", "block_mask_mod"]

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_attention_mask(
    anchors: Tensor, block_size: int, sequence_length: int, documents: Tensor | None = None
) -> Tensor:
    """Dense ``[B, 1, A * K, S + A * K]`` bool, true where a slot may look; for scaled-dot-product attention.

    Args:
        anchors: ``[B, A]`` int64, index of each anchor in its row.
        block_size: ``K``.
        sequence_length: ``S``.
        documents: ``[B, S]`` from :func:`tokennorm.draft.document_ids`; None: each row is one document.
    """
    rows, blocks = anchors.shape
    position = torch.arange(sequence_length, device=anchors.device)
    context = position < anchors.unsqueeze(-1)
    if documents is not None:
        context = context & (documents.unsqueeze(1) == documents.gather(1, anchors).unsqueeze(-1))
    context = context.repeat_interleave(block_size, dim=1)
    block_of = torch.arange(blocks * block_size, device=anchors.device) // block_size
    own = block_of.unsqueeze(1) == block_of.unsqueeze(0)
    return torch.cat([context, own.expand(rows, -1, -1)], dim=2).unsqueeze(1)


def block_mask_mod(
    anchors: Tensor, block_size: int, sequence_length: int, documents: Tensor | None = None
) -> MaskMod:
    """The same rule for flex attention's ``create_block_mask``; arguments as for :func:`block_attention_mask`."""
    start = anchors
    document_of_anchor = None if documents is None else documents.gather(1, anchors)
    last = sequence_length - 1

    def visible(b: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        in_context = key < sequence_length
        context = in_context & (key < start[b, block])
        if documents is not None and document_of_anchor is not None:
            # Keys of blocks have no document; the index still has to be one that exists.
            context = context & (documents[b, key.clamp(max=last)] == document_of_anchor[b, block])
        own = ~in_context & ((key - sequence_length) // block_size == block)
        return context | own

    return visible
