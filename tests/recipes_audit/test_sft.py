"""The fine-tuning recipe is exact, and a mistake planted into it is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recipes_audit.pieces import FEW, FULL, MeanObjective, fork
from tokennorm.data import Sample, WindowLoader
from tokennorm.data.plan import Position
from tokennorm.errors import AuditError, ConfigError
from tokennorm.recipes.audit import splits as split_module
from tokennorm.recipes.audit.chats import CHATS, LONG, UNSUPERVISED, samples
from tokennorm.recipes.audit.sft import audit_sft
from tokennorm.recipes.audit.splits import Split, default_splits


def test_default_splits_hold_what_the_audit_promises() -> None:
    splits = default_splits()
    assert len(splits) == 34
    assert len({(split.ranks, split.name) for split in splits}) == 34
    for ranks in (1, 2, 4):
        own = [split for split in splits if split.ranks == ranks]
        assert len(own) >= 8
        assert {split.packed for split in own} == {True, False}
        assert {split.shuffled for split in own} == {True, False}
        assert any(LONG in split.chats for split in own)
        assert any(len(split.chats) % split.per_window and len(split.chats) > split.per_window for split in own)
        assert ranks == 1 or any(len(split.chats) < ranks and not split.packed for split in own)
    assert default_splits((2,)) == tuple(split for split in splits if split.ranks == 2)
    with pytest.raises(ConfigError, match="no splits for \\[3\\] ranks"):
        default_splits((3,))


def test_samples_are_uneven() -> None:
    counts = [sample.supervised_tokens for sample in samples()]
    assert len(counts) == len(CHATS) + 1
    assert counts[UNSUPERVISED] == 0
    assert max(counts) == counts[LONG] == 41
    assert sorted(counts)[1] == 2


def test_sft_is_exact() -> None:
    said: list[str] = []
    report = audit_sft(splits=FEW, say=said.append, start_method="fork")
    assert report.exact, str(report)
    assert [layout.name for layout in report.layouts] == [split.name for split in FEW]
    assert report.layouts[2].micro_batches == "2+1"
    assert max(layout.error for layout in report.layouts) < 2e-6
    # Loss and token counts in the log are right too, clipping was seen, and nothing was left out.
    assert report.notes == ()
    assert said[1:3] == ["running 1 layout on 1 rank", "running 3 layouts on 2 ranks"]


def test_a_mean_in_the_objective_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokennorm.recipes.sft.train.CausalLMObjective", MeanObjective)
    report = fork(audit_sft, FULL)
    assert report.diagnosis is not None
    assert report.diagnosis.name == "mean_of_rank_and_micro_batch_means"
    assert report.diagnosis.residual < 1e-5
    assert report.token_weights is not None
    assert report.token_weights.min < 0.6 < 2 < report.token_weights.max


def test_a_supervised_prompt_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's samples don't come from the recipe's data path."""

    def everything(self: Sample) -> Tensor:
        return torch.cat([self.input_ids[1:], torch.tensor([-100])])

    monkeypatch.setattr(Sample, "shift_labels", everything)
    report = fork(audit_sft, FULL)
    assert report.diagnosis is not None
    assert report.diagnosis.name == "prompt_supervised"


def test_another_plan_than_the_audits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = WindowLoader.window_samples

    def backwards(self: WindowLoader, position: Position) -> list[list[int]]:
        return plan(self, position)[::-1]

    check = split_module.check_plan

    def patched(split: Split, expected: Any, loader: WindowLoader) -> None:
        monkeypatch.setattr(WindowLoader, "window_samples", backwards)
        check(split, expected, loader)

    monkeypatch.setattr("tokennorm.recipes.audit.recipe.check_plan", patched)
    with pytest.raises(AuditError, match="the recipe plans 'uneven micro-batches' as"):
        fork(audit_sft, FULL[:1])


def test_a_plan_that_loses_a_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowLoader, "window_samples", lambda *_: [[0]])
    with pytest.raises(AuditError, match="has samples \\[0\\] of 3"):
        fork(audit_sft, FULL[:1])
