"""What an audit of a trainer found: its gradient, and the losses that it logs and evaluates."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tokennorm.audit import AuditReport, LayoutReport

__all__ = ["Evaluation", "TrainerReport"]

# A relative error of a logged or evaluated loss below this is rounding (logs have four to six digits).
_RIGHT = 1e-4


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation loss that a trainer reports after the first step of a layout, and the right one."""

    layout: str
    ranks: int
    loss: float
    right: float

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.loss - self.right) / abs(self.right)


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """An :class:`~tokennorm.audit.AuditReport` of the gradient, and what is said about losses.

    Attributes:
        trainer: its name.
        model: architecture.
        audit: of the gradient.
        evaluations: one per layout.
    """

    trainer: str
    model: str
    audit: AuditReport
    evaluations: tuple[Evaluation, ...]

    @property
    def exact(self) -> bool:
        """Of the gradient."""
        return self.audit.exact

    @property
    def layouts(self) -> tuple[LayoutReport, ...]:
        """Of the gradient."""
        return self.audit.layouts

    def logged_errors(self) -> list[float]:
        """Relative error of each logged loss; right is the window's mean, with the router loss or without it."""
        found = []
        for window in (window for layout in self.layouts for window in layout.windows):
            if window.logged_loss is not None:
                right = (window.reference_loss, window.reference_token_loss)
                found.append(min(abs(window.logged_loss - value) / abs(value) for value in right))
        return found

    def __str__(self) -> str:
        """The report for the terminal."""
        logged, evaluated = self.logged_errors(), [one.error for one in self.evaluations]
        lines = [f"{self.trainer}, {self.model}", "", str(self.audit)]
        lines.append(f"logged loss: {_verdict(logged, 'windows')}")
        line = f"evaluation loss: {_verdict(evaluated, 'layouts')}"
        if evaluated and max(evaluated) > _RIGHT:
            worst = max(self.evaluations, key=lambda one: one.error)
            line += f"; {worst.loss:.4f} reported on {worst.ranks} rank(s), {worst.right:.4f} right "
            line += "(per supervised token, without a router loss)"
        return "\n".join([*lines, line])

    def to_json(self) -> str:
        """Everything."""
        content = json.loads(self.audit.to_json())
        content |= {"trainer": self.trainer, "architecture": self.model}
        content["evaluations"] = [{**dataclasses.asdict(one), "error": one.error} for one in self.evaluations]
        return json.dumps(content, indent=2)

    def to_html(self, path: str | Path) -> Path:
        """The page of the gradient's audit."""
        return self.audit.to_html(path)


def _verdict(errors: list[float], what: str) -> str:
    if not errors:
        return "not seen"
    wrong = [error for error in errors if not error <= _RIGHT]
    if not wrong:
        return f"right in all {len(errors)} {what} (largest error {max(errors):.1e})"
    return f"wrong in {len(wrong)} of {len(errors)} {what}, by up to {100 * max(wrong):.3g} %"
