"""Python's garbage collector in a long run: at the same steps on all ranks, and without what was there before."""

from __future__ import annotations

import gc
from types import TracebackType

__all__ = ["GarbageCollection"]


class GarbageCollection:
    """Collects cyclic garbage every so many steps, as long as this context lasts.

    Python looks for it when enough objects have piled up. A training makes few that last, some of which hold
    tensors: left alone, memory grows for thousands of steps, and each rank stops for its collection when its own
    time has come, with the others waiting. Model and data, millions of objects that stay, are left out of a
    collection's sight (``gc.freeze``), which makes it short. Who has done that himself is left alone.

    Args:
        every: steps between collections.
    """

    def __init__(self, every: int) -> None:
        self._every, self._ours = every, False

    def __enter__(self) -> GarbageCollection:
        """Settle what is there."""
        self._ours = gc.get_freeze_count() == 0
        if self._ours:
            gc.collect()
            gc.freeze()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Hand all objects back."""
        if self._ours:
            gc.unfreeze()

    def after(self, step: int) -> None:
        """Collect if it is time; called after each step."""
        if step % self._every == 0:
            gc.collect()
