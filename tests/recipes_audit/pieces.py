"""Splits that tell most, and a mistaken objective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tokennorm.audit import AuditReport
from tokennorm.engine import Batch, CausalLMObjective, ObjectiveOutput
from tokennorm.recipes.audit.splits import Split, default_splits


def chosen(*names: tuple[int, str]) -> tuple[Split, ...]:
    found = {(split.ranks, split.name): split for split in default_splits()}
    return tuple(found[name] for name in names)


# One for each thing that can go wrong; the command runs all of them.
FEW = chosen(
    (1, "packed, two rows"),
    (2, "two rows, a single last one"),
    (2, "a short last window"),
    (2, "packed, an empty rank"),
)
# Without dummies, whose means would be of nothing.
FULL = chosen((1, "uneven micro-batches"), (1, "two rows, a single last one"), (2, "uneven micro-batches"))


def fork(audit: Any, splits: Sequence[Split]) -> AuditReport:
    """Forked ranks see what a test has patched."""
    report: AuditReport = audit(splits=splits, start_method="fork")
    return report


class MeanObjective(CausalLMObjective):
    """The mean of each micro-batch, and a window's mean of these."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        right = super().__call__(model, batch)
        return ObjectiveOutput(loss_sum=right.loss_sum / batch["effective_tokens"], denominator=1.0)
