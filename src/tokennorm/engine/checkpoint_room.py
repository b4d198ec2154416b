"""Room for a run's checkpoints, looked at when a step is lost and not when a night is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from tokennorm.engine import checkpoint_files as files
from tokennorm.engine.checkpoint import CheckpointStore
from tokennorm.engine.checkpoint_state import tensor_bytes
from tokennorm.engine.distributed import all_ranks_or_none
from tokennorm.errors import CheckpointError

if TYPE_CHECKING:
    from tokennorm.engine.engine import Engine

__all__ = ["check_room"]


def check_room(store: CheckpointStore, engine: Engine, *, saves: int, say: Callable[[str], None]) -> None:
    """Compare the free space with the checkpoints of a run; every rank calls it, between two windows.

    A new checkpoint is complete before an old one is deleted: one more than are kept must fit.

    Args:
        store: of the run.
        engine: after a step, when the optimizer has all of its state.
        saves: checkpoints that the run is still going to save, at most.
        say: told when one fits but not all that will be there at once.

    Raises:
        CheckpointError: not even one fits. Ranks other than the first raise DistributedError.
    """
    each = tensor_bytes(engine, frozen=store.frozen is None)

    def check() -> None:
        there = len(files.checkpoint_folders(store.folder))
        kept = store.keep_last + store.keep_best
        more = max(1, min(there + saves, kept + 1) - there)
        folder = next(path for path in (store.folder, *store.folder.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(folder).free
        if free < each + files.MARGIN_BYTES:
            raise CheckpointError(
                f"a checkpoint of this run takes {_size(each + files.MARGIN_BYTES)}, and the disk of "
                f"{store.folder} has {_size(free)} free",
                why=f"the next save would fail, and everything after step {engine.step - 1} be lost",
                fix="free some space, give another run folder, or switch checkpoints off",
            )
        if free < more * each + files.MARGIN_BYTES:
            say(
                f"note: {more} more checkpoints of {_size(each)} will be there at once, and the disk of "
                f"{store.folder} has {_size(free)} free: free some space, or keep fewer (loop.keep_last)"
            )

    all_ranks_or_none(check if store.runtime.is_main else lambda: None, store.runtime)


def _size(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"
