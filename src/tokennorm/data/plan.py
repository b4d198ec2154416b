"""The plan of an epoch: which samples make up which window. The same on every rank, whatever their number.

A window is what one optimizer step sees, on all ranks together. Since the plan knows nothing of ranks, the
samples of a window, and so its gradient, do not depend on how many there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from tokennorm.errors import ConfigError

__all__ = ["MicroBatch", "Position", "Window", "epoch_order", "plan_windows", "rank_view"]

MicroBatch = tuple[int, ...]
"""Indices of the samples, or packs, of one micro-batch."""
Window = tuple[MicroBatch, ...]
"""The micro-batches of one optimizer step, of all ranks."""

T = TypeVar("T")


class Position(NamedTuple):
    """A place in a run: the window that comes next. It is all that a resumed run has to know about data."""

    epoch: int = 0
    window: int = 0


def epoch_order(count: int, *, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """The order of ``count`` items in an epoch; depends on its arguments alone."""
    order = list(range(count))
    if shuffle:
        # Python's own generator: seeded by a string it gives the same order on every machine and version.
        random.Random(f"tokennorm {seed} {epoch}").shuffle(order)
    return order


def plan_windows(items: Sequence[int], *, micro_batch_size: int, micro_batches_per_window: int) -> list[Window]:
    """Cut an ordered epoch into windows of micro-batches.

    The last micro-batch and the last window are as short as the data make them: nothing is repeated or left out.

    Args:
        items: indices in the order of the epoch.
        micro_batch_size: items per micro-batch.
        micro_batches_per_window: of all ranks together.
    """
    _check_positive(micro_batch_size=micro_batch_size, micro_batches_per_window=micro_batches_per_window)
    return list(_chunks(list(_chunks(items, micro_batch_size)), micro_batches_per_window))


def rank_view(windows: Sequence[Sequence[T]], rank: int, world_size: int) -> list[list[T | None]]:
    """What one rank runs: micro-batches ``rank, rank + world_size, ...`` of each window.

    None stands for a dummy micro-batch: in each window every rank has the same number, so that all issue the
    same collectives.
    """
    _check_positive(world_size=world_size)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} of {world_size} ranks", fix=f"give a rank from 0 to {world_size - 1}")
    views: list[list[T | None]] = []
    for window in windows:
        mine: list[T | None] = list(window[rank::world_size])
        mine += [None] * (-(-len(window) // world_size) - len(mine))
        views.append(mine)
    return views


def _chunks(items: Sequence[T], size: int) -> Iterator[tuple[T, ...]]:
    for start in range(0, len(items), size):
        yield tuple(items[start : start + size])


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}", fix=f"set {name} to at least 1")
