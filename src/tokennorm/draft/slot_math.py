"""Cross-entropy and probability distance of a block of slots, and their joint gradient, in place.

Everything here sees dense float32 or float64 rows that are all supervised: masking happened before. With ``z`` the
drafter's logits of one slot, ``q = softmax(z)``, ``p`` the teacher's probabilities, ``y`` the label and
``s = sign(q - p)`` (0 where they are equal):

    ce = logsumexp(z) - z[y]             d ce/dz = q - onehot(y)
    l1 = sum_v |q_v - p_v|               d l1/dz = q * (s - sum_v q_v s_v)

``l1`` is the raw distance, in [0, 2]: twice the total variation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Scratch", "block_rows", "slot_losses_", "softmax_"]

# On a CPU the passes over a chunk go block by block: that bounds the scratch, and a block stays in cache. Smaller
# blocks are no faster with one thread, and with several they make the threads wait for each other at every pass.
_BLOCK_BYTES_PER_THREAD = 8 * 2**20


def block_rows(vocabulary: int, device: torch.device, most: int) -> int:
    """Rows of one block: what stays in the cache of a CPU, else the whole chunk of ``most`` rows."""
    if device.type != "cpu":
        return max(1, most)
    return max(1, min(most, _BLOCK_BYTES_PER_THREAD // (4 * vocabulary) * torch.get_num_threads()))


class Scratch(NamedTuple):
    """Two buffers ``[block, V]`` that every block of a pass writes over."""

    distance: Tensor
    signed: Tensor

    @staticmethod
    def like(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Scratch:
        """Buffers for blocks of up to ``rows`` rows."""
        return Scratch(*torch.empty((2, rows, vocabulary), dtype=dtype, device=device).unbind())


def softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turn rows of logits into probabilities in place; returns each row's maximum and sum of exponentials."""
    maximum = logits.amax(dim=1, keepdim=True)
    total = logits.sub_(maximum).exp_().sum(dim=1, keepdim=True)
    logits.div_(total)
    return maximum, total


def slot_losses_(
    logits: Tensor,
    labels: Tensor | None,
    teacher: Tensor | None,
    scratch: Scratch,
    *,
    teacher_row: Tensor | None = None,
    missing: Tensor | None = None,
    factors: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the losses of a block of ``m`` slots; overwrite ``logits`` with their gradient, or with scratch.

    Args:
        logits: ``[m, V]``, destroyed.
        labels: ``[m]`` int64 inside the vocabulary; None: no cross-entropy.
        teacher: probabilities ``[m, V]``, or ``[t, V]`` with ``teacher_row``; None: no distance.
        scratch: buffers of at least ``m`` rows.
        teacher_row: ``[m]`` the slot's row of ``teacher``.
        missing: ``[m]`` the teacher's probability of tokens that the drafter can't propose: its own is 0 there,
            so it belongs to the distance and has no gradient.
        factors: (``[m]`` of the cross-entropy, ``[m]`` of the distance): leave
            ``factors[0] * dce/dz + factors[1] * dl1/dz`` in ``logits``.

    Returns:
        ``ce`` and ``l1``, each ``[m]`` or None.
    """
    rows = logits.shape[0]
    column = None if labels is None else labels.unsqueeze(1)
    picked = None if column is None else logits.gather(1, column)
    maximum, total = softmax_(logits)
    # Not log(q[y]), which would be -inf for a label whose probability underflows.
    ce = None if picked is None else (total.log() - (picked - maximum)).squeeze(1)
    distance, signed = scratch.distance[:rows], scratch.signed[:rows]
    l1 = None
    if teacher is not None:
        if teacher_row is None:
            torch.sub(logits, teacher, out=distance)
        else:
            torch.index_select(teacher, 0, teacher_row, out=distance)
            torch.sub(logits, distance, out=distance)
        if factors is not None:
            torch.sign(distance, out=signed)
        l1 = distance.abs_().sum(dim=1)
        if missing is not None:
            l1 = l1 + missing
    if factors is not None:
        ce_factor, l1_factor = (factor.to(logits.dtype).unsqueeze(1) for factor in factors)
        slope = ce_factor if column is not None else torch.zeros_like(ce_factor)
        if teacher is not None:
            signed.mul_(logits)
            slope = slope - l1_factor * signed.sum(dim=1, keepdim=True)
        logits.mul_(slope)
        if teacher is not None:
            logits.addcmul_(signed, l1_factor)
        if column is not None:
            logits.scatter_add_(1, column, -ce_factor)
    return ce, l1
