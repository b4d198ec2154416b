"""One pass over the planned slots, a chunk of logits at a time: losses, and gradients in the same place.

Per chunk: the logits of its distinct teacher rows, once each, turned into probabilities; the drafter's logits

    z = hidden @ head.T + latents @ markov.T

turned into losses and then, in the same buffer, into the gradient of

    sum over slots of  ce_factor * ce + l1_factor * l1

from which the gradients of the four operands follow while the chunk is still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokennorm.draft.plan import SlotChunk, SlotPlan
from tokennorm.draft.slot_math import Scratch, block_rows, slot_losses_, softmax_
from tokennorm.loss import default_chunk_size
from tokennorm.loss.products import Products

__all__ = ["FusedPlan", "Operands", "SlotResults", "Teacher", "run_slot_chunks", "slots_per_chunk"]


class Operands(NamedTuple):
    """The four differentiable tensors, or their gradients, or whether those are asked for.

    ``hidden`` and ``latents`` are ``[N, D]`` and ``[N, r]``, all slots or the supervised ones; as gradients
    ``[n, D]`` and ``[n, r]``, in the order of the plan. ``head`` is ``[V_d, D]``, ``markov`` ``[V_d, r]``.
    """

    hidden: Tensor
    head: Tensor
    latents: Tensor | None
    markov: Tensor | None


class Gradients(NamedTuple):
    """Gradients of :class:`Operands` in the accumulate dtype; None where not asked for."""

    hidden: Tensor | None
    head: Tensor | None
    latents: Tensor | None
    markov: Tensor | None


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    head: bool
    latents: bool
    markov: bool


class Teacher(NamedTuple):
    """``hidden`` ``[B * S, D_t]`` after the target's final norm, and its ``head`` ``[V, D_t]``; no gradient.

    With ``log_total`` ``[B * S]``, the log-sum-exp of all ``V`` logits, a reduced vocabulary needs only its own.
    """

    hidden: Tensor
    head: Tensor
    log_total: Tensor | None = None


class SlotResults(NamedTuple):
    """``ce`` and ``l1`` ``[n]`` (``l1`` None without a teacher), and the gradients."""

    ce: Tensor
    l1: Tensor | None
    gradients: Gradients


@dataclass(frozen=True, kw_only=True)
class FusedPlan:
    """Everything but the differentiable tensors.

    Attributes:
        slots: the slots and their order.
        products: how to multiply.
        hidden_index: ``[n]`` row of each planned slot in ``hidden``.
        latent_index: the same for ``latents``.
        teacher: None when nothing needs it.
        chunk_size: slots of logits held at once.
    """

    slots: SlotPlan
    products: Products
    hidden_index: Tensor
    latent_index: Tensor
    teacher: Teacher | None
    chunk_size: int


def slots_per_chunk(plan: SlotPlan, teacher: Teacher | None, device: torch.device) -> int:
    """Slots held at once by default: the memory budget of a chunk, shared with the teacher rows they need."""
    shared = 0.0 if teacher is None else plan.num_teacher_rows / max(plan.num_supervised, 1)
    per_row = plan.target_size if teacher is None or teacher.log_total is None else plan.draft_size
    per_slot = plan.draft_size + int(shared * per_row)
    return default_chunk_size(plan.num_supervised, per_slot, device)


def run_slot_chunks(
    plan: FusedPlan, operands: Operands, needs: Needs, factors: tuple[Tensor, Tensor]
) -> SlotResults:
    """One pass over the planned slots.

    Args:
        plan: slots, products, teacher.
        operands: the four tensors.
        needs: which gradients to compute; with none of them no gradient product is made.
        factors: ``[n]`` of each slot's cross-entropy and of its distance, in the gradient (not in the losses).
    """
    products, dtype = plan.products, plan.products.accumulate_dtype
    device, count, vocabulary = operands.hidden.device, plan.slots.num_supervised, plan.slots.draft_size
    head = products.operand(operands.head)
    markov = None if operands.markov is None else products.operand(operands.markov)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    chunks = list(plan.slots.chunks(plan.chunk_size))
    longest = max((chunk.slots.stop - chunk.slots.start for chunk in chunks), default=0)
    block = block_rows(vocabulary, device, max(longest, 1))
    scratch = Scratch.like(min(block, longest), vocabulary, dtype, device)
    logits_buffer = new(longest, vocabulary)
    teacher = _TeacherChunks(plan, chunks, dtype) if plan.teacher is not None else None
    ce, l1 = new(count), None if teacher is None else new(count)
    gradients = Gradients(
        hidden=new(count, operands.hidden.shape[1]) if needs.hidden else None,
        head=_accumulator(operands.head, dtype, count) if needs.head else None,
        latents=new(count, operands.latents.shape[1]) if needs.latents and operands.latents is not None else None,
        markov=_accumulator(operands.markov, dtype, count)
        if needs.markov and operands.markov is not None
        else None,
    )
    for chunk in chunks:
        start, end = chunk.slots.start, chunk.slots.stop
        probabilities, missing, row = (None, None, None) if teacher is None else teacher(chunk)
        hidden = products.operand(operands.hidden.index_select(0, plan.hidden_index[start:end]))
        logits = products.logits(hidden, head, None, out=logits_buffer[: end - start])
        latents = None
        if operands.latents is not None and markov is not None:
            latents = products.operand(operands.latents.index_select(0, plan.latent_index[start:end]))
            _add_product(products, latents, markov, out=logits)
        for low in range(start, end, block):
            high = min(low + block, end)
            here = slice(low - start, high - start)
            block_ce, block_l1 = slot_losses_(
                logits[here],
                plan.slots.labels[low:high],
                probabilities,
                scratch,
                teacher_row=None if row is None else row[here],
                missing=None if missing is None else missing[here],
                factors=(factors[0][low:high], factors[1][low:high]) if any(needs) else None,
            )
            assert block_ce is not None
            ce[low:high] = block_ce
            if l1 is not None and block_l1 is not None:
                l1[low:high] = block_l1
        if gradients.hidden is not None:
            products.grad_hidden(logits, head, out=gradients.hidden[start:end])
        if gradients.latents is not None and markov is not None:
            products.grad_hidden(logits, markov, out=gradients.latents[start:end])
        if gradients.head is not None:
            products.grad_weight(logits, hidden, out=gradients.head, first=start == 0)
        if gradients.markov is not None and latents is not None:
            products.grad_weight(logits, latents, out=gradients.markov, first=start == 0)
    return SlotResults(ce, l1, gradients)


class _TeacherChunks:
    """The teacher's probabilities of one chunk at a time, each distinct row computed once."""

    def __init__(self, plan: FusedPlan, chunks: list[SlotChunk], dtype: torch.dtype) -> None:
        assert plan.teacher is not None
        self._plan, self._dtype = plan, dtype
        head, vocabulary = plan.teacher.head, plan.slots.vocabulary
        self._products = Products.of(plan.teacher.hidden, head)
        if plan.teacher.log_total is not None:
            assert vocabulary is not None
            head = head.index_select(0, vocabulary.ids)
        self._head = self._products.operand(head)
        most = max((chunk.rows.stop - chunk.rows.start for chunk in chunks), default=0)
        self._buffer = torch.empty(
            (most, self._head.shape[0]), dtype=self._products.accumulate_dtype, device=self._head.device
        )

    def __call__(self, chunk: SlotChunk) -> tuple[Tensor, Tensor | None, Tensor]:
        """Probabilities ``[t, V_d]``, each slot's missing mass or None, and each slot's row among the ``t``."""
        plan, teacher = self._plan.slots, self._plan.teacher
        assert teacher is not None
        states = teacher.hidden.index_select(0, plan.teacher_rows[chunk.rows])
        rows = self._products.operand(states)
        probabilities = self._products.logits(rows, self._head, None, out=self._buffer[: rows.shape[0]])
        row = plan.row_of_slot[chunk.slots] - chunk.rows.start
        if teacher.log_total is not None:
            total = teacher.log_total.index_select(0, plan.teacher_rows[chunk.rows]).to(probabilities.dtype)
            drafted = probabilities.sub_(total.unsqueeze(1)).exp_()
        else:
            softmax_(probabilities)
            if plan.vocabulary is None:
                return probabilities.to(self._dtype), None, row
            drafted = probabilities.index_select(1, plan.vocabulary.ids)
        # Rounding may leave a little less than nothing.
        missing = (1 - drafted.sum(dim=1)).clamp(min=0).to(self._dtype)
        return drafted.to(self._dtype), missing.index_select(0, row), row


def _accumulator(like: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """The first chunk writes it; without slots nobody does."""
    make = torch.empty if count else torch.zeros
    return make(like.shape, dtype=dtype, device=like.device)


def _add_product(products: Products, left: Tensor, weight: Tensor, *, out: Tensor) -> None:
    """``out += left @ weight.T``, accumulated in the dtype of ``out``."""
    if products.dtype == products.accumulate_dtype:
        out.addmm_(left, weight.t())
    elif left.device.type == "cuda":
        out.add_(torch.mm(left, weight.t(), out_dtype=out.dtype))
    else:
        out.add_(torch.mm(left, weight.t()))
