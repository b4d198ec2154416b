"""Settings that a run goes on with on purpose, other than those it was saved with."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokennorm.engine.checkpoint_state import compare_values
from tokennorm.errors import CheckpointError, ConfigError

__all__ = ["of_another_run", "sort_out"]

# Enough to see what kind of difference it is; a foreign model would fill the screen.
_DIFFERENCES_SHOWN = 6


def sort_out(
    saved: Mapping[str, Any], own: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Compare two flat identities; return what is refused, in words, and what is granted: name -> in words.

    Args:
        saved: of the checkpoint.
        own: of the run that goes on.
        allowed: names of entries, or what they begin with (``optim`` for ``optim.lr``, ``optim.betas``, ...). One
            that is the same in both is fine: a run may be started again with the same command.

    Raises:
        ConfigError: no entry of either has such a name.
    """
    own = json.loads(json.dumps(dict(own)))
    names = sorted(saved.keys() | own.keys())
    for name in allowed:
        if not any(_covers(name, entry) for entry in names):
            close = difflib.get_close_matches(name, names, n=3)
            raise ConfigError(
                f"no entry of a run's identity is called {name!r}, which is to be allowed to change",
                why="only these decide whether a checkpoint fits; all else may change in any case",
                fix=f"did you mean {', '.join(close)}?" if close else f"the entries are {', '.join(names)}",
            )
    refused: list[str] = []
    granted: dict[str, str] = {}
    for name in names:
        for difference in compare_values(_only(saved, name), _only(own, name)):
            if any(_covers(one, name) for one in allowed):
                granted[name] = difference
            else:
                refused.append(difference)
    return refused, granted


def of_another_run(checkpoint: Path, differences: Sequence[str]) -> CheckpointError:
    """Say that a checkpoint does not fit, and why."""
    shown = list(differences[:_DIFFERENCES_SHOWN])
    if len(differences) > len(shown):
        shown.append(f"and {len(differences) - len(shown)} more")
    return CheckpointError(
        f"the checkpoint {checkpoint} belongs to another run: " + "; ".join(shown),
        why="resuming continues exactly the run that was saved; with other settings it would be neither run",
        fix="resume with the settings in the run folder's config.json, allow a change that is meant "
        "(run.allow_changes, with the name that it has above), or start a new run from its export",
    )


def _covers(name: str, entry: str) -> bool:
    return entry == name or entry.startswith(f"{name}.")


def _only(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: values[name]} if name in values else {}
