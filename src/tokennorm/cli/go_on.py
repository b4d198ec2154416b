"""The command with which a run that was stopped goes on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

__all__ = ["go_on"]


def go_on(arguments: Sequence[str], folder: Path | None, checkpoint: Path | None = None) -> str:
    """Return the command that resumes a run.

    Args:
        arguments: after the program's name, as the run was started.
        folder: its run folder, which may have been named for the time of its start.
        checkpoint: from which it goes on; one outside the folder is named again.
    """
    rest = _without(arguments, "--run.resume-from", "--run.resume_from")
    rest = [one for one in rest if one not in ("--run.resume", "--run.no-resume")]
    if rest[:1] == ["train"]:
        if rest[1:2] == ["sft"] and folder is not None and not any(one.startswith("--run.dir") for one in rest):
            rest += ["--run.dir", str(folder)]
        if folder is None or checkpoint is None or folder in checkpoint.parents:
            rest.append("--run.resume")
        else:
            rest += ["--run.resume-from", str(checkpoint)]
    return shlex.join([*_program(), *rest])


def _without(arguments: Sequence[str], *options: str) -> list[str]:
    """The arguments without these options and their value, be it the next argument or behind an equals sign."""
    kept, after = [], False
    for one in arguments:
        if not after and one.split("=")[0] not in options:
            kept.append(one)
        after = one in options
    return kept


def _program() -> list[str]:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["tokennorm"]
    local, ranks = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    nodes = [] if ranks == local else ["--nnodes", str(ranks // local)]
    return ["torchrun", *nodes, "--nproc_per_node", str(local), "-m", "tokennorm"]
