"""The held-out losses that the checkpoints of a run were saved with."""

from __future__ import annotations

import math
from pathlib import Path

from tokennorm.engine import checkpoint_files as files
from tokennorm.engine.distributed import Runtime, broadcast_from_main

__all__ = ["SavedLosses"]


class SavedLosses:
    """Reads them from the manifests of whole checkpoints, and knows the lowest.

    Args:
        folder: of the checkpoints.
        runtime: this process's place among the ranks; rank 0 reads.
    """

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        self._folder, self._runtime = folder, runtime
        self._lowest: float | None = None
        self._known = False

    def best(self) -> Path | None:
        """Return the checkpoint with the lowest loss, or None when no finite loss was saved."""
        losses = self._finite()
        return min(losses, key=lambda path: (losses[path], path.name)) if losses else None

    def lower_than_all(self, loss: float | None) -> bool:
        """Whether this loss is the lowest so far, on all ranks alike, which all call it."""
        if loss is None or not math.isfinite(loss):
            return False
        if not self._known:
            own = min(self._finite().values(), default=None) if self._runtime.is_main else None
            self._lowest, self._known = broadcast_from_main(own, self._runtime), True
        return self._lowest is None or loss < self._lowest

    def add(self, loss: float | None) -> None:
        """Take the loss of a checkpoint that was just saved."""
        if self.lower_than_all(loss):
            self._lowest = loss

    def was_evaluated(self, step: int) -> bool:
        """Whether the weights of ``step`` had been evaluated when they were saved; the same on every rank."""
        own = False
        if self._runtime.is_main:
            path = self._folder / files.folder_name(step)
            own = path in files.whole_checkpoints(self._folder) and _evaluated(path)
        return broadcast_from_main(own, self._runtime)

    def _finite(self) -> dict[Path, float]:
        found = {}
        for path in files.whole_checkpoints(self._folder):
            loss = files.read_manifest(path)["held_out_loss"]
            # NaN is neither above nor below anything: it would stay the best for ever.
            if loss is not None and math.isfinite(loss):
                found[path] = loss
        return found


def _evaluated(checkpoint: Path) -> bool:
    manifest = files.read_manifest(checkpoint)
    # Those of earlier versions say it by the loss alone.
    return bool(manifest.get("evaluated", manifest["held_out_loss"] is not None))
