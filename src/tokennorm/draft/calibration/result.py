"""Calibration of the confidence head: fitted on one half of the prompts, reported on the other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.draft.calibration.metrics import (
    DEFAULT_BINS,
    CalibrationMetrics,
    CalibrationReport,
    calibration_report,
)
from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.calibration.sts import fit_sts, write_sts
from tokennorm.draft.decoding.rounds import Round
from tokennorm.errors import DataError

__all__ = ["MIN_ROUNDS", "CalibrationResult", "calibrate"]

# In each half. With a hundred rounds a perfectly calibrated head shows an ECE of several percent, by chance alone.
MIN_ROUNDS = 100

_HEADINGS = ("proposal", "T", "rounds", "survived", "estimated", "ECE %", "floor %", "Brier", "AUROC")
_NOT_FITTED = "* not fitted: only survivors, only rejections, or nothing was observed in the fitted half."
_LEGEND = (
    "before > after scaling. survived: share of the drafted prefixes up to the proposal that were accepted; "
    "estimated: the mean estimate of it. floor: the ECE that chance alone would show after scaling."
)


@dataclass(frozen=True, kw_only=True)
class CalibrationResult:
    """Temperatures, and what they change on rounds they were not fitted to.

    Attributes:
        temperatures: one for each proposal, fitted on one half of the prompts.
        before: report of the other half at temperature 1.
        after: report of the same half at ``temperatures``.
        fit_prompts, fit_rounds, held_prompts, held_rounds: sizes of the halves.
        fit_observed: rounds of the fitted half that observed each proposal.
        fit_survived: in how many of them the prefix survived.
        seed: of the split.
    """

    temperatures: tuple[float, ...]
    before: CalibrationReport
    after: CalibrationReport
    fit_prompts: int
    fit_rounds: int
    held_prompts: int
    held_rounds: int
    fit_observed: tuple[int, ...]
    fit_survived: tuple[int, ...]
    seed: int

    @property
    def fitted(self) -> tuple[bool, ...]:
        """Whether each proposal's temperature was fitted; it is 1.0 where it wasn't."""
        return tuple(0 < some < every for some, every in zip(self.fit_survived, self.fit_observed, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = ("fit_prompts", "fit_rounds", "held_prompts", "held_rounds", "seed")
        content: dict[str, Any] = {"temperatures": list(self.temperatures), "fitted": list(self.fitted)}
        content |= {name: getattr(self, name) for name in names}
        content |= {"fit_observed": list(self.fit_observed), "fit_survived": list(self.fit_survived)}
        return content | {"before": self.before.to_dict(), "after": self.after.to_dict()}

    def to_json(self) -> str:
        """Everything, as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def write(self, path: str | Path) -> None:
        """Write the servers' ``sts_temperatures`` with this report under ``calibration``.

        Raises:
            ConfigError: the file can't be written.
        """
        write_sts(path, self.temperatures, {"calibration": self.to_dict()})

    def table(self) -> str:
        """The report as text of fixed width."""
        rows = [_HEADINGS, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([self._summary(), "", *lines, "", *self._notes()])

    def markdown(self) -> str:
        """The report as a Markdown table."""
        rows = [_HEADINGS, ("---:",) * len(_HEADINGS), *self._rows()]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        notes = [note.replace("*", "\\*") for note in self._notes()]
        return "\n\n".join([self._summary(), "\n".join(lines), *notes]) + "\n"

    def plot(self, path: str | Path) -> None:
        """Draw reliability diagrams by proposal, before and after, and the ECE by proposal.

        Raises:
            MissingDependencyError: matplotlib is not installed.
            ConfigError: the file can't be written, or its ending is no image format.
        """
        from tokennorm.draft.calibration.plot import plot_calibration

        plot_calibration(self, path)

    def _summary(self) -> str:
        bins = len(self.before.overall.bin_count)
        return (
            f"Temperatures fitted on {self.fit_rounds} rounds of {self.fit_prompts} prompts, reported on "
            f"{self.held_rounds} rounds of {self.held_prompts} others; {bins} bins."
        )

    def _notes(self) -> list[str]:
        return [_LEGEND] if all(self.fitted) else [_LEGEND, _NOT_FITTED]

    def _rows(self) -> list[tuple[str, ...]]:
        scales = [f"{t:.3f}{'' if ok else '*'}" for t, ok in zip(self.temperatures, self.fitted, strict=True)]
        names = [str(k + 1) for k in range(len(scales))]
        before, after = self.before, self.after
        rows = zip(names, scales, before.positions, after.positions, strict=True)
        return [_row(*row) for row in rows] + [_row("all", "", before.overall, after.overall)]


def _row(name: str, scale: str, before: CalibrationMetrics, after: CalibrationMetrics) -> tuple[str, ...]:
    def both(attribute: str, factor: float = 1.0, digits: int = 3) -> str:
        values = (getattr(before, attribute), getattr(after, attribute))
        return " > ".join(_number(value, factor, digits) for value in values)

    return (
        name,
        scale,
        str(after.count),
        _number(after.frequency, 1, 3),
        both("mean_predicted"),
        both("ece", 100, 2),
        _number(after.ece_floor, 100, 2),
        both("brier"),
        both("auroc"),
    )


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def calibrate(
    rounds_by_prompt: Iterable[Iterable[Round]],
    seed: int = 0,
    *,
    num_proposals: int | None = None,
    num_bins: int = DEFAULT_BINS,
    min_rounds: int = MIN_ROUNDS,
) -> CalibrationResult:
    """Fit temperatures on one half of the prompts and report on the other.

    Args:
        rounds_by_prompt: ``[decoded.rounds for decoded in ...]``, decoded at the sampling temperature of the
            service, without a schedule.
        seed: of the split into halves.
        num_proposals: of the drafter; by default the most that were verified in a round.
        num_bins: of the ECE.
        min_rounds: the fewest rounds with a verified proposal that either half must have.

    Raises:
        DataError: too few rounds, rounds that are not by prompt, or what :meth:`PrefixOutcomes.of` refuses.
    """
    entries = list(rounds_by_prompt)
    if any(isinstance(entry, Round) for entry in entries):
        raise DataError(
            "calibrate was given rounds, not rounds by prompt",
            why="rounds of one prompt in both halves make the report look better than the service will be",
            fix="give one list of rounds for each prompt: [decoded.rounds for decoded in ...].",
        )
    outcomes = PrefixOutcomes.of(entries, num_proposals=num_proposals)
    fit, held = outcomes.split(seed)
    if min(fit.num_rounds, held.num_rounds) < max(min_rounds, 1):
        raise DataError(
            f"{fit.num_rounds} rounds of {fit.num_prompts} prompts to fit temperatures, {held.num_rounds} rounds "
            f"of {held.num_prompts} prompts to report on; each half needs {max(min_rounds, 1)} rounds",
            why="with fewer, the calibration error is mostly chance",
            fix="decode more prompts, or longer answers.",
        )
    temperatures = fit_sts(fit, num_bins=num_bins)
    return CalibrationResult(
        temperatures=tuple(temperatures),
        before=calibration_report(held, num_bins=num_bins),
        after=calibration_report(held, temperatures, num_bins=num_bins),
        fit_prompts=fit.num_prompts,
        fit_rounds=fit.num_rounds,
        held_prompts=held.num_prompts,
        held_rounds=held.num_rounds,
        fit_observed=tuple(fit.observed.sum(dim=0).tolist()),
        fit_survived=tuple(fit.survived.sum(dim=0).tolist()),
        seed=seed,
    )
