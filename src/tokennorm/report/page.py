"""Runs as one HTML page: curves in inline SVG, tables. No script, no other file, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tokennorm.report.curves import Panel, panels
from tokennorm.report.runs import Run
from tokennorm.report.style import STYLE
from tokennorm.report.svg import draw
from tokennorm.report.tables import configuration, legend, provenance, summary

__all__ = ["page"]


def page(runs: Sequence[Run]) -> str:
    """Return the whole page for one or more runs."""
    title = " and ".join(run.name for run in runs) if len(runs) < 4 else f"{len(runs)} runs"
    drawn = "\n".join(_panel(panel) for panel in panels(runs))
    sections = [
        f"<h1>{escape(title)}</h1>",
        summary(runs),
        "<h2>Curves</h2>",
        f'<div class="panels">{drawn}</div>' if drawn else "<p>No line has a number to draw yet.</p>",
        "<h2>Configuration</h2>",
        configuration(runs),
        "<h2>Command, versions, git state</h2>",
        provenance(runs),
        "<footer>Where lines are many, a curve joins the means of neighbouring ones (of ratios: sums divided by "
        "sums); of one or two such curves a band reaches from the least to the greatest value. A red mark at the "
        "upper edge is a value that was not finite. What lies far outside is drawn at the edge.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: tokennorm report</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _panel(panel: Panel) -> str:
    unit = f" <small>{escape(panel.unit)}</small>" if panel.unit else ""
    return f"<section><h3>{escape(panel.title)}{unit}</h3>{draw(panel)}{legend(panel.curves)}</section>"
