"""The page of a run: right numbers, whatever state the folder is in, and no way out of the page for a name."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tokennorm import cli
from tokennorm.errors import ConfigError, DataError
from tokennorm.report import page, read_run, write_report
from tokennorm.report.curves import POINTS, Curve, panels
from tokennorm.report.svg import format_tick


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {
        **{"step": number, "loss": loss, "grad_norm": 1.0, "lr": 1e-4, "effective_tokens": 10, "total_tokens": 40},
        **{"seconds": 0.5, **more},
    }


def folder(path: Path, lines: list[Any], config: Any = None, facts: Any = None) -> Path:
    path.mkdir(parents=True)
    text = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    (path / "metrics.jsonl").write_text("".join(text))
    (path / "config.json").write_text(json.dumps(config or {}))
    (path / "run.json").write_text(json.dumps(facts or {}))
    return path


def curves(path: Path, title: str) -> dict[str, Curve]:
    (panel,) = [one for one in panels([read_run(path)]) if one.title == title]
    return {curve.label: curve for curve in panel.curves}


def means(curve: Curve) -> list[tuple[float, float | None]]:
    return [(point.x, point.mean) for point in curve.points]


class Balanced(HTMLParser):
    """Fails on a tag that is closed in another order than it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_curve_has_the_numbers_of_its_lines(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "run",
        [
            {"step": 0, "eval_loss": 3.0, "eval_effective_tokens": 9, "eval_loss/code": 3.5},
            step(1, 2.5, **{"loss/code": 2.0, "loss/prose": 3.0}, mfu=0.4, memory_bytes=2**30, data_wait=0.1),
            step(2, 2.0, **{"loss/code": 1.5, "loss/prose": None}, refused=[{"step": 2}, {"step": 2}]),
            {**step(2), "loss": None, "skipped": "empty window"},
            step(3, 1.5),
            {"step": 3, "eval_loss": 2.25, "eval_effective_tokens": 9},
        ],
        facts={"total_steps": 5},
    )
    loss = curves(path, "Loss")
    assert means(loss["training"]) == [(1, 2.5), (2, 2.0), (3, 1.5)]
    assert means(loss["held-out"]) == [(0, 3.0), (3, 2.25)]
    assert means(curves(path, "Held-out loss over supervised tokens")["held-out"]) == [(0, 3.0), (30, 2.25)]
    assert means(curves(path, "Throughput")["all tokens"])[0] == (1, 80.0)
    assert means(curves(path, "Memory")["memory"])[0] == (1, 1.0)
    assert means(curves(path, "Waiting for data")["data wait"])[0] == (1, pytest.approx(0.2))
    by_source = curves(path, "Loss by source")
    assert means(by_source["prose"]) == [(1, 3.0), (2, None), (3, None)]
    assert by_source["prose"].missing == (2,)
    assert means(by_source["code, held-out"]) == [(0, 3.5), (3, None)]
    kept_out = curves(path, "Kept out of the training")
    assert means(kept_out["refused micro-batches"])[-1] == (3, 2)
    assert means(kept_out["windows skipped"])[-1] == (3, 1)
    text = page([read_run(path)])
    for shown in ("3 of 5", "3.0000 → 2.2500", "2.2500 at step 3", "1 (empty window)", "1.00 GiB", ">80<"):
        assert shown in text


def test_many_lines_are_merged_as_ratios_of_sums(tmp_path: Path) -> None:
    lines = [step(n, 1.0 if n % 2 else 4.0, seconds=3.0 if n % 2 else 1.0) for n in range(1, 2 * POINTS + 1)]
    for line in lines:
        line["effective_tokens"] = 30 if line["step"] % 2 else 10
    path = folder(tmp_path / "run", lines)
    loss = curves(path, "Loss")["training"]
    assert len(loss.points) == POINTS
    # 30 tokens at 1.0 and 10 at 4.0; a mean of means would be 2.5.
    assert {(p.mean, p.low, p.high) for p in loss.points} == {(1.75, 1.0, 4.0)}
    assert {p.mean for p in curves(path, "Throughput")["all tokens"].points} == {20.0}


def test_a_cut_line_null_and_lines_done_again_after_a_resume(tmp_path: Path) -> None:
    path = folder(
        tmp_path / "run",
        [
            {"step": 0, "eval_loss": None},
            *(step(n, 5.0) for n in (1, 2, 3, 4)),
            {"step": 4, "eval_loss": 9.0},
            '{"step": 5, "lo\n',
            "[1]\n",
            step(3, 1.0),
            step(4, None),
            '{"step": 5, "loss": 1.0, "gra\xc3',
        ],
    )
    run = read_run(path)
    assert [(line["step"], line["loss"]) for line in run.steps] == [(1, 5.0), (2, 5.0), (3, 1.0), (4, None)]
    assert [line["step"] for line in run.evals] == [0]
    assert run.unreadable == 3
    text = page([run])
    assert "1 not finite" in text
    assert "nan" not in text.lower().replace("finance", "")


def test_one_line_and_only_an_evaluation_are_enough(tmp_path: Path) -> None:
    for name, lines in (("step", [step(1)]), ("eval", [{"step": 0, "eval_loss": 2.0}]), ("null", [step(1, None)])):
        parser = Balanced()
        parser.feed(page([read_run(folder(tmp_path / name, lines))]))
        assert not parser.open
        assert "svg" in parser.seen


def test_runs_are_compared_and_what_differs_is_marked(tmp_path: Path) -> None:
    one = folder(tmp_path / "a" / "train", [step(1)], config={"optim": {"lr": 0.1, "kind": "adamw"}})
    two = folder(tmp_path / "b" / "train", [step(1, 1.0)], config={"optim": {"lr": 0.2, "kind": "adamw"}})
    path = write_report([one, two])
    assert path == one / "comparison.html"
    text = path.read_text()
    assert "<title>a/train and b/train: tokennorm report</title>" in text
    (row,) = re.findall(r'<tr class="differs">(.*?)</tr>', text)
    assert row == '<th scope="row">optim.lr</th><td>0.1</td><td>0.2</td>'
    assert "optim.kind" in text
    assert "a/train: training" in text
    with pytest.raises(ConfigError, match="given twice"):
        write_report([one, tmp_path / "a"])


def test_the_page_needs_nothing_and_names_are_no_markup(tmp_path: Path) -> None:
    evil = '<script src="https://x.invalid/y.js">'
    path = folder(
        tmp_path / "run",
        [step(1, **{f"loss/{evil}": 1.0, evil: 2.0}), step(2, **{f"loss/{evil}": 1.0})],
        config={evil: evil},
        facts={
            "command": ["tokennorm", evil],
            "git": {"commit": "abc", "modified": True},
            "versions": {"torch": "9"},
        },
    )
    parser = Balanced()
    text = page([read_run(path)])
    parser.feed(text)
    assert not parser.open
    assert not parser.seen & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in text
    assert "@import" not in text
    assert "abc, with changes that are not committed" in text
    assert "prefers-color-scheme: dark" in text


def test_the_command_writes_the_page_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "run", [step(1)])
    assert cli.main(["report", str(path)]) == 0
    assert capsys.readouterr().out == f"{path / 'report.html'}\n"
    assert cli.main(["report", str(path), "--output", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text() == (path / "report.html").read_text()
    (tmp_path / "empty").mkdir()
    folder(tmp_path / "started", ["\n"])
    for given, said in (
        (["nowhere"], "there is no such folder"),
        ([str(tmp_path / "empty")], "no metrics.jsonl"),
        ([str(tmp_path / "started")], "holds no line that can be read"),
        ([str(path), "--fast"], "there is no option --fast"),
        ([str(path), "--output", str(tmp_path / "no" / "x.html")], "can't be written"),
    ):
        assert cli.main(["report", *given]) == 1
        assert said in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(DataError, match="a report is drawn from"):
        read_run(tmp_path / "started")


@pytest.mark.parametrize(
    "odd", [{"loss": 1e308}, {"loss": -1e308}, {"loss": 10**400}, {"refused": 3}, {"refused": "all"}]
)
def test_a_line_that_no_run_writes_does_not_keep_the_page_from_being_drawn(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    path = folder(tmp_path / "run", [step(1), step(2, **odd) if "refused" in odd else step(2) | odd, step(3, 4.0)])
    assert "Micro-batches refused" in page([read_run(path)])
    assert [loss for _, loss in means(curves(path, "Loss")["training"])][::2] == [2.0, 4.0]


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (1500, "1.5k"), (2e7, "20M"), (3e-5, "3e-05"), (0, "0"), (-2500, "-2.5k")]
)
def test_ticks_are_short(value: float, text: str) -> None:
    assert format_tick(value) == text
