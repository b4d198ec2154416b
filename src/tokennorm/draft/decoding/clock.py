"""Wall seconds of the parts of a decode."""

from __future__ import annotations

import time

import torch

__all__ = ["Stopwatch"]


class Stopwatch:
    """Laps, one after the other.

    Args:
        device: a CUDA device is waited for at every lap; otherwise a lap would end when its kernels are queued.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._last = self._now()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds

    def _now(self) -> float:
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()
