"""The drafter's recipe is exact, and a mistake planted into it is named."""

from __future__ import annotations

import pytest
from torch import nn

from tests.recipes_audit.pieces import FEW, FULL, fork
from tokennorm.engine import Batch, ObjectiveOutput
from tokennorm.recipes.audit.dspark import audit_dspark
from tokennorm.recipes.dspark.objective import DSparkObjective


def test_dspark_is_exact() -> None:
    report = fork(audit_dspark, FEW)
    assert report.exact, str(report)
    assert max(layout.error for layout in report.layouts) < 2e-6
    assert report.notes == ()


class MeanOfSlots(DSparkObjective):
    """The seed's loss of a micro-batch, averaged over the window."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        right = super().__call__(model, batch)
        return ObjectiveOutput(loss_sum=right.loss_sum / right.denominator, denominator=1.0)


def test_a_mean_over_slots_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokennorm.recipes.dspark.train.DSparkObjective", MeanOfSlots)
    report = fork(audit_dspark, FULL)
    assert report.diagnosis is not None
    assert report.diagnosis.name == "mean_of_rank_and_micro_batch_means"
