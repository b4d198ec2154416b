"""Ending a run on request: a signal asks for it, and all ranks end together after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RunStopped", "StopRequest"]

# A terminal's Ctrl-C reaches every rank, and torchrun passes it on: within this time it is the same request.
_SAME_REQUEST_S = 2.0


class RunStopped(KeyboardInterrupt):
    """A run that ended because a signal asked for it, after a whole step.

    Not an :class:`Exception`, so that no handler of errors takes it for one.

    Attributes:
        signal: the signal's number.
        exit_code: what the process should end with: 128 + signal, as a shell counts (143 for SIGTERM, 130 for
            SIGINT).
        checkpoint: from which the run goes on; None when nothing was saved.
        folder: the run folder, if the run has one.
    """

    def __init__(
        self, message: str, *, signal: int, checkpoint: Path | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(message)
        self.signal, self.checkpoint, self.folder = signal, checkpoint, folder
        self.exit_code = 128 + signal


class StopRequest:
    """Context in which SIGTERM and SIGINT ask for an end of the run instead of killing the process.

    A second SIGINT, some seconds after the first, raises KeyboardInterrupt at once. Outside the main thread, where
    Python allows no handlers, signals do what they did before.

    Args:
        device: where the ranks' common flag is reduced: that of the process group's backend.
        group: the ranks that end together; None is the default group, or this process alone.
        announce: print a line to standard error when a signal comes; on the rank that prints.
    """

    def __init__(
        self, *, device: torch.device, group: dist.ProcessGroup | None = None, announce: bool = True
    ) -> None:
        self._device, self._group, self._announce = device, group, announce
        self._process = os.getpid()
        self._before: dict[int, Any] = {}
        self._received, self._received_at = 0, 0.0

    def __enter__(self) -> StopRequest:
        """Install the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                # Who ignores a signal (nohup, a shell's background jobs) goes on ignoring it.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def agreed(self) -> int:
        """Return the signal that any rank received, 0 without one; the same on every rank, which must all call it.

        One all-reduce of one number for several ranks, nothing for one.
        """
        return self.agree()[0]

    def agree(self, *measured: int) -> tuple[int, ...]:
        """Return :meth:`agreed`, and of each measured number the largest that any rank gave, in one message."""
        own = (self._received, *measured)
        if not dist.is_initialized() or dist.get_world_size(self._group) == 1:
            return own
        most = torch.tensor(own, dtype=torch.int64, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(most.tolist())

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A worker that was forked from this process inherits the handler, but not the run.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if number == signal.SIGINT and self._received and now - self._received_at > _SAME_REQUEST_S:
            raise KeyboardInterrupt
        if not self._received:
            self._received_at = now
            if self._announce:
                # Not print: the signal may have come in the middle of one.
                name = signal.Signals(number).name
                with suppress(OSError):
                    os.write(2, f"{name}: the run ends after this step (Ctrl-C again: at once)\n".encode())
        self._received = max(self._received, number)
