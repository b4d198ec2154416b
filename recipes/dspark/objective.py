"""The engine's objective for a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft import (
    Blocks,
    DraftForward,
    DSparkSums,
    HiddenStateCapture,
    SlotPlan,
    dspark_objective,
    make_blocks,
    sample_anchors,
)
from tokennorm.engine import Batch, ObjectiveOutput
from tokennorm.recipes.dspark.config import LossConfig

__all__ = ["DSparkObjective", "refused_record"]

_TARGET_INPUTS = ("input_ids", "position_ids", "attention_mask")
_STATES = ("features", "last_hidden")


class DSparkObjective:
    """The DSpark loss of one micro-batch, in sums.

    Its denominator is the sum of the slots' weights (they decay over a block), not a number of tokens.

    Args:
        loss: weights of the terms.
        capture: runs the target on batches without ``features``; None when all have them.
        teacher_head: ``[V, D]``, the target's.
        guarded: the kit has a loss guard. In training NaN and infinity are then its affair and no error here; it
            judges the whole objective, ``loss_sum`` over the sum of the slots' weights.
    """

    def __init__(
        self,
        loss: LossConfig,
        *,
        capture: HiddenStateCapture | None,
        teacher_head: Tensor,
        guarded: bool = False,
    ) -> None:
        self.loss, self.capture, self.teacher_head = loss, capture, teacher_head.detach()
        self.guarded = guarded

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        """Run the drafter on the blocks of ``batch``."""
        device = batch["input_ids"].device
        features, last_hidden = self._states(batch)
        # Nobody judges an evaluation, so there a number that is not finite stays an error.
        judging = self.guarded and torch.is_grad_enabled()
        output = model(
            blocks=batch["blocks"].to(device),
            features=features,
            position_ids=batch["position_ids"],
            documents=batch["documents"],
        )
        sums = dspark_objective(
            plan=batch["plan"].to(device),
            **output.objective_arguments(),
            teacher_hidden=last_hidden.to(self.teacher_head.dtype),
            teacher_head=self.teacher_head,
            teacher_log_total=batch.get("log_total"),
            loss_decay_gamma=self.loss.gamma,
            ce_loss_alpha=self.loss.ce,
            l1_loss_alpha=self.loss.l1,
            confidence_head_alpha=self.loss.confidence,
            chunk_size=self.loss.chunk_size,
            check_finite=not judging,
        )
        return ObjectiveOutput(
            loss_sum=sums.loss_sum,
            denominator=sums.denominator,
            metrics=sums.metrics,
            token_losses=sums.slot_losses,
            judged=_judged(sums, features, output) if judging else None,
        )

    def dummy(self, batch: Batch) -> Batch:
        """A row of two tokens with one block that is not kept, to run in place of ``batch``.

        It has the keys and types of ``batch`` and none of its values. Hidden states are zeros, also where the
        target would have made them: no token is asked what the target makes of it.
        """
        blocks, plan = batch["blocks"], batch["plan"]
        assert isinstance(blocks, Blocks)
        assert isinstance(plan, SlotPlan)
        ids = torch.zeros((1, 2), dtype=torch.int64)
        nothing = torch.zeros((1, 2), dtype=torch.bool)
        empty = make_blocks(
            ids,
            nothing,
            sample_anchors(nothing, num_anchors=None),
            block_size=blocks.block_size,
            first_supervised_slot=blocks.first_supervised_slot,
        )
        blank: dict[str, Any] = {
            "input_ids": ids,
            "shift_labels": torch.full_like(ids, -100),
            "position_ids": torch.arange(2)[None],
            "documents": torch.zeros_like(ids),
            "blocks": empty,
            "plan": empty.plan(plan.target_size if plan.vocabulary is None else plan.vocabulary),
        }
        if "attention_mask" in batch:
            blank["attention_mask"] = torch.ones((1, 2), dtype=batch["attention_mask"].dtype)
        if "features" in batch:
            blank |= {name: batch[name].new_zeros((1, 2, batch[name].shape[-1])) for name in _STATES}
        else:
            assert self.capture is not None
            width, layers = self.teacher_head.shape[1], len(self.capture.layer_ids)
            blank["features"] = self.teacher_head.new_zeros((1, 2, layers * width))
            blank["last_hidden"] = self.teacher_head.new_zeros((1, 2, width))
        if "log_total" in batch:
            total = batch["log_total"]
            blank["log_total"] = None if total is None else total.new_zeros((1, 2))
        return {**blank, "effective_tokens": 0, "total_tokens": 0}

    def _states(self, batch: Batch) -> tuple[Any, Any]:
        if "features" in batch:
            return batch["features"], batch["last_hidden"]
        assert self.capture is not None
        captured = self.capture(**{name: batch[name] for name in _TARGET_INPUTS if name in batch})
        return captured.features, captured.last_hidden


def refused_record(batch: Batch) -> dict[str, Any]:
    """What the file about a refused micro-batch has of it: no hidden states, but where they are not finite.

    ``features_non_finite`` and ``last_hidden_non_finite`` list the ``[row, position]`` of such states in a cache.
    """
    blocks = batch["blocks"]
    assert isinstance(blocks, Blocks)
    record = {name: value for name, value in batch.items() if name not in (*_STATES, "log_total", "plan")}
    record["blocks"] = {
        name: getattr(blocks, name) for name in ("anchors", "keep", "previous_ids", "target_ids", "eval_mask")
    }
    for name in _STATES:
        if name in batch:
            record[f"{name}_non_finite"] = (~batch[name].isfinite().all(dim=-1)).nonzero()
    return record


def _judged(sums: DSparkSums, features: Tensor, output: DraftForward) -> Tensor:
    """The loss sum for the guard: NaN when a term or anything that backward multiplies by is not finite.

    A state that no supervised slot sees, or a slot that does not count, leaves the loss as it is. But its gradient
    of zero is multiplied by it on the way to the weights, and zero times NaN is NaN.
    """
    judged = sums.loss_sum.detach()
    for term in sums.terms.values():
        # A finite number times zero changes nothing, any other becomes NaN.
        judged = judged + 0.0 * term.numerator.detach()
    finite = features.isfinite().all() & output.hidden.detach().isfinite().all()
    return judged.masked_fill(~finite, torch.nan)
