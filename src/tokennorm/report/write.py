"""Writing the page beside what it shows."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tokennorm.errors import ConfigError
from tokennorm.report.page import page
from tokennorm.report.runs import Run, read_run

__all__ = ["write_report"]


def write_report(folders: Sequence[Path | str], output: Path | str | None = None) -> Path:
    """Write the page of one run, or of several to compare.

    Args:
        folders: run folders, also of runs that are going on.
        output: the file; by default ``report.html`` in the run folder, or ``comparison.html`` in the first of
            several.

    Returns:
        The file.

    Raises:
        ConfigError: a folder holds no run, is given twice, or the page can't be written.
        DataError: a run has no line that can be read.
    """
    runs = _told_apart([read_run(folder) for folder in folders])
    if not runs:
        raise ConfigError("no run folder was given", fix="give one, or several to compare")
    path = Path(output) if output else runs[0].path / ("report.html" if len(runs) == 1 else "comparison.html")
    try:
        # Replaced in one go: somebody may have the page open while a run goes on.
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(page(runs), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"the page {path} can't be written: {error}", fix="give --output FILE") from error
    return path


def _told_apart(runs: list[Run]) -> list[Run]:
    """Name runs by their folder, and by as many of the folders above as tell them apart."""
    places = [run.path.resolve() for run in runs]
    twice = [place for place, count in Counter(places).items() if count > 1]
    if twice:
        raise ConfigError(f"{twice[0]} is given twice", fix="give each run once")
    for depth in range(1, 8):
        names = [run.name if depth == 1 else "/".join(run.path.resolve().parts[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return [replace(run, name=str(place)) for run, place in zip(runs, places, strict=True)]
