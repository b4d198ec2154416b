"""The fused DSpark objective: from hidden states to the loss of a micro-batch, without the logits of all slots.

The same numbers as :func:`tokennorm.draft.loss.compute_dspark_loss`, as sums for a window of any number of
micro-batches and ranks instead of a mean over one.

The gradient of :attr:`DSparkSums.loss_sum` is computed in the forward pass and exact for every upstream scalar.
:attr:`DSparkSums.terms` are differentiable one by one too, at the price of a second pass
(:mod:`tokennorm.draft.fused_autograd`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokennorm.draft.checks import SlotFault, report_slots
from tokennorm.draft.diagnostics import acceptance_sums, wide_sum
from tokennorm.draft.fused_autograd import FusedSlots, FusedSpec
from tokennorm.draft.fused_chunks import FusedPlan, Teacher, slots_per_chunk
from tokennorm.draft.objective_inputs import check_inputs, flat_slots
from tokennorm.draft.plan import SlotPlan
from tokennorm.draft.weights import slot_weights
from tokennorm.loss import LossTerm, RatioSum
from tokennorm.loss.products import Products

__all__ = ["DSparkSums", "dspark_objective"]


@dataclass(frozen=True, kw_only=True)
class DSparkSums:
    """One micro-batch of the objective, in sums.

    Attributes:
        loss_sum: 0-d with graph: ``sum_t alpha_t * num_t``. Backward from here is the fast way.
        denominator: 0-d float64 (float32 on MPS), ``sum w``: what ``loss_sum`` and every term are counted in.
        terms: ``ce``, ``l1`` (with a teacher), ``confidence`` (with a confidence head), numerators with graph and
            ``weight`` alpha_t. Backward through ``ce`` or ``l1`` computes the logits once more.
        metrics: the same and the diagnostics as detached pairs: ``accept_rate``, ``accept_rate_1`` (the first
            proposal) and so on, ``tau``, ``confidence_abs_error``, ``confidence_bias``,
            ``confidence_cumprod_bias`` (see :func:`tokennorm.draft.diagnostics.acceptance_sums`).
        accept_rate: ``[B, A, K]`` detached, 0 where unsupervised; None without a teacher.
        slot_losses: ``[B, A, K]`` detached, ``sum_t alpha_t * loss_t`` of each slot before its weight; 0 where
            unsupervised. For a report about a micro-batch.
    """

    loss_sum: Tensor
    denominator: Tensor
    terms: Mapping[str, LossTerm]
    metrics: Mapping[str, RatioSum] = field(default_factory=dict)
    accept_rate: Tensor | None = None
    slot_losses: Tensor | None = None

    def kit_arguments(self) -> dict[str, Any]:
        """Keywords for ``kit.accumulate_microbatch``; ``total_tokens`` is the caller's.

        All terms share one denominator, so a deferred window is exact. The terms travel along with weight 0: they
        are part of ``loss_sum`` already, and ``stats.extra`` reports their global pairs.
        """
        logged = {
            name: LossTerm(numerator=term.numerator.detach(), denominator=term.denominator, weight=0.0)
            for name, term in self.terms.items()
        }
        return {"loss_sum": self.loss_sum, "effective_tokens": self.denominator, "extra_terms": logged}


def dspark_objective(
    *,
    plan: SlotPlan,
    hidden: Tensor,
    head: Tensor,
    loss_decay_gamma: float | None,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    latents: Tensor | None = None,
    markov_weight: Tensor | None = None,
    confidence: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_head: Tensor | None = None,
    teacher_log_total: Tensor | None = None,
    chunk_size: int | None = None,
    check_finite: bool = True,
) -> DSparkSums:
    """The three terms of the DSpark loss and all diagnostics, in chunks of the supervised slots.

    ``logits = hidden @ head.T + latents @ markov_weight.T``. Every Markov head fits: ``latents`` are ``W1[prev]``
    (vanilla), ``sigmoid(gate) * W1[prev]`` (gated) or ``tanh(o)`` (rnn), computed by the model.

    What stands in unsupervised slots of ``hidden``, ``latents`` and ``confidence`` is never read; their gradient
    is exactly 0. Products run in the operands' dtype (or autocast's), softmaxes and losses in float32, float64
    for float64. Nothing waits for the device.

    Args:
        plan: the supervised slots, on the device of ``hidden``; from :func:`tokennorm.draft.plan_slots`.
        hidden: ``[B, A, K, D]`` after the drafter's final norm, or ``[n, D]``: only the plan's ``n`` supervised
            slots, in ``[b, a, k]`` order. ``latents`` and ``confidence`` have the same choice, each by itself.
        head: ``[V_d, D]``, the drafter's; one that needs no gradient costs none. ``V_d`` is the size of the
            target's vocabulary unless the plan has a reduced one.
        loss_decay_gamma: decay of the weights over a block's proposals; None or <= 0: none.
        ce_loss_alpha: weight of the cross-entropy.
        l1_loss_alpha: weight of the L1 distance to the teacher.
        confidence_head_alpha: weight of the confidence head.
        latents: ``[B, A, K, r]`` or ``[n, r]``; None without a Markov head.
        markov_weight: ``[V_d, r]``, the head's output matrix ``W2``; with ``latents``.
        confidence: ``[B, A, K]`` or ``[n]`` confidence logits, with graph; None without a confidence head.
        teacher_hidden: ``[B, S, D_t]``, the target's, after its final norm; never differentiated. Needed for the
            L1 term and the confidence head.
        teacher_head: ``[V, D_t]``; None: ``head``, without gradient. Needed with a reduced vocabulary.
        teacher_log_total: ``[B, S]``, the log-sum-exp of the teacher's ``V`` logits at each position, where it is
            known already (from a cache). A reduced vocabulary then projects its own tokens alone. It must belong
            to exactly these ``teacher_hidden``.
        chunk_size: slots of logits held at once; by default :func:`slots_per_chunk`.
        check_finite: False leaves NaN and infinity in the sums without an error, for a loss guard that refuses the
            micro-batch before backward.

    Returns:
        The sums; they have a graph also when no slot is supervised, and all gradients are then 0.

    Raises:
        LossUsageError: shapes that don't fit, no teacher where one is needed, and backward with
            ``create_graph=True``.
        NonFiniteSlotError: NaN or infinity in a supervised slot, with its place: at once on the CPU, from
            :func:`tokennorm.draft.raise_pending_slot_errors` on an accelerator. Not without ``check_finite``.
    """
    check_inputs(
        plan=plan,
        hidden=hidden,
        head=head,
        latents=latents,
        markov_weight=markov_weight,
        confidence=confidence,
        teacher_hidden=teacher_hidden,
        teacher_head=teacher_head,
        teacher_log_total=teacher_log_total,
        needs_teacher=l1_loss_alpha > 0 or (confidence is not None and confidence_head_alpha != 0),
        chunk_size=chunk_size,
    )
    teacher = None
    if teacher_hidden is not None:
        rows, weight = teacher_hidden.detach().flatten(0, 1), head if teacher_head is None else teacher_head
        total = None if teacher_log_total is None else teacher_log_total.detach().flatten()
        teacher = Teacher(rows, weight.detach(), total)
    flat_hidden, hidden_index = flat_slots(hidden, plan, dims=1)
    flat_latents, latent_index = (None, hidden_index) if latents is None else flat_slots(latents, plan, dims=1)
    weights_3d = slot_weights(
        plan.supervised, loss_decay_gamma=loss_decay_gamma, first_supervised_slot=plan.first_supervised_slot
    )
    weights = weights_3d.reshape(-1).index_select(0, plan.slots)
    spec = FusedSpec(
        fused=FusedPlan(
            slots=plan,
            products=Products.of(hidden, head),
            hidden_index=hidden_index,
            latent_index=latent_index,
            teacher=teacher,
            chunk_size=chunk_size or slots_per_chunk(plan, teacher, hidden.device),
        ),
        weights=weights,
        ce_alpha=float(ce_loss_alpha),
        # A negative weight would reward distance from the teacher; like 0 it means: no such term.
        l1_alpha=max(float(l1_loss_alpha), 0.0),
        # Inside an autograd function gradients are always off, so this is read here.
        gradients=torch.is_grad_enabled(),
    )
    fused = FusedSlots.apply(flat_hidden, head, flat_latents, markov_weight, spec)
    loss_sum, ce_sum, l1_sum, ce, l1 = fused  # pyright: ignore[reportGeneralTypeIssues]
    if check_finite:
        _check_finite(SlotFault.DRAFT, ce, plan)
    slot_losses = spec.ce_alpha * ce
    denominator = wide_sum(weights)
    terms = {"ce": LossTerm(numerator=ce_sum, denominator=denominator, weight=spec.ce_alpha)}
    if teacher is None:
        return DSparkSums(
            loss_sum=loss_sum,
            denominator=denominator,
            terms=terms,
            metrics=_term_metrics(terms),
            slot_losses=_spread(slot_losses, plan),
        )
    if check_finite:
        _check_finite(SlotFault.TEACHER, l1, plan)
    if spec.l1_alpha:
        slot_losses = slot_losses + spec.l1_alpha * l1
    terms["l1"] = LossTerm(numerator=l1_sum, denominator=denominator, weight=spec.l1_alpha)
    accept = (1 - 0.5 * l1).clamp(0, 1)
    logits = None
    if confidence is not None:
        flat, index = flat_slots(confidence, plan, dims=0)
        logits = flat.index_select(0, index).to(accept.dtype)
        if check_finite:
            _check_finite(SlotFault.CONFIDENCE, logits.detach(), plan)
        bce = F.binary_cross_entropy_with_logits(logits, accept, reduction="none")
        numerator = wide_sum(bce * weights).to(accept.dtype)
        terms["confidence"] = LossTerm(
            numerator=numerator, denominator=denominator, weight=float(confidence_head_alpha)
        )
        if confidence_head_alpha != 0:
            loss_sum = loss_sum + float(confidence_head_alpha) * numerator
            slot_losses = slot_losses + float(confidence_head_alpha) * bce.detach()
    accept_3d = _spread(accept, plan)
    diagnostics = acceptance_sums(
        accept_rate=accept_3d,
        supervised=plan.supervised,
        weights=weights_3d,
        confidence=None if logits is None else _spread(logits.detach(), plan),
        first_supervised_slot=plan.first_supervised_slot,
    )
    return DSparkSums(
        loss_sum=loss_sum,
        denominator=denominator,
        terms=terms,
        metrics=_term_metrics(terms) | _diagnostic_metrics(diagnostics, has_confidence=logits is not None),
        accept_rate=accept_3d,
        slot_losses=_spread(slot_losses, plan),
    )


def _spread(values: Tensor, plan: SlotPlan) -> Tensor:
    """``[n]`` in the order of the plan as ``[B, A, K]``, 0 elsewhere."""
    flat = values.new_zeros(plan.supervised.numel())
    return flat.index_copy_(0, plan.slots, values).view(plan.supervised.shape)


def _check_finite(fault: SlotFault, values: Tensor, plan: SlotPlan) -> None:
    report_slots(fault, ~values.isfinite(), plan.slots, plan.supervised.shape)


def _term_metrics(terms: Mapping[str, LossTerm]) -> dict[str, RatioSum]:
    return {name: RatioSum(term.numerator.detach(), term.denominator) for name, term in terms.items()}


def _diagnostic_metrics(sums: Mapping[str, Tensor], *, has_confidence: bool) -> dict[str, RatioSum]:
    num, den = sums["accept_rate_pos_num"], sums["accept_rate_pos_den"]
    metrics = {"accept_rate": RatioSum(num.sum(), den.sum()), "tau": RatioSum(sums["tau_num"], sums["tau_den"])}
    for proposal, pair in enumerate(zip(num.unbind(), den.unbind(), strict=True), start=1):
        metrics[f"accept_rate_{proposal}"] = RatioSum(*pair)
    if has_confidence:
        for name in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
            metrics[name] = RatioSum(sums[f"{name}_num"], sums["confidence_diag_den"])
    return metrics
