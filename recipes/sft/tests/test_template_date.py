"""A run whose template prints the date keeps that of its first day, whenever it goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.sft.tests.test_smoke import Killed, exported
from recipes.sft.tests.tiny import TEMPLATE, tiny_config
from tokennorm.engine import Engine
from tokennorm.errors import CheckpointError
from tokennorm.recipes.sft import SftResult, run, template_date
from tokennorm.recipes.sft.config import RunConfig, SftConfig, TrainConfig


@pytest.fixture(scope="module")
def dated(tiny_folder: Path) -> Path:
    folder = tiny_folder / "dated"
    shutil.copytree(tiny_folder / "model", folder / "model")
    shutil.copy(tiny_folder / "chats.jsonl", folder)
    dates = "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}"
    (folder / "model" / "chat_template.jinja").write_text(dates + TEMPLATE)
    return folder


def weights(result: SftResult) -> list[Any]:
    return [weight.tolist() for _, weight in sorted(exported(result.folder).items())]


def on(day: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_date, "time", SimpleNamespace(strftime=lambda _: day))


def config(folder: Path, name: str, *, stream: bool = False, date: str | None = None, **go_on: Any) -> SftConfig:
    settings = tiny_config(folder, name, train=TrainConfig(epochs=1 if stream else 4, max_steps=6))
    data = replace(settings.data, template_date=date)
    if stream:
        data = replace(data, stream=True, eval_fraction=0.0, pack_buffer=6)
    return replace(settings, data=data, run=RunConfig(dir=str(folder / name), **go_on))


def killed(settings: SftConfig, step: int) -> None:
    plain = Engine.train_step

    def dies(self: Engine, window: Any) -> Any:
        if self.step == step:
            raise Killed
        return plain(self, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", dies)
        with pytest.raises(Killed):
            run(settings)


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_goes_on_tomorrow_with_the_date_of_its_first_day(
    dated: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "stream" if stream else "sets"
    on("2026-03-05", monkeypatch)
    whole = run(config(dated, f"{kind}-whole", stream=stream))
    killed(config(dated, f"{kind}-killed", stream=stream), step=4)
    on("2026-03-06", monkeypatch)
    checkpoint = dated / f"{kind}-killed" / "checkpoints" / "step-00000004"
    elsewhere = run(config(dated, f"{kind}-elsewhere", stream=stream, resume_from=str(checkpoint)))
    again = run(config(dated, f"{kind}-killed", stream=stream, resume=True))
    assert weights(again) == weights(whole)
    assert weights(elsewhere) == weights(whole)
    said = capsys.readouterr().out
    assert said.count("the chat template prints the date: 2026-03-05 in this run") == 4
    facts = json.loads((again.folder / "run.json").read_text())
    assert facts["data"]["template_date"] == "2026-03-05"
    assert "strftime_now" in (again.folder / "export" / "chat_template.jinja").read_text(), "as it was"
    with pytest.raises(CheckpointError, match=r"data\.template_date: '2026-03-05' there, '2026-03-06' here"):
        run(config(dated, f"{kind}-killed", stream=stream, resume=True, date="2026-03-06"))
    tomorrow = run(config(dated, f"{kind}-tomorrow", stream=stream))
    assert weights(tomorrow) != weights(whole)


def test_a_date_that_no_template_prints_is_said_and_changes_nothing(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, named = (run(config(tiny_folder, f"date-{date}", date=date)) for date in (None, "2020-02-02"))
    assert weights(plain) == weights(named)
    assert capsys.readouterr().out.count("the chat template prints no date") == 1
    assert "template_date" not in json.loads((named.folder / "run.json").read_text())["data"]
