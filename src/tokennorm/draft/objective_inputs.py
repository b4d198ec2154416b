"""What can be wrong with the arguments of the fused objective, seen from shapes and dtypes."""

from __future__ import annotations

from torch import Tensor

from tokennorm.draft.plan import SlotPlan
from tokennorm.errors import LossUsageError

__all__ = ["check_inputs", "flat_slots"]


def flat_slots(values: Tensor, plan: SlotPlan, *, dims: int) -> tuple[Tensor, Tensor]:
    """``[N, ...]`` rows of a per-slot tensor, and the row of each planned slot.

    Args:
        values: ``[B, A, K, ...]`` or ``[n, ...]`` in ``[b, a, k]`` order.
        plan: the planned slots.
        dims: dimensions after the slots': 1 for states, 0 for scalars.
    """
    if values.dim() == 3 + dims:
        return values.flatten(0, 2), plan.slots
    return values, plan.order


def check_inputs(
    *,
    plan: SlotPlan,
    hidden: Tensor,
    head: Tensor,
    latents: Tensor | None,
    markov_weight: Tensor | None,
    confidence: Tensor | None,
    teacher_hidden: Tensor | None,
    teacher_head: Tensor | None,
    teacher_log_total: Tensor | None,
    needs_teacher: bool,
    chunk_size: int | None,
) -> None:
    """Raises LossUsageError, naming the argument, its shape and the expected one."""
    if plan.slots.device != hidden.device:
        raise LossUsageError(
            f"the plan is on {plan.slots.device}, the hidden states on {hidden.device}",
            fix="plan = plan.to(hidden.device), once per micro-batch.",
        )
    if chunk_size is not None and chunk_size < 1:
        raise LossUsageError(f"chunk_size must be at least 1, not {chunk_size}")
    _check_matrix(head, "head", plan.draft_size)
    _check_slots(hidden, "hidden", plan, width=head.shape[1])
    if (latents is None) != (markov_weight is None):
        raise LossUsageError(
            f"{'markov_weight' if latents is None else 'latents'} came without "
            f"{'latents' if latents is None else 'markov_weight'}",
            fix="pass both for a drafter with a Markov head, or neither.",
        )
    if latents is not None and markov_weight is not None:
        _check_matrix(markov_weight, "markov_weight", plan.draft_size)
        _check_slots(latents, "latents", plan, width=markov_weight.shape[1])
    if confidence is not None:
        _check_slots(confidence, "confidence", plan, width=None)
    _check_teacher(plan, head, teacher_hidden, teacher_head, needs_teacher)
    if teacher_log_total is not None:
        _check_log_total(plan, teacher_hidden, teacher_log_total)


def _check_teacher(
    plan: SlotPlan, head: Tensor, hidden: Tensor | None, teacher_head: Tensor | None, needed: bool
) -> None:
    if hidden is None:
        if needed:
            raise LossUsageError(
                "teacher_hidden is None although the L1 term or the confidence head has a weight",
                why="the distance to the teacher is the L1 term, and the confidence head's target.",
                fix="pass the target's hidden states after its final norm.",
            )
        return
    if teacher_head is None and plan.vocabulary is not None:
        raise LossUsageError(
            "teacher_head is None although the drafter's vocabulary is reduced",
            why="the teacher's softmax runs over all tokens, and `head` has only the drafted ones.",
            fix="pass the target's own head.",
        )
    weight = head if teacher_head is None else teacher_head
    _check_matrix(weight, "teacher_head", plan.target_size)
    expected = (*plan.teacher_shape, weight.shape[1])
    if hidden.shape != expected or not hidden.is_floating_point():
        raise LossUsageError(
            f"teacher_hidden is {hidden.dtype} of shape {list(hidden.shape)}; the plan and the teacher's head "
            f"need floating-point {list(expected)}"
        )


def _check_matrix(weight: Tensor, name: str, rows: int) -> None:
    if weight.dim() != 2 or weight.shape[0] != rows or not weight.is_floating_point():
        raise LossUsageError(
            f"{name} is {weight.dtype} of shape {list(weight.shape)}; the plan needs one floating-point row for "
            f"each of {rows} tokens"
        )


def _check_slots(values: Tensor, name: str, plan: SlotPlan, *, width: int | None) -> None:
    tail = () if width is None else (width,)
    shapes = [(*plan.supervised.shape, *tail), (plan.num_supervised, *tail)]
    if values.shape not in shapes or not values.is_floating_point():
        raise LossUsageError(
            f"{name} is {values.dtype} of shape {list(values.shape)}; it must be floating-point "
            f"{' or '.join(str(list(shape)) for shape in shapes)}"
        )


def _check_log_total(plan: SlotPlan, hidden: Tensor | None, log_total: Tensor) -> None:
    if plan.vocabulary is None or hidden is None:
        raise LossUsageError(
            f"teacher_log_total came with {'no teacher_hidden' if hidden is None else 'the whole vocabulary'}",
            why="it spares a drafter with a reduced vocabulary the target's other logits.",
            fix="leave it out.",
        )
    if tuple(log_total.shape) != tuple(hidden.shape[:2]) or not log_total.is_floating_point():
        raise LossUsageError(
            f"teacher_log_total is {log_total.dtype} {list(log_total.shape)}, one number for each position of "
            f"teacher_hidden {list(hidden.shape[:2])} was expected"
        )
