"""A new recipe passes its own tests at once and starts; a name that can't work is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokennorm import cli


@pytest.mark.timeout(900)
def test_a_new_recipe_passes_its_tests_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-recipe", "my_recipe"]) == 0
    assert "python -m my_recipe.train" in capsys.readouterr().out
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == [
        *("my_recipe/README.md", "my_recipe/__init__.py", "my_recipe/config.py", "my_recipe/tests/__init__.py"),
        *("my_recipe/tests/test_smoke.py", "my_recipe/tests/test_structure.py", "my_recipe/train.py"),
    ]
    assert not [path for path in files if "NAME" in (tmp_path / path).read_text()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "my_recipe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
    command = [sys.executable, "-m", "my_recipe.train", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    assert "step 10/10" in done.stdout
    assert (tmp_path / "runs" / "my_recipe" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["My-Recipe", "9lives", "class", "json", "torch", "numpy", "tests", "../x", ""])
def test_names_that_cannot_be_packages_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new-recipe", name]) == 1
    assert repr(name) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert cli.main(["new-recipe", "mine"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert not list((tmp_path / "mine").iterdir())
