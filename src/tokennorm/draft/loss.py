"""The DSpark loss of a block drafter from its full logits: cross-entropy, L1 distance to the teacher, confidence.

With ``w`` the weight of a slot (:func:`tokennorm.draft.weights.slot_weights`), sums over the supervised slots,
``q`` and ``p`` the probabilities of drafter and teacher, ``a = clamp(1 - |p - q|_1 / 2, 0, 1)`` the accept rate:

    ce         = sum w * cross_entropy(q, token)                   / sum w
    l1         = sum w * |p - q|_1  (raw, in [0, 2])               / sum w
    confidence = sum w * BCEWithLogits(c, a), a without gradient   / sum w

(DSpark, arXiv 2607.05147.) :mod:`tokennorm.draft.objective` computes the same from hidden states, without the
logits of all slots.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tokennorm.draft.checks import SlotFault, check_slot_labels, report_slots
from tokennorm.draft.common import DSparkForwardOutput, check_output, supervised_slots
from tokennorm.draft.diagnostics import acceptance_sums, wide_sum
from tokennorm.draft.slot_losses import SlotRows, math_dtype, slot_losses, supervised_rows
from tokennorm.draft.weights import slot_weights
from tokennorm.errors import LossUsageError

__all__ = ["compute_dspark_loss"]

# Most slots whose probabilities are held at once.
_PROBABILITY_CHUNK_TOKENS = 128
_DENOMINATORS = ("ce_loss_den", "l1_loss_den", "confidence_loss_den")


def _all_reduce_loss_denominators(
    loss_terms: dict[str, Tensor], *, process_group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The three denominators summed over ``process_group`` in one all-reduce; None: this rank's own."""
    local = [loss_terms[name].detach() for name in _DENOMINATORS]
    if process_group is None:
        return {name: value.clone() for name, value in zip(_DENOMINATORS, local, strict=True)}
    wide = torch.float32 if local[0].device.type == "mps" else torch.float64
    message = torch.stack([value.to(wide) for value in local])
    dist.all_reduce(message, group=process_group)
    return {
        name: total.to(value.dtype)
        for name, value, total in zip(_DENOMINATORS, local, message.unbind(), strict=True)
    }


def _build_loss_weight_mask(
    *,
    eval_mask: Tensor,
    block_size: int,
    device: torch.device,
    loss_decay_gamma: float | None,
    first_supervised_slot: int = 0,
) -> Tensor:
    """The weight of every slot, float32 ``[B, A, K]``: ``eval_mask`` times the decay over proposals."""
    if eval_mask.shape[-1] != block_size:
        raise LossUsageError(f"eval_mask has {eval_mask.shape[-1]} slots per block, block_size is {block_size}")
    return slot_weights(
        eval_mask.to(device), loss_decay_gamma=loss_decay_gamma, first_supervised_slot=first_supervised_slot
    )


def _l1_probability_distance_chunk(*, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """``sum_v |softmax(draft) - softmax(target)|`` over the last dim, in [0, 2], by plain autograd."""
    dtype = math_dtype(draft_logits, target_logits)
    draft = torch.softmax(draft_logits.to(dtype), dim=-1)
    return (draft - torch.softmax(target_logits.to(dtype), dim=-1)).abs().sum(dim=-1)


def _compute_l1_dist_per_token(
    *, draft_logits: Tensor, aligned_target_logits: Tensor, chunk_size: int = _PROBABILITY_CHUNK_TOKENS
) -> Tensor:
    """Raw L1 distance of every slot ``[...]`` from logits ``[..., V]``, ``chunk_size`` slots at a time.

    Only ``draft_logits`` gets a gradient.

    Raises:
        LossUsageError: the two shapes differ (chunks of both would be compared out of step).
    """
    if draft_logits.shape != aligned_target_logits.shape:
        raise LossUsageError(
            f"draft_logits {list(draft_logits.shape)} and aligned_target_logits "
            f"{list(aligned_target_logits.shape)} must have one shape",
            why="probabilities of different slots or tokens would be compared.",
        )
    if chunk_size < 1:
        raise LossUsageError(f"chunk_size must be at least 1, not {chunk_size}")
    every_slot = SlotRows(None, None)
    _, distance = slot_losses(draft_logits, aligned_target_logits, None, every_slot, chunk_size=chunk_size)
    assert distance is not None
    return distance


def _compute_accept_rate_3d(l1_dist_per_token: Tensor | None) -> Tensor | None:
    """Probability that a proposal is accepted, ``sum_v min(p, q) = 1 - L1 / 2``; None without a teacher."""
    return None if l1_dist_per_token is None else (1 - 0.5 * l1_dist_per_token).clamp(0, 1)


def _compute_local_l1_term(*, l1_dist_per_token: Tensor | None, loss_weight_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``(sum w * L1, sum w)`` of this rank; two zeros without a teacher."""
    if l1_dist_per_token is None:
        return loss_weight_mask.new_zeros(()), loss_weight_mask.new_zeros(())
    # A slot of weight 0 is not supervised, and may hold anything.
    counted = torch.where(loss_weight_mask > 0, l1_dist_per_token, 0)
    return _weighted(counted, loss_weight_mask), _sum(loss_weight_mask, counted.dtype)


def _collect_acceptance_diagnostics(
    *,
    outputs: DSparkForwardOutput,
    accept_rate_3d: Tensor | None,
    loss_weight_mask: Tensor,
    has_confidence: bool,
) -> dict[str, Tensor]:
    """Unreduced sums of the diagnostics (:func:`tokennorm.draft.diagnostics.acceptance_sums`)."""
    first = outputs.first_supervised_slot
    dtype = math_dtype(outputs.draft_logits, accept_rate_3d)
    sums = acceptance_sums(
        accept_rate=accept_rate_3d,
        supervised=supervised_slots(outputs.eval_mask, outputs.block_keep_mask, first),
        weights=loss_weight_mask,
        confidence=outputs.confidence_pred if has_confidence else None,
        first_supervised_slot=first,
    )
    return {name: value.to(dtype) for name, value in sums.items()}


def _collect_local_terms(
    *, outputs: DSparkForwardOutput, loss_decay_gamma: float | None, l1_loss_alpha: float
) -> tuple[dict[str, Tensor], bool]:
    """This rank's ``{ce,l1,confidence}_loss_{num,den}`` and diagnostics, and whether there is a confidence head.

    Raises:
        LossUsageError: shapes that don't fit; no teacher where one is needed.
        LabelError, NonFiniteSlotError: a fault in a supervised slot, with its place.
    """
    check_output(outputs)
    has_confidence = outputs.confidence_pred is not None
    target = outputs.aligned_target_logits
    if target is None and (l1_loss_alpha > 0 or has_confidence):
        needs = f"l1_loss_alpha is {l1_loss_alpha}" if l1_loss_alpha > 0 else "there is a confidence head"
        raise LossUsageError(
            f"aligned_target_logits is None although {needs}",
            why="the distance to the teacher is the L1 term, and the confidence head's target.",
            fix="pass the teacher's logits at the drafted slots, or l1_loss_alpha=0 and no confidence_pred.",
        )
    first, shape = outputs.first_supervised_slot, outputs.eval_mask.shape
    supervised = supervised_slots(outputs.eval_mask, outputs.block_keep_mask, first)
    check_slot_labels(outputs.target_ids, supervised, outputs.draft_logits.shape[-1])
    rows = supervised_rows(supervised, outputs.num_supervised)
    ce, l1 = slot_losses(
        outputs.draft_logits, target, outputs.target_ids, rows, chunk_size=_PROBABILITY_CHUNK_TOKENS
    )
    assert ce is not None
    _check_finite(SlotFault.DRAFT, ce, supervised)
    weights = _build_loss_weight_mask(
        eval_mask=supervised,
        block_size=shape[2],
        device=ce.device,
        loss_decay_gamma=loss_decay_gamma,
        first_supervised_slot=first,
    )
    den = _sum(weights, ce.dtype)
    zero = torch.zeros_like(den)
    terms = {"ce_loss_num": _weighted(ce, weights), "ce_loss_den": den}
    if l1 is not None:
        _check_finite(SlotFault.TEACHER, l1, supervised)
    accept_rate = _compute_accept_rate_3d(None if l1 is None else l1.detach())
    l1_num, l1_den = _compute_local_l1_term(
        l1_dist_per_token=l1 if l1_loss_alpha > 0 else None, loss_weight_mask=weights
    )
    terms |= {"l1_loss_num": l1_num.to(ce.dtype), "l1_loss_den": l1_den.to(ce.dtype)}
    terms |= {"confidence_loss_num": zero, "confidence_loss_den": zero}
    if outputs.confidence_pred is not None:
        assert accept_rate is not None
        logits = torch.where(supervised, outputs.confidence_pred, 0).to(ce.dtype)
        _check_finite(SlotFault.CONFIDENCE, logits.detach(), supervised)
        bce = F.binary_cross_entropy_with_logits(logits, accept_rate, reduction="none")
        terms |= {"confidence_loss_num": _weighted(bce, weights), "confidence_loss_den": den.clone()}
    terms |= _collect_acceptance_diagnostics(
        outputs=outputs,
        accept_rate_3d=accept_rate,
        loss_weight_mask=weights,
        has_confidence=has_confidence,
    )
    return terms, has_confidence


def compute_dspark_loss(
    *,
    outputs: DSparkForwardOutput,
    loss_decay_gamma: float | None,
    ce_loss_alpha: float,
    l1_loss_alpha: float,
    confidence_head_alpha: float,
    process_group: dist.ProcessGroup | None = None,
    return_terms: bool = False,
) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
    """The DSpark loss of one micro-batch, divided by the denominators of all ranks.

    Unsupervised slots and dummy blocks are masked before any arithmetic: NaN logits or labels of -100 there change
    nothing. Softmaxes and losses are float32, float64 for float64 logits. Nothing waits for the device.

    The result carries **no** factor for gradient averaging: where the wrapper averages over ranks, the loop has to
    undo that once (``averaging_factor`` of the kit). A window of several micro-batches is exact only with the
    window's denominators: use :func:`tokennorm.draft.dspark_objective` with the kit there.

    Args:
        outputs: the drafter's forward; see :class:`tokennorm.draft.DSparkForwardOutput`.
        loss_decay_gamma: decay of the weights over a block's proposals; None or <= 0: none.
        ce_loss_alpha: weight of the cross-entropy.
        l1_loss_alpha: weight of the L1 distance to the teacher.
        confidence_head_alpha: weight of the confidence head.
        process_group: ranks over which denominators are summed, in one all-reduce; None: no communication.
        return_terms: also return the terms.

    Returns:
        ``backward_loss``, 0-d: ``sum_t alpha_t * num_t(this rank) / den_t(all ranks)``; a term whose global
        denominator is 0 is 0, and so is its gradient. With ``return_terms`` also a dict of detached tensors:
        ``loss``, ``ce_loss``, ``l1_loss``, ``confidence_loss`` (each ``num(this rank) / den(all ranks)``, so that
        their sum over ranks is the global mean) and this rank's sums ``accept_rate_per_pos_num``/``_den``
        ``[K - first_supervised_slot]``, ``tau_num``/``_den``, ``confidence_abs_error_num``,
        ``confidence_bias_num``, ``confidence_cumprod_bias_num``, ``confidence_diag_den``.

    Raises:
        LossUsageError: shapes or vocabularies that don't fit, no teacher where the L1 term or the confidence head
            needs one, a wrong ``outputs.num_supervised``, backward with ``create_graph=True``.
        LabelError: a label outside the vocabulary in a supervised slot.
        NonFiniteSlotError: NaN or infinity in a supervised slot. (The last two at once on the CPU, from
            :func:`tokennorm.draft.raise_pending_slot_errors` on an accelerator.)
    """
    if confidence_head_alpha == 0 and outputs.aligned_target_logits is None:
        # A confidence head that contributes nothing needs no target.
        outputs = dataclasses.replace(outputs, confidence_pred=None)
    terms, has_confidence = _collect_local_terms(
        outputs=outputs, loss_decay_gamma=loss_decay_gamma, l1_loss_alpha=float(l1_loss_alpha)
    )
    denominators = _all_reduce_loss_denominators(terms, process_group=process_group)
    ce_loss = _ratio(terms["ce_loss_num"], denominators["ce_loss_den"])
    l1_loss = _ratio(terms["l1_loss_num"], denominators["l1_loss_den"])
    confidence_loss = _ratio(terms["confidence_loss_num"], denominators["confidence_loss_den"])
    loss = float(ce_loss_alpha) * ce_loss
    if l1_loss_alpha > 0:
        loss = loss + float(l1_loss_alpha) * l1_loss
    if has_confidence:
        loss = loss + float(confidence_head_alpha) * confidence_loss
    if not return_terms:
        return loss
    reported = {"loss": loss, "ce_loss": ce_loss, "l1_loss": l1_loss, "confidence_loss": confidence_loss}
    reported |= {
        name.replace("accept_rate_pos", "accept_rate_per_pos"): value
        for name, value in terms.items()
        if not name.startswith(("ce_loss", "l1_loss", "confidence_loss"))
    }
    return loss, {name: value.detach() for name, value in reported.items()}


def _ratio(num: Tensor, den: Tensor) -> Tensor:
    """``num / den``; exactly 0, with gradient 0, where nothing was counted on any rank."""
    counted = den > 0
    return torch.where(counted, num / torch.where(counted, den, 1), 0)


def _sum(values: Tensor, dtype: torch.dtype) -> Tensor:
    return wide_sum(values).to(dtype)


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return _sum(values * weights, values.dtype)


def _check_finite(fault: SlotFault, values: Tensor, supervised: Tensor) -> None:
    report_slots(fault, (supervised & ~values.isfinite()).reshape(-1), None, values.shape)
