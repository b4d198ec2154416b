"""Two of the kills of ``benchmarks/kills.py``: one inside a save, one in the middle of a window."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_run_killed_twice_ends_with_the_undisturbed_weights() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--only", "2", "3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| in a save, halfway through the tensors | 6 | step-00000005 |" in done.stdout
    assert "| in a window, last micro-batch | 9 | step-00000008 |" in done.stdout
    assert "2 kills; weights, optimizer state" in done.stdout
    assert "are the same, bit for bit" in done.stdout
