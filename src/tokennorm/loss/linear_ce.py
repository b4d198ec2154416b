"""Per-token cross-entropy from hidden states and a head, without ever holding the full logits.

Supervised rows are gathered; for one chunk of them at a time the logits are computed, turned into losses and, in
the same place, into their gradient, from which the gradients of hidden states and head follow while the chunk is
still there. Three matrix products in all: none is done twice.

That needs the upstream gradient to be the same for all rows, which is what ``.sum()`` gives: autograd broadcasts
one scalar with stride 0, and the stride says so without looking at a value. Any other upstream is right too: the
chunks are then computed again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tokennorm.errors import LossUsageError
from tokennorm.loss import label_checks
from tokennorm.loss.chunks import ChunkPlan, Needs, default_chunk_size, run_chunks
from tokennorm.loss.products import Products
from tokennorm.loss.row_math import STATS, LogitTransform, RowLoss

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_supervised: int | None = None,
    transform: LogitTransform | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    stats: Sequence[str] = (),
    chunk_size: int | None = None,
    reduction: Literal["none", "sum"] = "none",
) -> Any:
    """Cross-entropy of every supervised row of ``transform(hidden @ weight.T + bias)``.

    Rows whose label is ``ignore_index`` are never projected: whatever they hold (NaN too) leaves the other rows,
    the head's gradient and the loss untouched, and their own loss and gradient are exactly 0.

    Softmax, loss and accumulation are float32 for float16, bfloat16 and float32 inputs, float64 for float64.
    Under autocast the products run in the autocast dtype and gradients accumulate in float32.

    Args:
        hidden: ``[N, D]`` hidden states.
        weight: ``[V, D]`` head. One that needs no gradient costs none.
        labels: ``[N]`` int64, each in ``[0, V)`` or ``ignore_index``.
        bias: ``[V]`` or None.
        ignore_index: the label of an unsupervised row.
        num_supervised: number of supervised rows, when the host knows it. Without it an accelerator has to
            synchronise once to learn how many rows there are.
        transform: what the model does to its logits before the softmax.
        label_smoothing: in [0, 1]; the target is ``(1 - s) * onehot + s / V``, as in
            ``torch.nn.functional.cross_entropy``.
        z_loss: coefficient c of ``c * logsumexp^2`` (Chowdhery et al. 2022, PaLM, section 5), added to the loss.
        token_weights: ``[N]`` factor of each row's loss, without gradient. Rows of weight 0 count as unsupervised
            unless ``num_supervised`` is given.
        stats: any of ``"log_prob"`` (of the label), ``"entropy"`` (of the softmax, in nats), ``"is_top1"``
            (whether the label has the largest logit), from the same logits; unweighted.
        chunk_size: rows of logits held at once; by default :func:`default_chunk_size`.
        reduction: ``"none"`` or ``"sum"``. There is no mean: see ``docs/exactness.md``.

    Returns:
        The loss ``[N]`` (0 where unsupervised) or its 0-d sum, in nats. With ``z_loss`` the pair ``(loss, z)``,
        where ``loss`` holds the z part already and ``z`` is that part alone, detached. With ``stats`` a dict
        ``name -> [N]`` comes last: ``(loss, stats)`` or ``(loss, z, stats)``; detached, 0 or False where
        unsupervised.

    Raises:
        LossUsageError: shapes, dtypes or options that don't fit, a wrong ``num_supervised``, and a backward with
            ``create_graph=True``.
        LabelError: a label outside the vocabulary, with the first bad row: at once on the CPU, at the kit's next
            synchronisation on an accelerator.
    """
    _validate(hidden, weight, labels, bias, token_weights, label_smoothing, z_loss, stats, reduction, chunk_size)
    vocabulary = weight.shape[0]
    supervised = labels != ignore_index
    label_checks.check_labels(labels, supervised, vocabulary, ignore_index, num_supervised)
    rows, keep = _supervised_rows(supervised, token_weights, num_supervised)
    num_rows = labels.shape[0] if rows is None else rows.shape[0]

    row_labels = labels if rows is None else labels.index_select(0, rows)
    row_weights = token_weights
    if row_weights is not None:
        row_weights = (row_weights if rows is None else row_weights.index_select(0, rows)).detach()
    if keep is not None:
        row_weights = keep.to(torch.float32) if row_weights is None else torch.where(keep, row_weights, 0)
    plan = ChunkPlan(
        row_loss=RowLoss(
            transform=transform or LogitTransform(),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            stats=tuple(stats),
        ),
        products=Products.of(hidden, weight),
        rows=rows,
        # A label outside the vocabulary has been reported; it must not crash the device before that is read.
        labels=row_labels.clamp(0, vocabulary - 1),
        weights=row_weights,
        chunk_size=chunk_size or default_chunk_size(num_rows, vocabulary, hidden.device),
        sum_rows=reduction == "sum",
        # Inside an autograd function gradients are always off, so this is read here.
        gradients=torch.is_grad_enabled(),
    )
    loss, *extra = _LinearCrossEntropy.apply(hidden, weight, bias, plan)  # pyright: ignore[reportGeneralTypeIssues]
    outputs: list[Any] = [loss]
    if z_loss:
        outputs.append(extra.pop(0))
    if stats:
        outputs.append(dict(zip(plan.row_loss.stats, extra, strict=True)))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _supervised_rows(
    supervised: Tensor, token_weights: Tensor | None, num_supervised: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Indices of the supervised rows (None: all of them), and which of the indices are real (None: all)."""
    if num_supervised is not None:
        if num_supervised == supervised.shape[0]:
            return None, None
        rows = torch.nonzero_static(supervised, size=num_supervised, fill_value=-1).squeeze(1)
        # On an accelerator a count that is too large is reported later; until then its surplus counts nothing.
        return rows.clamp(min=0), (rows >= 0 if label_checks.defers(supervised.device) else None)
    if token_weights is not None:
        supervised = supervised & (token_weights != 0)
    rows = torch.nonzero(supervised).squeeze(1)
    return (None if rows.shape[0] == supervised.shape[0] else rows), None


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses and, with gradients on, the gradients for an upstream of 1, in one pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: ChunkPlan
    ) -> tuple[Tensor, ...]:
        needs = Needs(*(plan.gradients and needed for needed in ctx.needs_input_grad[:3]))
        with torch.autocast(hidden.device.type, enabled=False):
            done = run_chunks(plan, hidden, weight, bias, needs, upstream=None)
        ctx.plan, ctx.needs, ctx.gradients = plan, needs, done.gradients
        ctx.save_for_backward(hidden, weight, bias)
        ctx.set_materialize_grads(False)
        extra = [
            _spread(value, plan.rows, hidden.shape[0])
            for value in ([done.z] if done.z is not None else []) + done.stats
        ]
        ctx.mark_non_differentiable(*extra)
        if plan.sum_rows:
            loss = done.loss.sum(dtype=torch.float64 if _has_float64(hidden.device) else None).to(done.loss.dtype)
        else:
            loss = _spread(done.loss, plan.rows, hidden.shape[0])
        return loss, *extra

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = upstreams[0]
        if upstream is None:
            return None, None, None, None
        if torch.is_grad_enabled():
            raise LossUsageError(
                "linear_cross_entropy was differentiated with create_graph=True",
                why="its gradient is computed in the forward pass, without a graph of its own.",
                fix="for second derivatives compute the logits and use torch.nn.functional.cross_entropy.",
            )
        hidden, weight, bias = ctx.saved_tensors
        plan: ChunkPlan = ctx.plan
        if plan.sum_rows or upstream.numel() <= 1 or upstream.stride(0) == 0:
            scale = upstream.reshape(-1)[:1].squeeze() if upstream.numel() else upstream.new_ones(())
            gradients, consumed = ctx.gradients, not _graph_is_kept()
            if consumed:
                ctx.gradients = None
            if gradients is None:
                raise LossUsageError(
                    "the graph of linear_cross_entropy was already used", fix="pass retain_graph=True."
                )
        else:
            scale, consumed = None, True
            rows = upstream if plan.rows is None else upstream.index_select(0, plan.rows)
            with torch.autocast(hidden.device.type, enabled=False):
                gradients = run_chunks(plan, hidden, weight, bias, ctx.needs, upstream=rows).gradients
        like = (hidden, weight, bias)
        scaled = [
            None if value is None else _scale(value, scale, like=tensor, in_place=consumed)
            for value, tensor in zip(gradients, like, strict=True)
        ]
        if scaled[0] is not None:
            scaled[0] = _spread(scaled[0], plan.rows, hidden.shape[0])
        return *scaled, None


def _scale(value: Tensor, scale: Tensor | None, *, like: Tensor, in_place: bool) -> Tensor:
    """``value * scale`` in the parameter's dtype, rounded once.

    A buffer that nobody can ask for again is scaled in place: a copy would double the memory of the head's
    gradient, the largest tensor there is.
    """
    if scale is not None:
        value = value.mul_(scale) if in_place else value * scale
    return value.to(like.dtype)


def _spread(values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """Put the supervised rows back among the others, which are 0 (False)."""
    if rows is None:
        return values
    return values.new_zeros((num_rows, *values.shape[1:])).index_copy_(0, rows, values)


def _graph_is_kept() -> bool:
    """Whether this backward runs with retain_graph=True; assume so where torch can't tell."""
    autograd = getattr(torch._C, "_autograd", None)
    ask = getattr(autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def _has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def _validate(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    token_weights: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    stats: Sequence[str],
    reduction: str,
    chunk_size: int | None,
) -> None:
    """Refuse what can be seen from shapes, dtypes and numbers."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise LossUsageError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, D] and [V, D]",
            fix="flatten batch and sequence first: hidden.flatten(0, 1).",
        )
    if labels.shape != hidden.shape[:1] or labels.dtype != torch.int64:
        raise LossUsageError(
            f"labels must be int64 of shape [{hidden.shape[0]}], not {labels.dtype} of shape {list(labels.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LossUsageError(f"bias must have shape [{weight.shape[0]}], not {list(bias.shape)}")
    if token_weights is not None and (token_weights.shape != labels.shape or token_weights.requires_grad):
        raise LossUsageError(
            f"token_weights must have shape {list(labels.shape)} and no gradient, not shape "
            f"{list(token_weights.shape)}, requires_grad={token_weights.requires_grad}"
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        raise LossUsageError(f"hidden and weight must be floating-point, not {hidden.dtype} and {weight.dtype}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise LossUsageError(f"label_smoothing must be in [0, 1], not {label_smoothing}")
    if not z_loss >= 0.0:
        raise LossUsageError(f"z_loss must be >= 0, not {z_loss}")
    if unknown := [name for name in stats if name not in STATS]:
        raise LossUsageError(f"unknown stats {unknown}", fix=f"choose among {list(STATS)}.")
    if reduction not in ("none", "sum"):
        raise LossUsageError(
            f"reduction must be 'none' or 'sum', not {reduction!r}",
            why="a mean over this call's tokens is not the mean over the window's.",
            fix="sum, and let the kit divide once by the window's count.",
        )
    if chunk_size is not None and chunk_size < 1:
        raise LossUsageError(f"chunk_size must be at least 1, not {chunk_size}")
