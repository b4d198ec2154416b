"""The audit's side of its child processes: one launcher, which forks the ranks.

The launcher is a new Python process that imports torch and the person's modules once; ranks are forked from it
before any thread pool has started, which costs milliseconds where a spawned rank costs seconds of imports.
Functions travel by name. Those that have none to be found by (a lambda, a notebook's or a script's own) can't:
then the launcher itself is forked from the calling process, on one thread and with no accelerator in sight.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from tokennorm.audit.frames import PipeClosed, dumps, read_frame, write_frame
from tokennorm.audit.launcher import Outcome, serve
from tokennorm.errors import AuditError, ConfigError

__all__ = ["Workers"]

_START = "import sys; from tokennorm.audit.launcher import main; main(int(sys.argv[1]), int(sys.argv[2]))"
# Seconds that the launcher may need on top of the limits that it enforces itself.
_SLACK_S = 60.0


class Workers:
    """Context manager that owns the launcher: no process of the audit outlives it.

    Args:
        loop: what the ranks work on; pickled by reference where that is possible.
        timeout_s: seconds without progress after which ranks count as hanging.
        start_method: ``spawn`` or ``fork``; ``auto`` forks only where it has to.
    """

    def __init__(self, loop: Any, *, timeout_s: float, start_method: str = "auto") -> None:
        if start_method not in ("auto", "spawn", "fork"):
            raise ConfigError(f"start_method is {start_method!r}", fix="choose auto, spawn or fork.")
        if not hasattr(os, "fork"):
            raise ConfigError("the audit needs an operating system with fork", fix="run it on Linux or macOS.")
        self._timeout_s = timeout_s
        self._start_method = start_method
        self._loop = loop
        self._pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Workers:
        """Start the launcher."""
        payload = None if self._start_method == "fork" else _by_reference(self._loop)
        if payload is None and self._start_method == "spawn":
            raise ConfigError(
                "build, step or another function has no importable name",
                why="a new process finds functions by module and name; it can't find lambdas or a script's own.",
                fix='put them into a module, or use start_method="fork".',
            )
        command_read, self._commands = os.pipe()
        self._replies, reply_write = os.pipe()
        if payload is None:
            self._fork(command_read, reply_write)
        else:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(command_read), str(reply_write)],
                pass_fds=(command_read, reply_write),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            self._pid = self._process.pid
        os.close(command_read)
        os.close(reply_write)
        if payload is not None:
            write_frame(self._commands, payload)
        return self

    def _fork(self, command_read: int, reply_write: int) -> None:
        if torch.cuda.is_initialized():
            raise ConfigError(
                "the audit has to fork this process, and it uses an accelerator already",
                why="functions without an importable name travel by fork, which accelerators don't survive.",
                fix="put build and step (and what they use) into a module and import them from there.",
            )
        with warnings.catch_warnings():
            # Python 3.12 warns of threads: the child only ever uses the one that forked it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid:
            return
        try:
            os.setsid()
            os.close(self._commands)
            os.close(self._replies)
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            serve(self._loop, command_read, reply_write)
        finally:
            os._exit(0)

    def run(self, world_size: int, jobs: Sequence[Any], *, patience: float = 1.0) -> list[Outcome]:
        """Run jobs one after another on ``world_size`` ranks; one outcome per job, in order.

        Args:
            world_size: number of ranks.
            jobs: called with the loop and the rank.
            patience: by how much the time limit is longer for these jobs.

        Raises:
            AuditError: the person's modules can't be imported, or the launcher died.
        """
        limit = self._timeout_s * patience
        deadline = time.monotonic() + limit * (len(jobs) + 3) + _SLACK_S
        try:
            write_frame(self._commands, dumps((world_size, list(jobs), limit)))
            reply = pickle.loads(read_frame(self._replies, deadline=deadline))
        except (PipeClosed, BrokenPipeError, TimeoutError) as error:
            raise AuditError(
                f"the audit's helper process stopped answering ({type(error).__name__})",
                why="it imports the module that defines build and step, then forks the ranks.",
                fix="check that importing that module does not exit, fork or run out of memory.",
            ) from None
        if isinstance(reply, str):
            raise AuditError(
                f"the loop's module can't be imported in a new process:\n{reply}",
                fix="make sure the module imports on its own, without a process group or arguments.",
            )
        return reply

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask the launcher to end its ranks and itself; kill whatever is left."""
        with contextlib.suppress(OSError):
            os.close(self._commands)
        with contextlib.suppress(OSError):
            # The launcher ends its ranks, then itself; the pipe reads as closed when it has.
            select.select([self._replies], [], [], 3.0)
            os.close(self._replies)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def _by_reference(loop: Any) -> bytes | None:
    """The pickled loop, or None if a part of it can't be found again by another process."""
    try:
        payload = dumps(loop)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    return None if b"__main__" in payload else payload
