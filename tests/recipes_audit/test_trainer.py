"""Trainers from the outside: what the stock one does is named, and how far off its evaluation loss is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import Trainer

from tokennorm import cli
from tokennorm.audit import default_layouts
from tokennorm.errors import ConfigError
from tokennorm.recipes.audit.trainer import audit_trainer, find_trainer
from tokennorm.recipes.audit.trainer_models import tiny_model
from tokennorm.recipes.audit.trainer_report import TrainerReport

# Two windows, of which the second is short; and uneven ranks.
FEW = tuple(
    layout
    for layout in default_layouts(ranks=(1, 2))
    if (layout.ranks, layout.name) in ((1, "a short last window"), (2, "uneven ranks"))
)


def audit(model: str, **options: Any) -> TrainerReport:
    return audit_trainer(
        "transformers:Trainer", model=model, layouts=FEW, start_method="fork", timeout_s=120, **options
    )


def test_the_trainer_with_a_router_loss_is_named_and_its_losses_are_wrong() -> None:
    report = audit("mixtral")
    assert not report.exact
    assert report.audit.diagnosis is not None
    assert report.audit.diagnosis.name == "auxiliary_loss_multiplied"
    assert max(report.logged_errors()) > 0.1
    assert all(one.error > 0.1 for one in report.evaluations)
    assert [one.ranks for one in report.evaluations] == [1, 2]
    text = str(report)
    assert text.startswith("transformers:Trainer, mixtral\n")
    assert "logged loss: wrong in 2 of 3 windows" in text or "logged loss: wrong in 3 of 3 windows" in text
    assert "evaluation loss: wrong in 2 of 2 layouts" in text
    assert json.loads(report.to_json())["evaluations"][0]["layout"] == "a short last window"


def test_with_the_integration_all_is_right() -> None:
    report = audit("llama", integration=True)
    assert report.exact, str(report)
    assert max(report.logged_errors()) < 1e-6
    assert max(one.error for one in report.evaluations) < 1e-6
    assert "evaluation loss: right in all 2 layouts" in str(report)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("transformers", "is no import path"),
        ("no_such_module:Trainer", "can't import"),
        ("transformers:NoSuchTrainer", "can't import"),
        ("transformers:TrainingArguments", "is no subclass of transformers.Trainer"),
        ("trl:RewardTrainer", "is TRL's RewardTrainer"),
    ],
)
def test_what_is_no_trainer_is_refused(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_trainer(target)


def test_targets_and_models_by_name() -> None:
    assert find_trainer("transformers:Trainer") is Trainer
    with pytest.raises(ConfigError, match="no architecture 'nothing'"):
        tiny_model("nothing")
    for name in ("llama", "qwen3", "qwen3_moe"):
        assert sum(p.numel() for p in tiny_model(name).parameters()) < 20_000


def test_arguments_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, Any] = {}

    def noting(target: str, **options: Any) -> Any:
        seen.update(options, target=target)
        raise ConfigError("seen")

    monkeypatch.setattr("tokennorm.recipes.audit.trainer.audit_trainer", noting)
    argv = ["audit", "trainer", "trl:SFTTrainer", "--model", "mixtral", "--integration", "--no-packed"]
    assert cli.main([*argv, "--ranks", "1", "--kwargs", "label_smoothing_factor=0.1", "optim=sgd"]) == 1
    assert "error: seen" in capsys.readouterr().err
    assert seen["target"] == "trl:SFTTrainer"
    assert (seen["model"], seen["integration"], seen["packed"], seen["ranks"]) == ("mixtral", True, False, [1])
    assert seen["arguments"] == {"label_smoothing_factor": 0.1, "optim": "sgd"}
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, "--kwargs", "nonsense"])
    assert ended.value.code == 2
