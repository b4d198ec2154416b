"""Every loop of the audit's tests, three seeds each: which diagnosis does each planted mistake get?

    python -m benchmarks.audit_catalogue [--seeds 3] [--only WORD]

writes benchmarks/results/audit_catalogue.md, and exits with 1 if a mistake was named wrongly or a right loop
accused.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.audit.loops import EXACT, MISTAKES, Loop
from tokennorm.audit import AuditReport, audit_loop
from tokennorm.audit.report import number

RESULT = Path(__file__).parent / "results" / "audit_catalogue.md"


@dataclass(frozen=True)
class Row:
    """One loop and what an audit with each seed said of it."""

    loop: Loop
    reports: list[AuditReport]

    @property
    def answers(self) -> list[str]:
        """The diagnosis by seed; ``exact`` where there is none."""
        return [answer(report) for report in self.reports]

    @property
    def verdict(self) -> str:
        """right, cannot tell, or wrong."""
        expected = "+".join(self.loop.expected) or "exact"
        if all(answer == expected for answer in self.answers):
            return "right"
        honest = {expected, "cannot_tell", "unknown"}
        return "cannot tell" if set(self.answers) <= honest and expected != "exact" else "WRONG"

    def line(self) -> str:
        """One row of the table."""
        answers = list(dict.fromkeys(self.answers))
        errors = [layout.error for report in self.reports for layout in report.layouts]
        residuals = [report.diagnosis.residual for report in self.reports if report.diagnosis]
        weights = [report.token_weights for report in self.reports if report.token_weights]
        residual = f"{max(residuals):.0e}" if residuals and not math.isnan(max(residuals)) else "-"
        spread = "-"
        if weights:
            spread = f"{number(min(w.min for w in weights))} to {number(max(w.max for w in weights))}"
        cells = [self.loop.name, ", ".join(answers), f"{max(errors):.0e}", residual, spread, self.verdict]
        return f"| {' | '.join(cells)} |"


def answer(report: AuditReport) -> str:
    """The diagnosis of one report, in one word."""
    if report.diagnosis is None:
        return "exact"
    return "+".join((report.diagnosis.name, *report.diagnosis.also))


def run(loop: Loop, seeds: int) -> Row:
    """Audit one loop with several seeds of model and data."""
    # Forked: this process has imported all that the ranks need.
    reports = [
        audit_loop(loop.build, loop.step, **{"seed": seed, "start_method": "fork", **loop.options})
        for seed in range(seeds)
    ]
    return Row(loop, reports)


def table(rows: list[Row]) -> list[str]:
    """Rows under a head."""
    head = "| loop | diagnosis | largest error | unexplained | token weights | |"
    return [head, "|---|---|---|---|---|---|", *(row.line() for row in rows)]


def main() -> int:
    """Run the catalogue and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of model and data for each loop")
    parser.add_argument("--only", default="", help="only loops whose name holds this; nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what every rank would
    started = time.monotonic()
    rows: dict[str, list[Row]] = {"mistakes": [], "right": []}
    for kind, loops in (("mistakes", MISTAKES), ("right", EXACT)):
        for loop in loops:
            if options.only in loop.name:
                row = run(loop, options.seeds)
                rows[kind].append(row)
                print(row.line(), flush=True)
    seconds = time.monotonic() - started
    kinds = {name for row in rows["mistakes"] for name in row.loop.expected}
    wrong = [row.loop.name for group in rows.values() for row in group if row.verdict == "WRONG"]
    unsure = [row.loop.name for row in rows["mistakes"] if row.verdict == "cannot tell"]
    summary = (
        f"{len(rows['mistakes'])} loops that make {len(kinds)} kinds of mistakes, and {len(rows['right'])} right "
        f"ones; {options.seeds} seeds each. Named wrongly or accused: {len(wrong)}. Could not tell: {len(unsure)}."
    )
    print(summary)
    if not options.only:
        lines = [
            "# What the audit says of planted mistakes",
            "",
            f"`python -m benchmarks.audit_catalogue --seeds {options.seeds}`, torch {torch.__version__}, CPU, "
            f"{seconds / 60:.0f} minutes. {summary}",
            "",
            "*Largest error*: relative L2 error of the whole gradient, over layouts and seeds.",
            "*Unexplained*: what the diagnosis leaves of a window's gradient, at most.",
            "*Token weights*: smallest and largest, due is 1; not solved where the gradient is",
            "no weighting of the samples' own. The loops are in `tests/audit/`.",
            "",
            "## Mistakes",
            "",
            *table(rows["mistakes"]),
            "",
            "## Right loops",
            "",
            *table(rows["right"]),
            "",
        ]
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text("\n".join(lines), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
