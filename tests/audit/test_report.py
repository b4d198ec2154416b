from __future__ import annotations

import html.parser
import json
import math
import xml.etree.ElementTree as ET

import pytest

from tests.audit.loops import MISTAKES, Loop
from tests.audit.mistaken_loops import all_means
from tokennorm.audit import AuditReport, Layout, LayoutReport


@pytest.fixture(scope="module")
def reports() -> dict[str, AuditReport]:
    from tokennorm.audit import audit_loop

    by_name = {loop.name: loop for loop in MISTAKES}
    loops = {"means": by_name["mean of both"], "raises": Loop(name="", step=raising)}
    return {
        name: audit_loop(loop.build, loop.step, ranks=(1,), start_method="fork") for name, loop in loops.items()
    }


def raising(model, optimizer, batches) -> None:
    if len(batches) == 4:
        raise RuntimeError("a <tag> & more")
    all_means(model, optimizer, batches)


def test_the_text(reports):
    text = str(reports["means"])
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "ranks"
    assert sum(line.endswith(" exact") and not line.endswith("not exact") for line in lines) == 1
    assert "NOT EXACT in 5 of 6 layouts: mean_of_micro_batch_means" in text
    weights = reports["means"].token_weights
    assert weights is not None
    assert f"token weights between {weights.min:.4g} and {weights.max:.4g}, should all be 1" in text
    assert weights.max > 3


def test_json_is_strict_and_complete(reports):
    for report in reports.values():
        content = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
        assert content["exact"] is False
        assert content["diagnosis"]["name"] == "mean_of_micro_batch_means"
        assert len(content["layouts"]) == 6
        for layout, entry in zip(report.layouts, content["layouts"], strict=True):
            assert entry["error"] == (None if math.isnan(layout.error) else layout.error)
            assert [len(w["weights"]) for w in entry["windows"]] == [len(w.weights) for w in layout.windows]
    failed = json.loads(reports["raises"].to_json())["layouts"][2]
    assert failed["failure"] == "raised"
    assert "RuntimeError: a <tag> & more" in failed["failure_text"]


class Checker(html.parser.HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page(reports, tmp_path):
    path = reports["raises"].to_html(tmp_path / "audit.html")
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "script" not in checker.seen
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "a &lt;tag&gt; &amp; more" in text
    plots = [
        ET.fromstring(plot + "</svg>")
        for plot in text.split("</svg>")[:-1]
        for plot in [plot[plot.index("<svg") :]]
    ]
    errors, weights = plots
    space = "{http://www.w3.org/2000/svg}"
    bars = errors.findall(f"{space}rect")
    assert len(bars) == 5  # the sixth failed, and is a text
    finite = [layout for layout in reports["raises"].layouts if not layout.failure]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [w == max(widths) for w in widths] == [one.error == max(x.error for x in finite) for one in finite]
    dots = weights.findall(f"{space}circle")
    assert len(dots) == sum(len(window.weights) for layout in finite for window in layout.windows)


def test_names_are_escaped(tmp_path, audit):
    layout = Layout(name="<b>mine</b>", windows=((((0,), (1,)),),))
    report = audit(Loop(name="", step=all_means), layouts=(layout,))
    page = report.to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>" not in page
    assert "&lt;b&gt;mine" in page


def test_a_layout_without_windows_has_no_error():
    report = LayoutReport(name="x", ranks=1, micro_batches="1", packed=False, failure="hung", failure_text="y")
    assert math.isnan(report.error)
