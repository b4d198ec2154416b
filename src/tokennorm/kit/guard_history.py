"""What losses have been like lately: the reference that a spike is measured against."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

from tokennorm.errors import KitUsageError

__all__ = ["LossHistory"]


class LossHistory:
    """The last ``window_size`` finite losses per token, those refused as spikes included, and their median.

    The median is what makes both work: a few spikes hardly move it, so they don't raise the limit for the next
    one; and when the losses have changed for good it follows as soon as half of the history is new, so that a
    guard refuses at most ``window_size // 2 + 1`` losses of a steady new level and then goes on.

    Args:
        spike_multiplier: a loss above this many times the median is a spike; above 1. ``math.inf``: none is.
        window_size: losses that are remembered.
        min_history: losses that must be remembered before any is called a spike.

    Raises:
        KitUsageError: an argument is out of range.
    """

    def __init__(self, *, spike_multiplier: float, window_size: int, min_history: int) -> None:
        if not spike_multiplier > 1:
            raise KitUsageError(
                f"spike_multiplier is {spike_multiplier}",
                why="with 1 or less, half of all ordinary losses would be refused.",
                fix="give a number above 1, e.g. 4; math.inf refuses non-finite losses only.",
            )
        if not 1 <= min_history <= window_size:
            raise KitUsageError(
                f"min_history is {min_history}, window_size {window_size} (both in micro-batches)",
                why="a history never holds more than window_size losses, and a median needs one at least.",
                fix="give 1 <= min_history <= window_size.",
            )
        self.spike_multiplier = float(spike_multiplier)
        self.min_history = min_history
        self._losses: deque[float] = deque(maxlen=window_size)

    @property
    def losses(self) -> tuple[float, ...]:
        """The remembered losses per token, oldest first (nats)."""
        return tuple(self._losses)

    @property
    def limit(self) -> float | None:
        """What a loss has to exceed to be a spike (nats per token); None while nothing is called a spike.

        That is: too few losses so far, or a median that is not positive, of which a multiple means nothing.
        """
        if len(self._losses) < self.min_history or math.isinf(self.spike_multiplier):
            return None
        median = statistics.median(self._losses)
        return self.spike_multiplier * median if median > 0 else None

    def add(self, loss: float) -> None:
        """Remember a loss per token.

        Raises:
            KitUsageError: it is NaN or infinite; a median over it would mean nothing.
        """
        if not math.isfinite(loss):
            raise KitUsageError(f"a loss of {loss} was to be remembered", fix="remember finite losses only.")
        self._losses.append(loss)

    def replace(self, losses: Iterable[float]) -> None:
        """Remember these instead (the last ``window_size`` of them)."""
        self._losses.clear()
        for loss in losses:
            self.add(float(loss))
