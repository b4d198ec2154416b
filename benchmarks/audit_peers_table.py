"""Rows of the peers' audit: one per library, model, stock or exact, and situation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.audit_peers_cases import SITUATIONS, Case, situation_of
from tokennorm.audit.report import number
from tokennorm.recipes.audit.trainer_report import TrainerReport

__all__ = ["HEAD", "RIGHT", "Row", "rows_of", "summary", "table"]

HEAD = (
    "library",
    "situation",
    "exact",
    "error",
    "factor",
    "token weights",
    "diagnosis",
    "logged loss off by",
    "evaluation loss off by",
)
# A relative error of a logged or evaluated loss below this is rounding (logs have four to six digits).
RIGHT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one audit found in one situation.

    Args:
        library: its name.
        model: of the case.
        integration: with it.
        situation: of the layouts.
        layouts: their number, and how many are ``exact``.
        error: largest relative L2 error of a whole gradient; NaN if one is not finite or a layout failed.
        factors: smallest and largest best-fitting factor of a window.
        weights: smallest and largest token weight; None where they can't be solved.
        diagnosis: of the audit that the situation is part of; "" where all of its layouts are exact.
        residual: what the diagnosis leaves unexplained of a window's gradient, at most.
        logged: largest relative error of a logged loss; NaN if one is not finite, None if none was seen.
        evaluated: the same of an evaluation loss.
        failures: how layouts failed, if they did.
    """

    library: str
    model: str
    integration: bool
    situation: str
    layouts: int
    exact: int
    error: float
    factors: tuple[float, float]
    weights: tuple[float, float] | None
    diagnosis: str
    residual: float | None
    logged: float | None
    evaluated: float | None
    failures: tuple[str, ...]

    @property
    def right(self) -> bool:
        """The gradient is exact, and both losses are right."""
        losses = (self.logged, self.evaluated)
        return self.exact == self.layouts and all(loss is not None and loss <= RIGHT for loss in losses)

    def cells(self) -> list[str]:
        """As in :data:`HEAD`."""
        exact = "yes" if self.exact == self.layouts else f"{self.exact} of {self.layouts}" if self.exact else "no"
        if self.failures:
            exact += f" ({', '.join(self.failures)})"
        return [
            self.library,
            self.situation,
            exact,
            _size(self.error),
            _span(self.factors),
            "-" if self.weights is None else _span(self.weights),
            self.diagnosis or "-",
            _off(self.logged),
            _off(self.evaluated),
        ]


def _span(values: tuple[float, float]) -> str:
    if any(map(math.isnan, values)):
        return "-"
    low, high = (number(value) for value in values)
    return low if low == high else f"{low} to {high}"


def _size(error: float) -> str:
    if math.isnan(error):
        return "not finite"
    return f"{error:.2f}" if error >= 0.01 else f"{error:.0e}"


def _off(error: float | None) -> str:
    if error is None:
        return "not seen"
    if math.isnan(error):
        return "not a number"
    return "right" if error <= RIGHT else f"{100 * error:.3g} %"


def _largest(values: Iterable[float]) -> float:
    """NaN if one is; max alone would depend on the order."""
    found = list(values)
    return math.nan if not found or any(map(math.isnan, found)) else max(found)


def rows_of(case: Case, report: TrainerReport) -> list[Row]:
    """One row for each situation that the audit's layouts belong to."""
    diagnosis = report.audit.diagnosis
    named, residual = "", None
    if diagnosis is not None:
        named = " + ".join((diagnosis.name, *diagnosis.also))
        if diagnosis.candidates:
            named += f" ({', '.join(diagnosis.candidates)})"
        residual = None if math.isnan(diagnosis.residual) else diagnosis.residual
    rows = []
    for situation, known in SITUATIONS.items():
        layouts = tuple(one for one in report.layouts if situation_of(one) == situation)
        if not layouts:
            continue
        part = dataclasses.replace(report, audit=dataclasses.replace(report.audit, layouts=layouts))
        windows = [window for layout in layouts for window in layout.windows]
        factors = [window.factor for window in windows]
        weights = [weight.weight for window in windows for weight in window.weights]
        solved = bool(weights) and all(window.weights for window in windows)
        logged = part.logged_errors()
        evaluated = [one.error for one in report.evaluations if (one.ranks, one.layout) in known]
        exact = sum(layout.exact for layout in layouts)
        rows.append(
            Row(
                library=case.library,
                model=case.model,
                integration=case.exact,
                situation=situation,
                layouts=len(layouts),
                exact=exact,
                error=_largest(layout.error for layout in layouts),
                factors=(-_largest(-factor for factor in factors), _largest(factors)),
                weights=(min(weights), max(weights)) if solved else None,
                diagnosis="" if exact == len(layouts) else named,
                residual=None if exact == len(layouts) else residual,
                logged=_largest(logged) if logged else None,
                evaluated=_largest(evaluated) if evaluated else None,
                failures=tuple(dict.fromkeys(layout.failure for layout in layouts if layout.failure)),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown, a head and the rows."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def summary(rows: Sequence[Row]) -> list[str]:
    """Markdown, one line per library and model: in how many layouts the gradient is exact, without and with."""
    lines = ["| library | model | stock | with the integration |", "|---|---|---|---|"]
    for library, model in dict.fromkeys((row.library, row.model) for row in rows):
        mine = [row for row in rows if (row.library, row.model) == (library, model)]
        halves = [
            _verdict([row for row in mine if row.integration is integration]) for integration in (False, True)
        ]
        lines.append(f"| {library} | {model} | {' | '.join(halves)} |")
    return lines


def _verdict(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    total, exact = sum(row.layouts for row in rows), sum(row.exact for row in rows)
    text = f"exact in all {total} layouts" if exact == total else f"exact in {exact} of {total} layouts"
    names = list(dict.fromkeys(row.diagnosis for row in rows if row.diagnosis))
    finite = [row.error for row in rows if not math.isnan(row.error)]
    if exact < total:
        text += f", error up to {_size(max(finite))}" if finite else ""
        text += f" ({'; '.join(names)})"
    for what, errors in (("logged", [r.logged for r in rows]), ("evaluation", [r.evaluated for r in rows])):
        wrong = [error for error in errors if error is not None and not error <= RIGHT]
        if wrong:
            off = [_off(error) for error in sorted(error for error in wrong if not math.isnan(error))[-1:]]
            off += [_off(math.nan)] if any(map(math.isnan, wrong)) else []
            text += f"; {what} loss off by up to {', or '.join(off)}"
        elif None not in errors:
            text += f"; {what} loss right"
    return text
