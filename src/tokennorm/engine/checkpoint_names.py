"""The checkpoints of a run by their names: which are ours, in which order, and what a kill left of them."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

__all__ = [
    "REPLACED",
    "TEMPORARY",
    "checkpoint_folders",
    "folder_name",
    "remove_leftovers",
    "set_aside",
    "settle",
]

_PREFIX = "step-"
# What no reader looks at: a checkpoint that is being written, or one that it replaces.
TEMPORARY = ".partial-"
REPLACED = f"{TEMPORARY}replaced-"


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{_PREFIX}{step:08d}"


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return what has the name of a checkpoint, the oldest step first; other names are not ours."""
    if not folder.is_dir():
        return []
    found = {step: path for path in folder.iterdir() if (step := _step_of(path)) is not None and path.is_dir()}
    return [found[step] for step in sorted(found)]


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, if the name is exactly the one that it is given."""
    number = re.fullmatch(rf"{_PREFIX}(\d+)", path.name)
    return int(number[1]) if number and folder_name(int(number[1])) == path.name else None


def settle(folder: Path) -> None:
    """Give a checkpoint its name back that a killed save had moved away to replace it.

    Only for the run that writes to ``folder``: another one's save may be between its two renames.
    """
    for replaced in folder.glob(f"{REPLACED}{_PREFIX}*"):
        target = folder / replaced.name.removeprefix(REPLACED)
        if not target.exists():
            replaced.rename(target)


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed save left behind."""
    for leftover in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def set_aside(folder: Path, after: int) -> Path | None:
    """Move the checkpoints of steps after ``after`` to a folder below, and return it; None when there are none."""
    newer = [path for path in checkpoint_folders(folder) if int(path.name.removeprefix(_PREFIX)) > after]
    if not newer:
        return None
    aside = folder / f"set-aside-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.mkdir(exist_ok=True)
    # The newest first: whatever a kill leaves behind, what is there are the steps up to one.
    for path in reversed(newer):
        path.rename(aside / path.name)
    return aside
