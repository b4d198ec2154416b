"""Where blocks start: anchors, sampled per sequence among the positions where drafting could start.

Everything here works on the host, before the forward pass: masks and token ids come from the data loader there,
and nothing waits for a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tokennorm.errors import ConfigError, LossUsageError

__all__ = [
    "AnchorRule",
    "Anchors",
    "anchor_generator",
    "document_ids",
    "sample_anchors",
    "supervised_tokens",
    "valid_anchors",
]

AnchorRule = Literal["classic", "next_supervised"]
IGNORE_INDEX = -100


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The blocks of one micro-batch.

    Attributes:
        positions: ``[B, A]`` int64, index of each anchor in its row, ascending; 0 for dummies, which come last.
        keep: ``[B, A]`` bool, false for dummies: a row has fewer anchors than its neighbours.
    """

    positions: Tensor
    keep: Tensor


def anchor_generator(seed: int, *, data_rank: int, step: int, micro_batch: int) -> torch.Generator:
    """The random numbers of one micro-batch, on the CPU.

    Ranks that hold different tokens differ in ``data_rank``; ranks that split one model (tensor or context
    parallel) share it, so they draw the same anchors. The four numbers are hashed: neighbouring steps and ranks
    get unrelated streams, and a resumed run the same as one that was never stopped.

    Args:
        seed: of the run.
        data_rank: rank along the data-parallel axis.
        step: optimizer step.
        micro_batch: index inside the step's window, on this rank. For the anchors of one row: the row's index in
            the window of all ranks, with ``data_rank`` 0. Then no cut into micro-batches or ranks changes any.
    """
    text = ":".join(str(int(number)) for number in (seed, data_rank, step, micro_batch))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"draft-anchors").digest()
    # Generators take 64 bits, but a signed number.
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def document_ids(position_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Which document each position belongs to: ``[B, S]`` int64, counted from 0 in each row, -1 for padding.

    Args:
        position_ids: ``[B, S]``, restarting at 0 with every document.
        attention_mask: ``[B, S]``, of padded batches.
    """
    ids = (position_ids == 0).to(torch.int64).cumsum(dim=1) - 1
    return ids if attention_mask is None else torch.where(attention_mask.to(torch.bool), ids, -1)


def supervised_tokens(shift_labels: Tensor) -> Tensor:
    """``[B, S]`` bool, the tokens that are supervised, from labels that are already shifted.

    ``shift_labels[b, s]`` is the token that position ``s`` has to predict; so the token at ``s + 1`` is supervised
    where it is not -100.
    """
    mask = torch.zeros_like(shift_labels, dtype=torch.bool)
    mask[:, 1:] = shift_labels[:, :-1] != IGNORE_INDEX
    return mask


def valid_anchors(
    supervised: Tensor, documents: Tensor | None = None, *, anchor_rule: AnchorRule = "classic"
) -> Tensor:
    """Positions where a block may start: ``[B, S]`` bool.

    The token after an anchor is what the block's first proposal has to predict, in both layouts, so it must exist,
    be supervised and belong to the anchor's document. ``classic`` wants the anchor itself supervised too;
    ``next_supervised`` does not, and so trains the step from the prompt to the first token of the answer, which is
    where drafting starts in service.

    Args:
        supervised: ``[B, S]`` bool, "this token is supervised".
        documents: ``[B, S]`` from :func:`document_ids`; None: each row is one document.
        anchor_rule: see above.
    """
    if anchor_rule not in get_args(AnchorRule):
        raise ConfigError(f"anchor_rule {anchor_rule!r}", fix=f"one of {', '.join(get_args(AnchorRule))}.")
    mask = supervised.to(torch.bool)
    valid = torch.zeros_like(mask)
    valid[:, :-1] = mask[:, 1:]
    if anchor_rule == "classic":
        valid &= mask
    if documents is not None:
        if documents.shape != mask.shape:
            raise LossUsageError(f"documents {list(documents.shape)} and supervised {list(mask.shape)} must agree")
        valid[:, :-1] &= (documents[:, 1:] == documents[:, :-1]) & (documents[:, :-1] >= 0)
    return valid


def sample_anchors(
    supervised: Tensor,
    *,
    num_anchors: int | None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    documents: Tensor | None = None,
    anchor_rule: AnchorRule = "classic",
    fixed_size: bool = False,
) -> Anchors:
    """Draw up to ``num_anchors`` anchors per row, every valid position with the same probability, none twice.

    Args:
        supervised: ``[B, S]`` bool, on the CPU.
        num_anchors: most anchors of a row; None: every valid position, nothing is drawn (for evaluation).
        generator: from :func:`anchor_generator`, one for all rows or one for each; needed unless ``num_anchors``
            is None.
        documents: ``[B, S]`` from :func:`document_ids`; None: each row is one document.
        anchor_rule: see :func:`valid_anchors`.
        fixed_size: make ``A`` equal to ``num_anchors`` whatever the rows hold, for compiled code that wants one
            shape; by default ``A`` is what the fullest row needs (at least 1).

    Returns:
        The anchors; a row without a valid position has dummies only.

    Raises:
        ConfigError: ``num_anchors`` below 1, no generator, or not one for each row.
    """
    if num_anchors is not None and num_anchors < 1:
        raise ConfigError(
            f"num_anchors must be at least 1, not {num_anchors}", fix="None for every valid position."
        )
    if num_anchors is not None and generator is None:
        raise ConfigError(
            "anchors are drawn without a generator",
            why="ranks that split one model would draw different ones.",
            fix="pass anchor_generator(seed, data_rank=, step=, micro_batch=).",
        )
    valid = valid_anchors(supervised, documents, anchor_rule=anchor_rule).cpu()
    if generator is None or isinstance(generator, torch.Generator):
        generators = [generator] * valid.shape[0]
    else:
        generators = list(generator)
        if len(generators) != valid.shape[0]:
            raise ConfigError(f"{len(generators)} generators for {valid.shape[0]} rows", fix="give one for each.")
    rows = []
    for row, own in zip(valid, generators, strict=True):
        candidates = row.nonzero().squeeze(1)
        if num_anchors is not None:
            picked = torch.randperm(candidates.shape[0], generator=own)[:num_anchors]
            candidates = candidates[picked].sort().values
        rows.append(candidates)
    size = max(max((row.shape[0] for row in rows), default=0), 1)
    if fixed_size and num_anchors is not None:
        size = num_anchors
    positions = torch.zeros((len(rows), size), dtype=torch.int64)
    keep = torch.zeros((len(rows), size), dtype=torch.bool)
    for index, row in enumerate(rows):
        positions[index, : row.shape[0]] = row
        keep[index, : row.shape[0]] = True
    return Anchors(positions=positions, keep=keep)
