"""``tokennorm audit``: what it prints, what it writes, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.recipes_audit.pieces import FULL, MeanObjective
from tokennorm import cli


def test_the_command_reports_and_says_so_in_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tokennorm.recipes.audit.splits.default_splits", lambda _ranks: FULL[:1])
    files = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    assert cli.main(["audit", "sft", *files]) == 0
    captured = capsys.readouterr()
    assert "EXACT: every supervised token counts once in all 1 layouts" in captured.out
    assert "1 layouts, 1 windows; numbers of ranks: 1; torch" in captured.out
    assert "running 1 layout on 1 rank" in captured.err
    assert json.loads((tmp_path / "a.json").read_text())["exact"] is True
    assert "<html" in (tmp_path / "a.html").read_text()
    monkeypatch.setattr("tokennorm.recipes.sft.train.CausalLMObjective", MeanObjective)
    assert cli.main(["audit", "sft"]) == 1
    assert "NOT EXACT" in capsys.readouterr().out


def test_the_command_alone_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit"]) == 2
    assert capsys.readouterr().out.startswith("usage: tokennorm audit WHAT")
    assert cli.main(["audit", "--help"]) == 0
    assert cli.main(["audit", "nothing"]) == 1
    assert "use one of: sft, dspark, trainer" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit", "sft", "--rank", "x"])
    assert ended.value.code == 2
