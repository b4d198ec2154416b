"""Reading run folders, those of runs that are still going on or were killed included."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.errors import ConfigError, DataError

__all__ = ["Record", "Run", "number", "read_run"]

Record = dict[str, Any]

# Products and differences of what is below stay finite.
BEYOND = 1e300


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder.

    Attributes:
        path: the folder that holds ``metrics.jsonl``.
        name: what tells it from the other runs of a page.
        steps: the lines of windows that moved the weights, in the order of their steps.
        skips: the lines of windows that moved nothing.
        evals: the lines of evaluations.
        facts: ``run.json``; empty when it can't be read.
        config: ``config.json``; empty when it can't be read.
        unreadable: lines of ``metrics.jsonl`` that are no JSON object with a step, such as one cut by a kill.
    """

    path: Path
    name: str
    steps: tuple[Record, ...]
    skips: tuple[Record, ...]
    evals: tuple[Record, ...]
    facts: Record
    config: Record
    unreadable: int


def number(value: Any) -> float | None:
    """Return a number as a float; None for null, NaN, what is no number and what is too big to calculate with."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < BEYOND:
        return None
    return float(value)


def num_refused(record: Record) -> int:
    """Micro-batches that the guard kept out of a window."""
    refused = record.get("refused")
    return len(refused) if isinstance(refused, list) else 0


def read_run(path: Path | str) -> Run:
    """Read a run folder, or the folder of a drafter, whose training is in ``train``.

    Raises:
        ConfigError: there is no run in that folder.
        DataError: the run has not written a line that can be read.
    """
    given = Path(path)
    folder = next((one for one in (given, given / "train") if (one / "metrics.jsonl").is_file()), None)
    if folder is None:
        missing = "it has no metrics.jsonl" if given.is_dir() else "there is no such folder"
        raise ConfigError(f"{given} is no run folder: {missing}", fix="give the folder that --run.dir named")
    kept: list[Record] = []
    unreadable = 0
    # A kill may have cut the last line inside a character.
    for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        record = _record(line)
        if record is None:
            unreadable += bool(line.strip())
            continue
        kept = _without_repeats(kept, record)
        kept.append(record)
    if not kept:
        raise DataError(
            f"{folder / 'metrics.jsonl'} holds no line that can be read ({unreadable} that can't)",
            why="a report is drawn from the lines of evaluations and steps",
            fix="wait for the first step of the run, or look at its output for an error",
        )
    return Run(
        path=folder,
        name=given.resolve().name,
        steps=tuple(one for one in kept if not _is_eval(one) and not one.get("skipped")),
        skips=tuple(one for one in kept if one.get("skipped")),
        evals=tuple(one for one in kept if _is_eval(one)),
        facts=_json(folder / "run.json"),
        config=_json(folder / "config.json"),
        unreadable=unreadable,
    )


def _record(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and number(record.get("step")) is not None else None


def _is_eval(record: Record) -> bool:
    return "eval_loss" in record


def _without_repeats(kept: list[Record], record: Record) -> list[Record]:
    """Drop what a resumed run does again: the lines from its first step on.

    A window that moved nothing and an evaluation carry the number of the step before them, so only the line of a
    step that moved the weights can repeat one; the others repeat what lies behind their step.
    """
    if not kept:
        return kept
    repeats = not _is_eval(record) and not record.get("skipped")
    last = record["step"] - 1 if repeats else record["step"]
    # Most lines go forward: nothing to drop.
    return kept if kept[-1]["step"] <= last else [one for one in kept if one["step"] <= last]


def _json(path: Path) -> Record:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
