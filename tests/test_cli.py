"""The command line as a user meets it: help for every option, errors in three parts, one line for Ctrl-C."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

import tokennorm
from recipes.sft.tests.tiny import build_folder
from tokennorm import cli
from tokennorm.cli.go_on import go_on
from tokennorm.cli.main import COMMANDS
from tokennorm.errors import DataError
from tokennorm.recipes import dspark, sft


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("cli"))


def arguments(folder: Path, run: str, *more: str) -> list[str]:
    return [
        *("train", "sft", "--data.path", str(folder / "chats.jsonl"), "--model.path", str(folder / "model")),
        *("--data.max-length", "128", "--data.eval-fraction", "0.2", "--data.micro-batches-per-window", "3"),
        *("--optim.lr", "0.01", "--distributed.device", "cpu", "--run.dir", str(folder / run), *more),
    ]


def test_bare_and_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    for word in ("train", "sft", "fetch", "smollm2-135m", "--config demo", "torchrun"):
        assert word in bare
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{tokennorm.__version__}\n"


@pytest.mark.parametrize("command", ["train", "draft", "audit", "report", "new-recipe", "fetch"])
def test_a_command_alone_says_how_it_is_used(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command]) == 2
    assert capsys.readouterr().out.startswith(f"usage: tokennorm {command} ")
    assert cli.main([command, "--help"]) == 0


def leaves(config: type, prefix: str = "") -> list[tuple[str, str]]:
    """Every option of a configuration and the text under its field."""
    tree = ast.parse(inspect.getsource(config)).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {
        node.target.id: following.value.value
        for node, following in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    }
    found = []
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found += leaves(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            found.append((f"--{prefix}{field.name}".replace("_", "-"), texts.get(field.name, "")))
    return found


@pytest.mark.parametrize(
    ("command", "config", "shown"),
    [
        (("train", "sft"), sft.SftConfig, "(default:256)"),
        (("draft", "evaluate"), dspark.DSparkConfig, "(default:8192)"),
    ],
)
def test_help_explains_every_option(
    command: tuple[str, ...],
    config: type,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--config", "demo", "--help"])
    assert ended.value.code == 0
    text = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    options = leaves(config)
    assert len(options) > 30
    for option, explanation in options:
        assert option in text
        assert len(explanation) > 15, f"{option} has no text under its field"
        assert re.sub(r"\s+", "", explanation.replace("`", "")) in text, option
    assert "--config{default,demo}" in text
    assert shown in text, "the values of the chosen configuration are shown"


@pytest.mark.parametrize(
    ("argv", "message", "fix"),
    [
        (["bogus"], "there is no command 'bogus'", ", ".join(COMMANDS)),
        (["train", "nope"], "there is no recipe 'nope'", "sft, dspark"),
        (["draft", "nope"], "there is no stage 'nope'", "generate, cache, evaluate, export, run"),
        (["train", "sft", "--config", "nope"], "--config is 'nope'", "default, demo"),
        (["train", "sft", "--config"], "--config is ''", "default, demo"),
        (["fetch", "nope"], "no embedded model 'nope'", "smollm2-135m"),
    ],
)
def test_a_mistake_is_told_without_a_traceback(
    argv: list[str], message: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert f"What to do: use one of: {fix}" in captured.err.replace("use one of smollm", "use one of: smollm")
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_impossible_value_is_told_with_its_allowed_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "sft", "--train.epochs", "0"])
    assert ended.value.code == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "train.epochs is 0 What to do: give 1 or more" in message


def test_all_three_parts_and_the_rank_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def failing(_: Any) -> None:
        raise DataError("what happened", why="why it matters", fix="the fix")

    monkeypatch.setattr(sft, "run", failing)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert cli.main(["train", "sft"]) == 1
    assert capsys.readouterr().err == (
        "[rank 1/2] error: what happened\n  Why it matters: why it matters\n  What to do: the fix\n"
    )
    # torchrun's summary names the first rank that failed, from here.
    assert "what happened" in json.loads((tmp_path / "error.json").read_text())["message"]["message"]


def test_what_nobody_expected_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(sft, "run", failing)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["train", "sft"])


BASE_INSTALL = """
import sys
for name in ("transformers", "tokenizers", "tyro", "rich", "safetensors"):
    sys.modules[name] = None
from tokennorm.cli import main
assert main([]) == 0
sys.exit(main(["train", "sft", "--config", "demo"]))
"""


def test_a_base_install_says_which_extra_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", BASE_INSTALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "usage: tokennorm" in done.stdout
    assert "error: the library 'tyro' is not installed" in done.stderr
    assert 'pip install "tokennorm[train]"' in done.stderr
    assert "Traceback" not in done.stderr


def held_out(text: str) -> list[str]:
    return re.findall(r"held-out after step \d+  loss [\d.]+  tok [\d,/]+", text)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def test_train_from_the_command_line_alone_and_under_torchrun(folder: Path) -> None:
    alone = subprocess.run(
        [sys.executable, "-m", "tokennorm", *arguments(folder, "alone")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=True,
    )
    assert alone.stderr == "", "no progress bars or warnings of other libraries in a log"
    lines = alone.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert re.fullmatch(
        r"step 1/\d+  loss 5\.\d{4}  grad \d+\.\d\d  lr 1\.0e-02  tok \d+/\d+  [\d.]+k? tok/s  eta \d+s", steps[0]
    )
    found = held_out(alone.stdout)
    assert len(found) == 2
    assert any(line.startswith("exported ") for line in lines)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-endpoint", "127.0.0.1:0"]
    both = subprocess.run(
        [sys.executable, *torchrun, "-m", "tokennorm", *arguments(folder, "both")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=True,
    )
    assert "FutureWarning" not in both.stderr
    assert held_out(both.stdout) == found
    assert len([line for line in both.stdout.splitlines() if line.startswith("step ")]) == len(steps)
    run = json.loads((folder / "both" / "run.json").read_text())
    assert run["ranks"] == 2
    assert run["command"][1:3] == ["train", "sft"]


def test_a_used_run_folder_is_refused_before_any_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert cli.main(arguments(folder, "used")) == 1
    assert "already holds a run" in capsys.readouterr().err


# A shell starts background jobs with interrupts ignored, and children inherit that: whoever runs these tests that
# way would wait for ever. So the command gets Python's own handler back first.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tokennorm.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_the_command_to_go_on_names_the_folder_and_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    started = ["train", "sft", "--run.resume", "--data.path", "my chats.jsonl"]
    assert go_on(started, Path("runs/a")) == (
        "tokennorm train sft --data.path 'my chats.jsonl' --run.dir runs/a --run.resume"
    )
    started = ["train", "dspark", "--run.dir", "runs/d"]
    assert go_on(started, Path("runs/d/train")) == "tokennorm train dspark --run.dir runs/d --run.resume"
    assert go_on(["draft", "run"], Path("runs/dspark/train")) == "tokennorm draft run"
    for chosen in (["--run.resume-from", "runs/b/checkpoints/step-00000003"], ["--run.resume_from=elsewhere"]):
        # Saved by the run itself: from there. Stopped before it saved anything: from where it came.
        own, foreign = Path("runs/d/train/checkpoints/step-00000004"), Path("runs/b/checkpoints/step-00000003")
        command = go_on([*started, *chosen], Path("runs/d/train"), own)
        assert command == "tokennorm train dspark --run.dir runs/d --run.resume"
        command = go_on([*started, *chosen], Path("runs/d/train"), foreign)
        assert command == f"tokennorm train dspark --run.dir runs/d --run.resume-from {foreign}"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert go_on(started, None).startswith("torchrun --nnodes 2 --nproc_per_node 4 -m tokennorm train dspark ")


def test_interrupt_saves_says_how_to_go_on_and_ends(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *arguments(folder, "stopped", "--train.epochs", "100000")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("step 3/"):
                    process.send_signal(signal.SIGINT)
                    break
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    first, blank, stopped, command = errors.splitlines()
    assert (first, blank) == ("SIGINT: the run ends after this step (Ctrl-C again: at once)", "")
    saved = folder / "stopped" / "checkpoints"
    assert re.fullmatch(rf"stopped by SIGINT after step \d+/\d+; the checkpoint is {saved}/step-\d+", stopped)
    assert command.startswith("go on with: tokennorm train sft ")
    assert command.endswith("--run.resume")
