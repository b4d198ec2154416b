"""The benchmark that audits other libraries: one small case, and how its table says what was found."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.audit_peers import LIBRARIES, RESULTS
from benchmarks.audit_peers_cases import CASES, SITUATIONS, Case, all_layouts, audit, situation_of
from benchmarks.audit_peers_table import HEAD, Row, rows_of, summary, table
from tokennorm.audit import AuditReport, LayoutReport
from tokennorm.recipes.audit.trainer_report import Evaluation, TrainerReport

REQUIREMENTS = Path(__file__).parents[2] / "benchmarks" / "audit_peers_requirements.txt"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are forked from this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case(library: str, *, exact: bool) -> Case:
    return next(c for c in CASES if library in c.library and c.model == "llama" and c.exact is exact)


def test_a_small_case_stock_and_exact():
    few = [one for one in all_layouts() if (one.ranks, one.name) == (2, "a short last window")]
    found = {}
    for exact in (False, True):
        accelerate = case("Accelerate", exact=exact)
        found[exact] = rows_of(accelerate, audit(accelerate, tuple(few)))
        assert [row.situation for row in found[exact]] == ["short last window"]
    assert all(row.right for row in found[True]), table(found[True])
    assert not any(row.right for row in found[False]), table(found[False])
    for row in found[False]:
        assert row.exact == 0
        assert row.error > 0.1
        assert row.weights is not None
        assert row.weights[0] < 0.9 < 1.1 < row.weights[1]
        assert row.logged is not None
        assert row.evaluated is not None
        assert row.logged > 1e-3
        assert row.evaluated > 1e-3
        assert row.diagnosis == "mean_of_rank_and_micro_batch_means + fixed_division"
    text = "\n".join(summary([*found[False], *found[True]]))
    assert "| Accelerate loop | llama | exact in 0 of 1 layouts, error up to" in text
    assert text.endswith("| exact in all 1 layouts; logged loss right; evaluation loss right |")


def test_the_situations_are_all_layouts_and_no_layout_is_in_two():
    places = [place for known in SITUATIONS.values() for place in known]
    assert len(places) == len(set(places)) == len(all_layouts())
    assert [situation_of(one) for one in all_layouts()].count("uneven ranks") == 3


def broken(layout: LayoutReport, *evaluations: Evaluation) -> list[Row]:
    report = AuditReport(
        exact=False,
        layouts=(layout,),
        diagnosis=None,
        token_weights=None,
        tolerance=5e-6,
        notes=(),
        model="none",
        seconds=0.0,
    )
    return rows_of(CASES[0], TrainerReport(trainer="", model="", audit=report, evaluations=evaluations))


def test_what_failed_or_is_no_number_is_never_right():
    layout = LayoutReport(name="uneven ranks", ranks=2, micro_batches="1", packed=False, failure="raised")
    (row,) = broken(layout, Evaluation(layout="uneven ranks", ranks=2, loss=math.nan, right=4.0))
    assert not row.right
    cells = dict(zip(HEAD, row.cells(), strict=True))
    assert cells["exact"] == "no (raised)"
    assert cells["error"] == "not finite"
    assert (cells["factor"], cells["token weights"]) == ("-", "-")
    assert cells["logged loss off by"] == "not seen"
    assert cells["evaluation loss off by"] == "not a number"
    assert "evaluation loss off by up to not a number" in summary([row])[-1]
    other = dataclasses.replace(row, evaluated=0.02)
    assert "evaluation loss off by up to 2 %, or not a number" in summary([row, other])[-1]
    # An exact gradient alone is not enough.
    losses = dataclasses.replace(row, exact=1, error=1e-7, logged=0.0, evaluated=0.0, failures=())
    assert losses.right
    for wrong in (None, math.nan, 0.01):
        assert not dataclasses.replace(losses, logged=wrong).right
        assert not dataclasses.replace(losses, evaluated=wrong).right


def test_the_result_is_of_the_pinned_versions_and_all_right_with_the_integration():
    content = json.loads((RESULTS / "audit_peers.json").read_text(encoding="utf-8"))
    pinned = dict(line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line)
    assert set(pinned) == set(LIBRARIES)
    assert {name: version.split("+")[0] for name, version in content["versions"].items()} == pinned
    rows = [Row(**row) for row in content["rows"]]
    assert {(row.library, row.model, row.integration) for row in rows} == {
        (one.library, one.model, one.exact) for one in CASES
    }
    assert all(row.right for row in rows if row.integration)
