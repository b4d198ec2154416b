"""Losses per slot from full logits: cross-entropy and distance to the teacher, a block of slots at a time.

Only supervised slots are read. Forward keeps nothing but references to its inputs; backward computes the softmaxes
again and writes one gradient of the size of the logits, each row once. (Slicing the logits under autograd would
allocate a gradient of full size for every slice.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokennorm.draft import checks
from tokennorm.draft.slot_math import Scratch, block_rows, slot_losses_, softmax_
from tokennorm.errors import LossUsageError

__all__ = ["SlotRows", "math_dtype", "slot_losses", "supervised_rows"]


class SlotRows(NamedTuple):
    """Which of the ``B * A * K`` slots are computed.

    Attributes:
        places: ``[n]`` flat indices; None: all slots, in order.
        keep: ``[n]`` bool, which of those are supervised; None: all of them.
    """

    places: Tensor | None
    keep: Tensor | None


def math_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 when one of the tensors is, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def supervised_rows(supervised: Tensor, num_supervised: int | None) -> SlotRows:
    """Find the supervised slots without making the host wait.

    On the CPU nothing waits, so only they are computed. On an accelerator their number must come from the host
    (``num_supervised``); without it every slot is computed and the unsupervised ones are masked.

    Raises:
        LossUsageError: ``num_supervised`` is wrong (on an accelerator at the next synchronisation).
    """
    flat = supervised.reshape(-1)
    if num_supervised is not None:
        checks.report_count(flat.sum() - num_supervised)
    if not checks.defers(flat.device):
        index = torch.nonzero(flat).squeeze(1)
        return SlotRows(None if index.shape[0] == flat.shape[0] else index, None)
    if num_supervised is None:
        return SlotRows(None, flat)
    index = torch.nonzero_static(flat, size=num_supervised, fill_value=-1).squeeze(1)
    return SlotRows(index.clamp(min=0), index >= 0)


def slot_losses(
    draft_logits: Tensor,
    target_logits: Tensor | None,
    labels: Tensor | None,
    rows: SlotRows,
    *,
    chunk_size: int,
) -> tuple[Tensor | None, Tensor | None]:
    """Cross-entropy and raw L1 distance of every slot, 0 where it is not supervised.

    Args:
        draft_logits: ``[..., V]``; the only input that gets a gradient.
        target_logits: ``[..., V]``; None: no distance.
        labels: ``[...]`` integers, inside the vocabulary in supervised slots; None: no cross-entropy.
        rows: which slots are computed.
        chunk_size: most slots computed at once.

    Returns:
        ``ce`` and ``l1``: ``[...]`` in float32 (float64 when an input is), or None.

    Raises:
        LossUsageError: backward with ``create_graph=True``.
    """
    vocabulary = draft_logits.shape[-1]
    flat_labels = None if labels is None else labels.reshape(-1).to(torch.int64).clamp(0, max(vocabulary - 1, 0))
    spec = _Spec(
        labels=flat_labels,
        rows=rows,
        chunk_size=chunk_size,
        dtype=math_dtype(draft_logits, target_logits),
        shape=draft_logits.shape[:-1],
    )
    target = None if target_logits is None else target_logits.detach().reshape(-1, vocabulary)
    ce, l1 = _SlotLosses.apply(draft_logits.reshape(-1, vocabulary), target, spec)  # pyright: ignore[reportGeneralTypeIssues]
    return (None if labels is None else ce), (None if target is None else l1)


@dataclass(frozen=True, kw_only=True)
class _Spec:
    labels: Tensor | None
    rows: SlotRows
    chunk_size: int
    dtype: torch.dtype
    shape: torch.Size


class _Block(NamedTuple):
    """One block of slots: where they are, and fresh copies of their logits."""

    place: Tensor | slice
    keep: Tensor | None
    draft: Tensor
    teacher: Tensor | None
    labels: Tensor | None


def _blocks(draft: Tensor, target: Tensor | None, spec: _Spec) -> Iterator[_Block]:
    index, keep = spec.rows
    count = draft.shape[0] if index is None else index.shape[0]
    step = block_rows(draft.shape[1], draft.device, spec.chunk_size)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        place = rows if index is None else index[rows]
        kept = None if keep is None else keep[rows]

        def take(source: Tensor, place: Tensor | slice = place, kept: Tensor | None = kept) -> Tensor:
            if isinstance(place, slice):
                copy = source[place].to(spec.dtype, copy=True)
            else:
                copy = source.index_select(0, place).to(spec.dtype)
            # Before the arithmetic, not after it: 0 * nan is nan.
            return copy if kept is None else copy.masked_fill_(~kept.unsqueeze(1), 0)

        teacher = None if target is None else take(target)
        if teacher is not None:
            softmax_(teacher)
        labels = spec.labels
        if labels is not None:
            labels = labels[place] if isinstance(place, slice) else labels.index_select(0, place)
        yield _Block(place, kept, take(draft), teacher, labels)


class _SlotLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor | None, spec: _Spec) -> tuple[Tensor, Tensor]:
        ce = torch.zeros(draft.shape[0], dtype=spec.dtype, device=draft.device)
        l1 = torch.zeros_like(ce)
        scratch = _scratch(draft, spec)
        for block in _blocks(draft, target, spec):
            for total, part in zip(
                (ce, l1), slot_losses_(block.draft, block.labels, block.teacher, scratch), strict=True
            ):
                if part is not None:
                    _put(total, block, part)
        ctx.save_for_backward(draft, target)
        ctx.spec = spec
        return ce.view(spec.shape), l1.view(spec.shape)

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise LossUsageError(
                "the DSpark loss was differentiated with create_graph=True",
                why="its gradient is written down, not built as a graph.",
                fix="there is no second derivative of the L1 distance to speak of; leave create_graph out.",
            )
        draft, target = ctx.saved_tensors
        spec: _Spec = ctx.spec
        ce_upstream, l1_upstream = (upstream.reshape(-1) for upstream in upstreams)
        gradient = torch.zeros_like(draft, memory_format=torch.contiguous_format)
        scratch = _scratch(draft, spec)
        for block in _blocks(draft, target, spec):
            factors = (_at(ce_upstream, block), _at(l1_upstream, block))
            slot_losses_(block.draft, block.labels, block.teacher, scratch, factors=factors)
            _put(gradient, block, block.draft)
        return gradient, None, None


def _scratch(draft: Tensor, spec: _Spec) -> Scratch:
    rows = block_rows(draft.shape[1], draft.device, min(spec.chunk_size, max(draft.shape[0], 1)))
    return Scratch.like(rows, draft.shape[1], spec.dtype, draft.device)


def _at(values: Tensor, block: _Block) -> Tensor:
    return values[block.place] if isinstance(block.place, slice) else values.index_select(0, block.place)


def _put(total: Tensor, block: _Block, part: Tensor) -> None:
    """Write the block's rows; those that are not kept are zeros."""
    part = part.to(total.dtype)
    if block.keep is not None:
        part = part.masked_fill(~(block.keep if part.dim() == 1 else block.keep.unsqueeze(1)), 0)
    if isinstance(block.place, slice):
        total[block.place] = part
    elif block.keep is None:
        total.index_copy_(0, block.place, part)
    else:
        # Surplus rows all point at slot 0; adding their zeros leaves it right, writing them would not.
        total.index_add_(0, block.place, part)
