"""The engine's objective for a drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tokennorm.draft import HiddenStateCapture, dspark_objective
from tokennorm.engine import Batch, ObjectiveOutput
from tokennorm.recipes.dspark.config import LossConfig

__all__ = ["DSparkObjective"]

_TARGET_INPUTS = ("input_ids", "position_ids", "attention_mask")


class DSparkObjective:
    """The DSpark loss of one micro-batch, in sums.

    Its denominator is the sum of the slots' weights (they decay over a block), not a number of tokens.

    Args:
        loss: weights of the terms.
        capture: runs the target on batches without ``features``; None when all have them.
        teacher_head: ``[V, D]``, the target's.
    """

    def __init__(
        self, loss: LossConfig, *, capture: HiddenStateCapture | None, teacher_head: torch.Tensor
    ) -> None:
        self.loss, self.capture, self.teacher_head = loss, capture, teacher_head.detach()

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        """Run the drafter on the blocks of ``batch``."""
        device = batch["input_ids"].device
        features, last_hidden = self._states(batch)
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
        )
        return ObjectiveOutput(loss_sum=sums.loss_sum, denominator=sums.denominator, metrics=sums.metrics)

    def _states(self, batch: Batch) -> tuple[Any, Any]:
        if "features" in batch:
            return batch["features"], batch["last_hidden"]
        assert self.capture is not None
        captured = self.capture(**{name: batch[name] for name in _TARGET_INPUTS if name in batch})
        return captured.features, captured.last_hidden
