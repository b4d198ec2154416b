"""Which checkpoint a run goes on from: rank 0 says where to look, all ranks look, and all come to the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokennorm.engine import checkpoint_files as files
from tokennorm.engine.distributed import Runtime, all_ranks_or_none, broadcast_from_main, gather_objects
from tokennorm.errors import CheckpointError, DamagedCheckpointError

__all__ = ["newest_sound", "require_checkpoint", "require_sound", "saved_identity"]


def newest_sound(folder: Path, runtime: Runtime, say: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of ``folder`` that is as it was written; None when there is none at all.

    Each damaged one that is passed over is said. Only for the run that writes to ``folder``.

    Raises:
        DamagedCheckpointError: there are some, and all are damaged; the newest is described.
    """

    def look() -> list[Path]:
        files.settle(folder)
        return files.checkpoint_folders(folder)[::-1]

    # Not every rank for itself: on a shared file system they need not see the same at the same time.
    newest_first = broadcast_from_main(all_ranks_or_none(look if runtime.is_main else list, runtime), runtime)
    first: DamagedCheckpointError | None = None
    for path in newest_first:
        damage = _damage(path, runtime)
        if damage is None:
            return path
        say(f"warning: {damage.what}; it is passed over")
        first = first or damage
    if first is not None:
        raise first
    return None


def require_sound(checkpoint: Path, runtime: Runtime) -> Path:
    """Return ``checkpoint``, that of rank 0 on all ranks.

    Raises:
        DamagedCheckpointError: it is not as it was written.
    """
    checkpoint = broadcast_from_main(checkpoint, runtime)
    damage = _damage(checkpoint, runtime)
    if damage is not None:
        raise damage
    return checkpoint


def require_checkpoint(checkpoint: Path | str, runtime: Runtime) -> None:
    """Look whether that is a checkpoint at all: soon, before a model is loaded for it.

    Raises:
        CheckpointError: it is none that this version reads.
    """
    path = Path(checkpoint)
    all_ranks_or_none(lambda: files.read_manifest(path) if runtime.is_main else None, runtime)


def saved_identity(folder: Path, checkpoint: Path | str | None, runtime: Runtime) -> dict[str, Any]:
    """Return the identity that a run would go on with, flat; the same on every rank, which all call it.

    Args:
        folder: the checkpoints of the run, of which the newest that looks whole counts.
        checkpoint: one that was named instead.
        runtime: this process's place among the ranks.

    Returns:
        What the store was given as ``identity`` when that was saved; empty when there is no checkpoint.

    Raises:
        CheckpointError: the named one can't be read.
    """

    def read() -> dict[str, Any]:
        whole = files.whole_checkpoints(folder) if checkpoint is None else [Path(checkpoint)]
        return files.read_manifest(whole[-1])["identity"] if whole else {}

    return broadcast_from_main(all_ranks_or_none(read if runtime.is_main else dict, runtime), runtime)


def _damage(checkpoint: Path, runtime: Runtime) -> DamagedCheckpointError | None:
    """What is wrong with it, the same on every rank; the work of reading it is shared."""

    def lengths() -> DamagedCheckpointError | None:
        try:
            files.check_lengths(checkpoint, files.read_manifest(checkpoint))
        except DamagedCheckpointError as error:
            return error
        return None

    damage = broadcast_from_main(all_ranks_or_none(lengths if runtime.is_main else lambda: None, runtime), runtime)
    if damage is not None:
        return damage

    def contents() -> DamagedCheckpointError | None:
        unseen = lengths()
        if unseen is not None:
            raise CheckpointError(
                f"rank {runtime.rank} does not see {checkpoint} as rank 0 does: {unseen.what}",
                fix="the ranks need one shared file system; if they have one, try again",
            )
        manifest = files.read_manifest(checkpoint)
        try:
            files.check_contents(checkpoint, manifest, part=runtime.rank, parts=runtime.world_size)
        except DamagedCheckpointError as error:
            return error
        return None

    found = gather_objects(all_ranks_or_none(contents, runtime), runtime)
    return next((one for one in found if one is not None), None)
