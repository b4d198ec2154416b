"""How functions reach the ranks; the scripts in docs/audit.md do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit import loop_pieces as pieces
from tokennorm.audit import audit_loop
from tokennorm.errors import AuditError, ConfigError

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs/audit.md").read_text()
SCRIPTS = [block for block in re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL) if "print(audit_loop" in block]
DIFFS = re.findall(r"```diff\n(.*?)```", DOCS, re.DOTALL)
EXACT = "EXACT: every supervised token counts once"


def test_functions_with_a_name_run_in_a_new_process():
    report = audit_loop(pieces.build, pieces.counted, ranks=(2,), packed=False, start_method="spawn", timeout_s=60)
    assert report.exact, str(report)
    assert report.layouts[0].ranks == 2


def test_functions_without_a_name_are_forked():
    limit = 0.05  # known to the closure only

    def step(model, optimizer, batches):
        return pieces.counted(model, optimizer, batches, clip=limit)

    report = audit_loop(lambda: pieces.build(), step, ranks=(1,), packed=False)
    assert report.exact, str(report)
    with pytest.raises(ConfigError, match="no importable name"):
        audit_loop(lambda: pieces.build(), step, start_method="spawn")


def test_a_module_that_cannot_be_imported(tmp_path, monkeypatch):
    path = tmp_path / "fragile_training_module.py"
    path.write_text("def build(): ...\ndef step(model, optimizer, batches): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import fragile_training_module as module

    path.write_text("raise RuntimeError('only once')\n")
    with pytest.raises(AuditError, match="only once"):
        audit_loop(module.build, module.step)


def verdicts(script: str, folder: Path) -> list[str]:
    (folder / "audit.py").write_text(script)
    done = subprocess.run([sys.executable, "audit.py"], capture_output=True, text=True, timeout=240, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "EXACT" in line or "token weights between" in line]


def patched(script: str, diff: str) -> str:
    """The script after the diff, whose hunks are separated by empty lines."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.splitlines()
        before = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
        after = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    return script


@pytest.mark.parametrize(
    ("place", "verdict"),
    [(0, "NOT EXACT in 14 of 15 layouts: mean_of_rank_and_micro_batch_means"), (1, EXACT), (2, EXACT)],
    ids=["ten lines", "DDP", "FSDP2"],
)
def test_the_scripts_of_the_docs(place, verdict, tmp_path):
    said, *weights = verdicts(SCRIPTS[place], tmp_path)
    assert said.startswith(verdict)
    assert all(line in DOCS for line in weights)
    assert len(weights) == (verdict != EXACT)


@pytest.mark.parametrize(("place", "diff"), [(3, 0), (4, 1)], ids=["Accelerate", "Lightning"])
def test_the_stock_loops_of_the_docs_and_their_cure(place, diff, tmp_path):
    # One after the other in one process, the second under fewer layouts, for time: these libraries load slowly.
    cured = patched(SCRIPTS[place], DIFFS[diff]).replace("step))", "step, ranks=(2,)))")
    stock, weights, exact = verdicts(SCRIPTS[place] + cured, tmp_path)
    assert stock == "NOT EXACT in 14 of 15 layouts: mean_of_rank_and_micro_batch_means + fixed_division"
    assert f"{stock}\n{weights}\n" in DOCS
    assert exact.startswith(EXACT + " in all 6 layouts")


def test_the_first_script_is_as_short_as_the_docs_say():
    assert len([line for line in SCRIPTS[0].splitlines() if line.strip()]) < 10
