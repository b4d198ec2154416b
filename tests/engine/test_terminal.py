"""A run goes on when nobody can be told any more: the terminal is gone, or the disk of the log is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A training as a command of the command line, which flushes its streams in the end.
TRAINING = """
import sys
from tests.engine.toy import ToyWindows, build_engine
from tokennorm import cli
from tokennorm.cli.main import COMMANDS
from tokennorm.engine import ProgressPrinter, RunFolder, train
class Command:
    @staticmethod
    def run(arguments):
        run = RunFolder(arguments[0])
        progress = ProgressPrinter(8)
        engine, inner = build_engine(), None
        objective = engine.objective
        def slow(model, batch):
            # The reader of the first lines leaves in the meantime.
            if engine.step == 2:
                sys.stdin.read()
            return objective(model, batch)
        engine.objective = slow
        train(engine, ToyWindows(repeat=2), total_steps=8, run=run, progress=progress)
        return 0
sys.modules["training"], COMMANDS["train-toy"] = Command, "training"
sys.exit(cli.main(["train-toy", *sys.argv[1:]]))
"""


def start(folder: Path, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", TRAINING, str(folder)]
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True, cwd=root
    )


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_terminal_is_closed_in_the_middle_of_a_run(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = start(tmp_path / "run", theirs, theirs)
    os.close(theirs)
    try:
        assert b"step 1/8" in os.read(ours, 4096)
        os.close(ours)
        process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0
    assert steps(tmp_path / "run") == list(range(1, 9))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_the_disk_of_the_log_is_full(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = start(tmp_path / "run", full, subprocess.PIPE)
        _, said = process.communicate(timeout=240)
    finally:
        os.close(full)
    assert process.returncode == 0
    assert said.decode().splitlines() == [
        "warning: no more lines are printed here, the run goes on: [Errno 28] No space left on device"
    ]
    assert steps(tmp_path / "run") == list(range(1, 9))
