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
SCRIPTS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.DOTALL)
    if "print(audit_loop" in block
]


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


@pytest.mark.parametrize(
    ("place", "verdict"),
    [(0, "mean_of_rank_and_micro_batch_means"), (1, "EXACT"), (2, "EXACT")],
    ids=["ten lines", "DDP", "FSDP2"],
)
def test_the_scripts_of_the_docs(place, verdict, tmp_path):
    script = tmp_path / "audit.py"
    script.write_text(SCRIPTS[place])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert verdict in next(line for line in done.stdout.splitlines() if "EXACT" in line)


def test_the_first_script_is_as_short_as_the_docs_say():
    assert len([line for line in SCRIPTS[0].splitlines() if line.strip()]) < 10
