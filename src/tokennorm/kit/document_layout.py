"""Where the documents of packed rows begin and end, read once per forward pass from a mask function.

transformers describes who sees whom by a function of indices (row, head, query, key) and evaluates it on all
S x S pairs. A causal mask over documents, with or without a sliding window, is known from O(S) of them: whether a
token sees the one before it says where documents begin. Some more pairs, a fixed handful per token, check that the
function is nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DocumentLayout", "document_layout"]

# Odd numbers that spread the checked pairs over a row: token q is also asked about key (q * factor + 5) % S.
_SCATTER = (7919, 104_729)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentLayout:
    """The documents of ``B`` rows of ``S`` tokens, one after the other.

    Attributes:
        shape: ``(B, S)``.
        lengths: tokens of each of the N documents, at least 1 each, in the order of the flattened ``[B * S]``
            tokens. No document crosses the end of a row.
        max_length: the longest of them.
        window: a token sees itself and the ``window - 1`` tokens before it; None: all before it.
        offsets: ``[N + 1]`` int32, on the tokens' device: where documents begin, and B * S at the end.
    """

    shape: tuple[int, int]
    lengths: tuple[int, ...]
    max_length: int
    window: int | None
    offsets: Tensor

    @staticmethod
    def of(
        lengths: tuple[int, ...], *, shape: tuple[int, int], window: int | None, device: torch.device | str
    ) -> DocumentLayout:
        """Lay out documents of the given lengths; a window that reaches over all of them is none."""
        assert sum(lengths) == shape[0] * shape[1]
        longest = max(lengths)
        offsets = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
        return DocumentLayout(
            shape=shape,
            lengths=lengths,
            max_length=longest,
            window=None if window is None or window >= longest else window,
            # From pageable memory: the host may go on while it is copied.
            offsets=offsets.to(device, non_blocking=True),
        )


def document_layout(
    mask_function: Callable[..., Tensor],
    *,
    shape: tuple[int, int],
    window: int | None,
    device: torch.device | str,
) -> DocumentLayout | None:
    """Return the layout that ``mask_function`` stands for, or None if it stands for something else.

    Waits for the device once.

    Args:
        mask_function: of transformers: ``(row, head, query, key) -> bool``, by index tensors that broadcast.
        shape: ``(B, S)``.
        window: the tokens that a sliding window spans, itself included, if there may be one. Chunks of that length
            are found too: they are documents of their own.
        device: of what the function indexes.
    """
    batch_size, length = shape
    queries, keys = _pairs(length, window)
    rows = torch.arange(batch_size, device=device)[:, None]
    sees = mask_function(rows, torch.zeros_like(rows), *(it[None].to(device) for it in (queries, keys)))
    # The one wait. transformers has waited already, to see whether there is packing at all.
    found = sees.expand(batch_size, queries.numel()).cpu()

    begins = torch.ones(shape, dtype=torch.bool)
    # The first S - 1 pairs: does a token see the one before it?
    begins[:, 1:] = ~found[:, : length - 1]
    documents = begins.cumsum(1)
    distance = queries - keys
    expected = (documents[:, queries] == documents[:, keys]) & (distance >= 0)
    if window is not None:
        expected &= distance < window
    if not torch.equal(found, expected):
        return None
    starts = begins.flatten().nonzero().flatten()
    lengths = torch.diff(starts, append=torch.tensor([batch_size * length]))
    return DocumentLayout.of(tuple(lengths.tolist()), shape=shape, window=window, device=device)


def _pairs(length: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Queries and keys, each ``[P]``, that are looked at; the first S - 1 are each token and the one before it."""
    tokens = torch.arange(length)
    pairs = [
        (tokens[1:], tokens[:-1]),
        (tokens, tokens),
        (tokens[:-1], tokens[1:]),
        *((tokens, (tokens * factor + 5) % length) for factor in _SCATTER),
    ]
    edges = () if window is None else (window - 1, window)
    pairs += [(tokens[edge:], tokens[:-edge]) for edge in edges if 0 < edge < length]
    queries, keys = zip(*pairs, strict=True)
    return torch.cat(queries), torch.cat(keys)
