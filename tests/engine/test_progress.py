"""The terminal line, character by character, and the run folder's files."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tokennorm.engine import ProgressPrinter, RunFolder, Runtime, config_to_dict, format_step_line
from tokennorm.engine.progress import format_count, format_duration
from tokennorm.errors import ConfigError


def test_the_line_is_the_house_style() -> None:
    line = format_step_line(
        step=120,
        total_steps=500,
        loss=2.10341,
        grad_norm=0.8312,
        lr=1.8e-5,
        effective_tokens=61204,
        total_tokens=98304,
        tokens_per_second=41_210,
        eta_seconds=352,
    )
    assert line == "step 120/500  loss 2.1034  grad 0.83  lr 1.8e-05  tok 61,204/98,304  41.2k tok/s  eta 6m"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (3599, "1h00m"),
        (3720, "1h02m"),
        (86399, "1d00h"),
        (273600, "3d04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(7.2, "7"), (999.4, "999"), (999.6, "1.0k"), (41_210, "41.2k"), (999_960, "1.0M"), (2.5e9, "2.5G")],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


def test_the_line_shows_mfu_when_it_is_known() -> None:
    numbers = {"step": 1, "total_steps": 2, "loss": 1.0, "lr": 1e-5, "effective_tokens": 1, "total_tokens": 1}
    line = format_step_line(grad_norm=1.0, tokens_per_second=50, mfu=0.413, eta_seconds=3, **numbers)
    assert line.endswith("tok 1/1  50 tok/s  mfu 41%  eta 3s")


def test_small_gradients_keep_their_digits() -> None:
    numbers = {"step": 1, "total_steps": 1, "loss": 1.0, "lr": 1e-5, "effective_tokens": 1, "total_tokens": 1}
    assert "grad 4.2e-03" in format_step_line(grad_norm=0.0042, **numbers)
    assert "grad 0.00" in format_step_line(grad_norm=0.0, **numbers)
    assert "grad 12.35" in format_step_line(grad_norm=12.349, **numbers)


def test_rate_and_remaining_time_come_from_the_recent_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 102.0, 104.0])
    monkeypatch.setattr("tokennorm.engine.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    printer = ProgressPrinter(10, stream=stream)
    numbers = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-5, "effective_tokens": 10, "total_tokens": 100}
    assert printer.tick(100) == 2.0
    printer.step(step=1, **numbers)
    printer.pause()  # an evaluation of 100 s must not slow the reported rate
    printer.tick(300)
    printer.step(step=2, **numbers)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("tok 10/100  50 tok/s  eta 18s")
    assert second.endswith("tok 10/100  100 tok/s  eta 16s")


def test_other_ranks_print_nothing() -> None:
    stream = io.StringIO()
    ProgressPrinter(10, enabled=False, stream=stream).say("hello")
    assert stream.getvalue() == ""


@dataclass(frozen=True, kw_only=True)
class Inner:
    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Outer:
    path: Path = Path("a/b")
    optim: Inner = field(default_factory=Inner)


def test_run_folder_holds_command_versions_config_and_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.describe(Outer(), facts={"data": "x"}, argv=["tokennorm", "train", "sft"])
    folder.log({"step": 1, "loss": 2.0})
    folder.log({"step": 2, "loss": float("nan")})
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["command"] == ["tokennorm", "train", "sft"]
    assert run["versions"]["torch"]
    assert run["ranks"] == 1
    assert run["data"] == "x"
    assert "git" in run
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config == {"path": "a/b", "optim": {"lr": 1e-5, "betas": [0.9, 0.95]}} == config_to_dict(Outer())
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None},
    ]


def test_a_used_folder_is_not_written_over(tmp_path: Path) -> None:
    RunFolder(tmp_path).log({"step": 1})
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder(tmp_path)
    RunFolder(tmp_path, resume=True)


def test_resuming_forgets_the_steps_that_come_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.log({"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    folder.forget_after(3)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]


def test_only_the_first_rank_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.runtime = Runtime(rank=1)
    folder.describe(Outer())
    folder.log({"step": 1})
    assert list(tmp_path.iterdir()) == []
