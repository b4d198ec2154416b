"""Going on with other ranks, threads or cuts than saved a checkpoint: what each gets, and what differs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokennorm.engine.checkpoint_files import read_archive
from tokennorm.engine.checkpoint_state import compare_values
from tokennorm.engine.distributed import Runtime
from tokennorm.errors import CheckpointError

__all__ = ["continuation_notes", "of_rank", "own_state"]


def of_rank(rank: int) -> str:
    """Return the name of a rank's archive."""
    return f"rank-{rank:05d}.pt"


def own_state(path: Path, ranks: int, runtime: Runtime) -> dict[str, Any]:
    """Return this rank's state of a checkpoint that ``ranks`` ranks saved.

    A rank that was not there gets rank 0's, as its place in the data must be.

    Raises:
        CheckpointError: the number of ranks is another one, and their places in the data differ.
    """
    rank, here = runtime.rank, runtime.world_size
    if ranks == here:
        return read_archive(path, of_rank(rank))
    everyone = [read_archive(path, of_rank(one)) for one in range(ranks)]
    if not all(_same(one["loader"], everyone[0]["loader"]) for one in everyone):
        raise CheckpointError(
            f"the checkpoint {path} was saved by {ranks} ranks that were each at a place of their own in the "
            f"data, and this run has {here}",
            why="other ranks can go on only from a place that all of them share",
            fix=f"resume on {ranks} ranks",
        )
    return everyone[rank if rank < ranks else 0]


def continuation_notes(manifest: Mapping[str, Any], layout: Mapping[str, Any], runtime: Runtime) -> list[str]:
    """Say what makes the continuation not bit for bit the undisturbed run's."""
    notes = []
    if manifest["world_size"] != runtime.world_size:
        notes.append(f"saved by {manifest['world_size']} ranks, resumed by {runtime.world_size}")
    notes += compare_values(manifest["layout"], json.loads(json.dumps(dict(layout))))
    for name, here in (("threads", torch.get_num_threads()), ("torch", torch.__version__)):
        if manifest[name] != here:
            notes.append(f"{name}: {manifest[name]} there, {here} here")
    if notes:
        notes.append("the same samples follow in the same order; weights agree up to rounding and dropout")
    return notes


def _same(one: Any, other: Any) -> bool:
    """Equality of nested plain values and tensors."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
