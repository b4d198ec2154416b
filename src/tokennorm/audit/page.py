"""The report as one HTML page: verdict, two plots in inline SVG, the table. No script, no other file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tokennorm.audit.report import HEADER, AuditReport, LayoutReport, number, rows, verdict_line

__all__ = ["page"]

_LABELS, _PLOT, _ROW, _TOP = 340, 460, 22, 34
_RIGHT, _WRONG, _LINE, _TEXT = "#2a7f62", "#c0392b", "#b8b8b8", "#333"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: 3px 10px 3px 0; text-align: left; }
tr.wrong td { color: #c0392b; } svg text { font: 12px system-ui, sans-serif; fill: #333; }
pre { background: #f5f5f5; padding: 1em; overflow-x: auto; } dt { font-weight: 600; } dd { margin: 0 0 .5em 0; }
"""


def page(report: AuditReport) -> str:
    """The whole page."""
    colour = _RIGHT if report.exact else _WRONG
    sections = [
        f'<h1 style="color:{colour}">{escape(verdict_line(report))}</h1>',
        _diagnosis(report),
        "<h2>Error by layout</h2>",
        "<p>Relative L2 error of the whole gradient. The dashed line is the tolerance.</p>",
        _errors(report),
        "<h2>How much each token counted</h2>",
        "<p>One dot per sample: the weight that its tokens got, relative to their due. All should be 1.</p>",
        _weights(report.layouts),
        "<h2>Layouts</h2>",
        _table(report),
        _failures(report.layouts),
        "".join(f"<p>Note: {escape(note)}.</p>" for note in report.notes),
        f"<p>{escape(report.model)}; tolerance {report.tolerance:.1e}; {report.seconds:.1f} s.</p>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>tokennorm audit</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _diagnosis(report: AuditReport) -> str:
    diagnosis = report.diagnosis
    if diagnosis is None:
        return ""
    entries = [("What", diagnosis.explanation), ("What to do", diagnosis.fix)]
    if diagnosis.candidates:
        entries.insert(1, ("Candidates", ", ".join(diagnosis.candidates)))
    if not math.isnan(diagnosis.residual):
        entries.append(("Unexplained", f"{diagnosis.residual:.1e} of the gradient, at most"))
    if report.token_weights is not None:
        entries.append(("Weights", str(report.token_weights)))
    return "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in entries) + "</dl>"


class _Scale:
    """A logarithmic axis over whole decades."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
        self.low = math.floor(math.log10(min(positive)) - 0.05)
        self.high = max(math.ceil(math.log10(max(positive)) + 0.05), self.low + 1)

    def x(self, value: float) -> float:
        """Horizontal place of a value; what is not positive or too small is at the left edge."""
        place = math.log10(value) if value > 0 else self.low
        place = min(max(place, self.low), self.high)
        return _LABELS + (place - self.low) / (self.high - self.low) * _PLOT

    def axis(self, height: float) -> str:
        """Decades as thin lines, with at most eight labels."""
        stride = max(1, math.ceil((self.high - self.low) / 8))
        marks = []
        for decade in range(self.low, self.high + 1, stride):
            x = self.x(10.0**decade)
            marks.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height}" stroke="{_LINE}" />')
            label = f"{10.0**decade:g}" if abs(decade) < 4 else f"1e{decade}"
            marks.append(f'<text x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{label}</text>')
        return "".join(marks)


def _svg(height: float, content: str, title: str) -> str:
    width = _LABELS + _PLOT + 40
    return (
        f'<svg viewBox="0 0 {width} {height}" width="100%" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{content}</svg>'
    )


def _label(layout: LayoutReport, y: float) -> str:
    text = f"{layout.ranks} x {layout.micro_batches}, {layout.name}"
    return f'<text x="{_LABELS - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'


def _errors(report: AuditReport) -> str:
    height = _TOP + _ROW * len(report.layouts) + 6
    scale = _Scale([*(layout.error for layout in report.layouts), report.tolerance])
    parts = [scale.axis(height)]
    for place, layout in enumerate(report.layouts):
        y = _TOP + _ROW * (place + 0.5)
        parts.append(_label(layout, y))
        if math.isfinite(layout.error):
            x = max(scale.x(layout.error), _LABELS + 2)
            colour = _RIGHT if layout.exact else _WRONG
            parts.append(
                f'<rect x="{_LABELS}" y="{y - 6:.1f}" width="{x - _LABELS:.1f}" height="12" fill="{colour}">'
                f"<title>{layout.error:.2e}</title></rect>"
            )
        else:
            said = layout.failure or "not finite"
            parts.append(f'<text x="{_LABELS + 6}" y="{y + 4:.1f}">{escape(said)}</text>')
    x = scale.x(report.tolerance)
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height}" stroke="{_TEXT}" stroke-dasharray="4 3" />'
    )
    return _svg(height, "".join(parts), "relative error of the gradient, by layout")


def _weights(layouts: Sequence[LayoutReport]) -> str:
    solved = [layout for layout in layouts if any(window.weights for window in layout.windows)]
    if not solved:
        return "<p>The gradients are no weighting of the samples' own gradients.</p>"
    # A weight of zero, or below it, is shown at the left edge.
    weights = [w.weight for layout in solved for window in layout.windows for w in window.weights]
    visible = [weight for weight in weights if weight > 1e-3]
    scale = _Scale([*visible, 1.0, 0.5, 2.0])
    height = _TOP + _ROW * len(solved) + 6
    parts = [scale.axis(height)]
    x = scale.x(1.0)
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height}" stroke="{_RIGHT}" stroke-width="2" />'
    )
    for place, layout in enumerate(solved):
        y = _TOP + _ROW * (place + 0.5)
        parts.append(_label(layout, y))
        for window in layout.windows:
            for w in window.weights:
                colour = _RIGHT if abs(w.weight - 1) < 1e-3 else _WRONG
                title = (
                    f"rank {w.rank}, micro-batch {w.micro_batch}, sample {w.sample}: {w.tokens:g} tokens, "
                    f"weight {number(w.weight)}"
                )
                parts.append(
                    f'<circle cx="{scale.x(w.weight):.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.6">'
                    f"<title>{escape(title)}</title></circle>"
                )
    return _svg(height, "".join(parts), "weight of each sample's tokens, by layout")


def _table(report: AuditReport) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in HEADER)
    body = []
    for layout, row in zip(report.layouts, rows(report), strict=True):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body.append(f"<tr>{cells}</tr>" if layout.exact else f'<tr class="wrong">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _failures(layouts: Sequence[LayoutReport]) -> str:
    texts = dict.fromkeys(layout.failure_text for layout in layouts if layout.failure)
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts)
