"""The fused objective under autograd: one gradient computed in the forward pass, exact for every upstream.

Cross-entropy and L1 distance need one gradient of the logits each, and a matrix product each to carry it on. The
weights of the objective are known beforehand, so the forward pass adds the two gradients in the logits, where that
costs next to nothing, and carries on one: that of the weighted sum. Backward from there multiplies it by one
scalar.

The two sums are differentiable one by one too. Keeping a gradient for each would double the matrix products and
the memory of every step, for what hardly any step asks for; so when backward reaches one of them, the pass runs
again with the upstream scalars as weights. Which outputs backward reaches says which way to go; no value is
compared, so nothing waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokennorm.draft.diagnostics import wide_sum
from tokennorm.draft.fused_chunks import FusedPlan, Needs, Operands, run_slot_chunks
from tokennorm.errors import LossUsageError

__all__ = ["FusedSlots", "FusedSpec"]


class FusedSpec(NamedTuple):
    """Everything but the differentiable tensors.

    Attributes:
        fused: slots, products, teacher.
        weights: ``[n]`` of the slots, in the order of the plan.
        ce_alpha: weight of the cross-entropy in the weighted sum.
        l1_alpha: weight of the distance in it.
        gradients: whether autograd was on where the objective was called.
    """

    fused: FusedPlan
    weights: Tensor
    ce_alpha: float
    l1_alpha: float
    gradients: bool


class FusedSlots(torch.autograd.Function):
    """``(hidden, head, latents, markov, spec) -> (weighted sum, ce sum, l1 sum, ce [n], l1 [n])``.

    The three sums are differentiable; the values per slot, in the order of the plan, are not.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, latents: Tensor | None, markov: Tensor | None, spec: FusedSpec
    ) -> tuple[Tensor, ...]:
        """Run the pass, with the gradient products that somebody may ask for."""
        needs = Needs(*(spec.gradients and needed for needed in ctx.needs_input_grad[:4]))
        weights = spec.weights.to(spec.fused.products.accumulate_dtype)
        operands = Operands(hidden, head, latents, markov)
        factors = (weights * spec.ce_alpha, weights * spec.l1_alpha)
        with torch.autocast(hidden.device.type, enabled=False):
            done = run_slot_chunks(spec.fused, operands, needs, factors)
        ctx.spec, ctx.needs, ctx.gradients = spec, needs, done.gradients
        ctx.save_for_backward(hidden, head, latents, markov)
        ctx.set_materialize_grads(False)
        ce, l1 = done.ce, torch.zeros_like(done.ce) if done.l1 is None else done.l1
        ce_sum, l1_sum = wide_sum(ce * weights), wide_sum(l1 * weights)
        total = spec.ce_alpha * ce_sum
        if spec.l1_alpha:
            total = total + spec.l1_alpha * l1_sum
        ctx.mark_non_differentiable(ce, l1)
        return total.to(ce.dtype), ce_sum.to(ce.dtype), l1_sum.to(ce.dtype), ce, l1

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        """Scale the gradient of the weighted sum, or run the pass again for the sums by themselves."""
        total, ce, l1 = upstreams[:3]
        if total is None and ce is None and l1 is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            raise LossUsageError(
                "dspark_objective was differentiated with create_graph=True",
                why="its gradient is computed in the forward pass, without a graph of its own.",
                fix="leave create_graph out.",
            )
        operands = Operands(*ctx.saved_tensors)
        spec: FusedSpec = ctx.spec
        if ce is None and l1 is None:
            scale, consumed, gradients = total, not _graph_is_kept(), ctx.gradients
            if consumed:
                ctx.gradients = None
            if gradients is None:
                raise LossUsageError(
                    "the graph of dspark_objective was already used", fix="pass retain_graph=True."
                )
        else:
            scale, consumed = None, True
            weights = spec.weights.to(spec.fused.products.accumulate_dtype)
            factors = (
                weights * _upstream(spec.ce_alpha, total, ce),
                weights * _upstream(spec.l1_alpha, total, l1),
            )
            with torch.autocast(operands.hidden.device.type, enabled=False):
                gradients = run_slot_chunks(spec.fused, operands, ctx.needs, factors).gradients
        scaled = [
            None if value is None or like is None else _scale(value, scale, like=like, in_place=consumed)
            for value, like in zip(gradients, operands, strict=True)
        ]
        indices = (spec.fused.hidden_index, None, spec.fused.latent_index, None)
        spread = [
            value if value is None or index is None or like is None else _rows_back(value, index, like)
            for value, index, like in zip(scaled, indices, operands, strict=True)
        ]
        return *spread, None


def _upstream(alpha: float, total: Tensor | None, own: Tensor | None) -> Tensor | float:
    """What reaches a term: its share of the weighted sum's upstream, and its own."""
    share = 0.0 if total is None else total * alpha
    return share if own is None else share + own


def _scale(value: Tensor, scale: Tensor | None, *, like: Tensor, in_place: bool) -> Tensor:
    """``value * scale`` in the operand's dtype, rounded once; in place when nobody can ask for it again."""
    if scale is not None:
        value = value.mul_(scale) if in_place else value * scale
    return value.to(like.dtype)


def _rows_back(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Put the rows back where they came from; the others are 0."""
    return torch.zeros_like(like, memory_format=torch.contiguous_format).index_copy_(0, index, values)


def _graph_is_kept() -> bool:
    """Whether this backward runs with retain_graph=True; assume so where torch can't tell."""
    autograd = getattr(torch._C, "_autograd", None)
    ask = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
