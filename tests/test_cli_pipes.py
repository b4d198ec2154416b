"""A reader that has left ends a command without a word; a broken pipe of any other kind stays an error."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tokennorm import cli
from tokennorm.recipes import sft

# A command that prints as trainings do, line by line, or ends as help does: by SystemExit, with all that it
# printed still in the buffer.
COMMAND = """
import sys
from tokennorm import cli
from tokennorm.cli.main import COMMANDS
class Command:
    @staticmethod
    def run(arguments):
        for number in range(1000):
            print("step", number, flush=arguments == ["training"])
        raise SystemExit(0)
sys.modules["talking"], COMMANDS["talk"] = Command, "talking"
sys.exit(cli.main(["talk", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    "command", [["-m", "tokennorm", "--help"], ["-c", COMMAND, "training"], ["-c", COMMAND, "help"]]
)
def test_nobody_reads(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, *command], stdout=write, stderr=subprocess.PIPE, text=True, timeout=240, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_nobody_reads_errors_either() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        command = [sys.executable, "-m", "tokennorm", "bogus"]
        done = subprocess.run(command, stdout=write, stderr=write, timeout=240, check=False)
    finally:
        os.close(write)
    assert done.returncode == 141


def test_the_pipe_of_a_worker_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> None:
        raise BrokenPipeError("a worker died")

    monkeypatch.setattr(sft, "run", failing)
    with pytest.raises(BrokenPipeError, match="a worker died"):
        cli.main(["train", "sft"])
