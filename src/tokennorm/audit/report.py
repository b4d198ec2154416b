"""The outcome of an audit: as an object, as text for the terminal, as JSON, as a page."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.audit.compare import WindowResult
from tokennorm.audit.diagnose import Diagnosis

__all__ = ["AuditReport", "LayoutReport", "TokenWeights"]

# Weights closer to 1 than this are 1, but for rounding.
_EVEN = 1e-3


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """One layout: its shape, and its windows or the failure that ended it.

    Args:
        name: of the layout.
        ranks: number of processes.
        micro_batches: per rank, of each window: ``3`` or ``3+1``.
        packed: whether micro-batches are packed rows.
        windows: the comparison of each window; empty if the loop failed.
        failure: ``raised``, ``died``, ``hung``, ``not run`` or None, and its ``failure_text``.
        exact: every window is within tolerance.
    """

    name: str
    ranks: int
    micro_batches: str
    packed: bool
    windows: tuple[WindowResult, ...] = ()
    failure: str | None = None
    failure_text: str = ""
    exact: bool = False

    @property
    def error(self) -> float:
        """Largest relative error of its windows, before or after clipping; NaN if it failed or is not finite."""
        errors = [e for window in self.windows for e in (window.error, window.error_after_clipping)]
        return math.nan if not errors or any(map(math.isnan, errors)) else max(errors)


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """How much tokens counted, relative to their due of 1.

    Args:
        min: smallest weight of any token in any window.
        max: largest.
        per_sample: smallest and largest weight that each sample's tokens got over the layouts.
    """

    min: float
    max: float
    per_sample: dict[int, tuple[float, float]]

    def __str__(self) -> str:
        """One line."""
        if max(abs(self.min - 1), abs(self.max - 1)) < _EVEN:
            return "token weights are all 1 (where they could be solved): it is not the weights that are wrong"
        return f"token weights between {number(self.min)} and {number(self.max)}, should all be 1"


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Args:
        exact: the loop's gradient is that of the token-normalised objective in every layout.
        layouts: each with its errors.
        diagnosis: None when exact.
        token_weights: None when the gradients are no weighting of the samples' own.
        tolerance: relative error up to which a window counts as exact.
        notes: what else the person should know; never a verdict.
        model: a line about the model.
        seconds: that the audit took.
    """

    exact: bool
    layouts: tuple[LayoutReport, ...]
    diagnosis: Diagnosis | None
    token_weights: TokenWeights | None
    tolerance: float
    notes: tuple[str, ...]
    model: str
    seconds: float

    def __str__(self) -> str:
        """The report for the terminal."""
        return "\n".join([*_table(self), "", *_verdict(self)])

    def to_json(self) -> str:
        """The whole report; a number that is not finite is null."""
        content = dataclasses.asdict(self)
        for layout, entry in zip(self.layouts, content["layouts"], strict=True):
            entry["error"] = layout.error
        return json.dumps(_plain(content), indent=2, allow_nan=False)

    def to_html(self, path: str | Path) -> Path:
        """Write one page with the verdict, two plots and the table; it needs nothing but a browser."""
        from tokennorm.audit.page import page

        target = Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


HEADER = ("ranks", "micro-batches", "layout", "error", "factor", "cosine", "token weights", "verdict")


def rows(report: AuditReport) -> list[tuple[str, ...]]:
    """The cells of the table, one row per layout."""
    return [_row(layout) for layout in report.layouts]


def _row(layout: LayoutReport) -> tuple[str, ...]:
    start = (str(layout.ranks), layout.micro_batches, layout.name)
    if layout.failure:
        return (*start, "", "", "", "", layout.failure)
    worst = max(layout.windows, key=lambda window: (math.isnan(window.error), window.error))
    weights = [w.weight for window in layout.windows for w in window.weights]
    spread = f"{number(min(weights))} to {number(max(weights))}" if weights else "-"
    verdict = "exact" if layout.exact else "not finite" if math.isnan(layout.error) else "not exact"
    return (*start, f"{layout.error:.1e}", f"{worst.factor:.4g}", f"{worst.cosine:.6f}", spread, verdict)


def _table(report: AuditReport) -> list[str]:
    table = [HEADER, *rows(report)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def number(weight: float) -> str:
    """A token weight in four digits; what is zero but for rounding is zero."""
    return "0" if abs(weight) < 1e-6 else f"{weight:.4g}"


def verdict_line(report: AuditReport) -> str:
    """The outcome in one line."""
    total = len(report.layouts)
    if report.exact:
        largest = max(layout.error for layout in report.layouts)
        return f"EXACT: every supervised token counts once in all {total} layouts (largest error {largest:.1e})"
    right = sum(layout.exact for layout in report.layouts)
    name = report.diagnosis.name if report.diagnosis else "unknown"
    also = "".join(f" + {other}" for other in report.diagnosis.also) if report.diagnosis else ""
    return f"NOT EXACT in {total - right} of {total} layouts: {name}{also}"


def _verdict(report: AuditReport) -> list[str]:
    lines = [verdict_line(report)]
    diagnosis = report.diagnosis
    if diagnosis is not None:
        lines.append(f"  what: {diagnosis.explanation}")
        if diagnosis.candidates:
            lines.append(f"  candidates: {', '.join(diagnosis.candidates)}")
        if not math.isnan(diagnosis.residual):
            lines.append(f"  unexplained: {diagnosis.residual:.1e} of the gradient, at most")
        lines.append(f"  what to do: {diagnosis.fix}")
    weights = report.token_weights
    if weights is not None and not report.exact:
        lines.append(f"  {weights}")
    failures: dict[str, list[str]] = {}
    for layout in report.layouts:
        if layout.failure and layout.failure != "not run":
            where = f"{layout.ranks} ranks x {layout.micro_batches}, {layout.name}"
            failures.setdefault(layout.failure_text, []).append(where)
    for text, where in failures.items():
        lines += ["", f"failed in: {'; '.join(where)}", *(f"  {line}" for line in text.splitlines())]
    lines += [f"note: {note}" for note in report.notes]
    lines.append(f"({report.model}; tolerance {report.tolerance:.1e}; {report.seconds:.1f} s)")
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
