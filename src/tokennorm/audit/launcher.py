"""The launcher process: forks ranks, watches over their time, and leaves none behind.

Results travel through files in a temporary folder, one per rank and job, so that what was finished before a crash
or a hang is kept; the rendezvous is a file too, so no port is taken.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tokennorm.audit.frames import PipeClosed, dumps, read_frame, write_frame
from tokennorm.audit.rank import run_rank, stack_of

__all__ = ["Outcome", "main", "serve"]

# A loop that crashes is tried again from the next job on, but not for ever.
_MAX_FAILURES = 3
_GRACE_S = 1.0
_POLL_S = 0.005


# What an error that is common under an audit means.
_HINTS = {
    "address already in use": "the loop takes a fixed port, which another process (perhaps an earlier layout of "
    "the audit) holds. Take port 0, or the group that is there already (torch.distributed.is_initialized()).",
    "process group twice": "the ranks of an audit are joined already: call init_process_group only if not "
    "torch.distributed.is_initialized().",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one job: ``values`` per rank, or a failure and its text."""

    values: list[Any] | None = None
    failure: Literal["raised", "died", "hung", "not run"] | None = None
    text: str = ""


def main(command_read: int, reply_write: int) -> None:
    """Entry point of a new process: the first message is the loop, by reference."""
    try:
        loop = pickle.loads(read_frame(command_read))
    except PipeClosed:
        return
    except BaseException:
        # The command that follows must be answered, with the reason.
        with contextlib.suppress(PipeClosed, BrokenPipeError):
            text = traceback.format_exc()
            read_frame(command_read)
            write_frame(reply_write, dumps(text))
        return
    serve(loop, command_read, reply_write)


def serve(loop: Any, command_read: int, reply_write: int) -> None:
    """Answer commands until the audit closes its end."""
    # The first optimizer imports some 800 modules: once here, instead of in every rank.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    while True:
        try:
            world_size, jobs, timeout_s = pickle.loads(read_frame(command_read))
            outcomes = _run_jobs(loop, world_size, jobs, timeout_s, command_read)
            write_frame(reply_write, dumps(outcomes))
        except (PipeClosed, BrokenPipeError):
            return


def _run_jobs(
    loop: Any, world_size: int, jobs: Sequence[Any], timeout_s: float, command_read: int
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    failures = 0
    while len(outcomes) < len(jobs):
        folder = tempfile.mkdtemp(prefix="tokennorm-audit-")
        ranks = _Ranks(loop, world_size, jobs[len(outcomes) :], timeout_s, folder)
        try:
            finished, failure = ranks.watch(command_read)
            ranks.import_modules()
        finally:
            ranks.kill()
            shutil.rmtree(folder, ignore_errors=True)
        outcomes.extend(finished)
        if failure is None:
            continue
        outcomes.append(failure)
        failures += 1
        if failure.failure == "hung" or failures == _MAX_FAILURES:
            skipped = Outcome(failure="not run", text=f"not run: an earlier layout {failure.failure}")
            outcomes.extend([skipped] * (len(jobs) - len(outcomes)))
    return outcomes


class _Ranks:
    """One group of forked ranks that works through a list of jobs."""

    def __init__(self, loop: Any, world_size: int, jobs: Sequence[Any], timeout_s: float, folder: str) -> None:
        self._jobs, self._timeout_s, self._folder = jobs, timeout_s, folder
        self._exit_codes: dict[int, int] = {}
        self._pids: list[int] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            # Nothing here listens on it; a loop that asks the environment for a port gets a free one.
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                run_rank(loop, rank, world_size, jobs, timeout_s, folder)
            self._pids.append(pid)

    def watch(self, command_read: int) -> tuple[list[Outcome], Outcome | None]:
        """Wait until all is done, a rank failed, or nothing happened for too long."""
        seen, moved = 0, time.monotonic()
        while True:
            done = len(self._results())
            if done == len(self._pids) * len(self._jobs):
                return self._finished(len(self._jobs)), None
            if done > seen:
                seen, moved = done, time.monotonic()
            self._reap()
            if any(self._exit_codes.values()) or len(self._exit_codes) == len(self._pids):
                time.sleep(_GRACE_S / 10)
                return self._crashed()
            if time.monotonic() - moved > self._timeout_s:
                return self._hung()
            if select.select([command_read], [], [], 0)[0]:
                raise PipeClosed  # nobody sends a command while one is running: the audit is gone
            time.sleep(_POLL_S)

    def import_modules(self) -> None:
        """Import here what rank 0 imported inside the person's functions, so that the next ranks needn't."""
        for name in self._read("modules").splitlines():
            if name not in sys.modules:
                # Some modules can't be found by their name, or make no sense on their own.
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)

    def kill(self) -> None:
        """End every rank and what it started, and wait for them."""
        for rank, pid in enumerate(self._pids):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if rank not in self._exit_codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # it may not have had the time to make its group
                os.waitpid(pid, 0)

    def _results(self) -> list[str]:
        return [name for name in os.listdir(self._folder) if name.startswith("result-")]

    def _reap(self) -> None:
        for rank, pid in enumerate(self._pids):
            if rank not in self._exit_codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._exit_codes[rank] = os.waitstatus_to_exitcode(status)

    def _finished(self, number: int) -> list[Outcome]:
        outcomes = []
        for job in range(number):
            values = []
            for rank in range(len(self._pids)):
                with open(os.path.join(self._folder, f"result-{job}-{rank}"), "rb") as file:
                    values.append(pickle.load(file))
            outcomes.append(Outcome(values=values))
        return outcomes

    def _complete_jobs(self) -> int:
        names = set(self._results())
        job = 0
        while all(f"result-{job}-{rank}" in names for rank in range(len(self._pids))):
            job += 1
        return job

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self._folder, name), errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def _crashed(self) -> tuple[list[Outcome], Outcome]:
        """The first error is the cause; what the other ranks say about lost connections is its effect."""
        errors = []
        for rank in range(len(self._pids)):
            text = self._read(f"error-{rank}")
            if text:
                path = os.path.join(self._folder, f"error-{rank}")
                errors.append((os.stat(path).st_mtime_ns, rank, text))
        finished = self._finished(self._complete_jobs())
        died = {rank: code for rank, code in self._exit_codes.items() if not self._read(f"error-{rank}")}
        if died:
            rank, code = min(died.items())
            said = self._read(f"output-{rank}").strip()[-500:]
            text = f"rank {rank} died with exit code {code}" + (f"; its last words: {said}" if said else "")
            return finished, Outcome(failure="died", text=text)
        _, rank, text = min(errors)
        hints = [f"\nHint: {hint}" for sign, hint in _HINTS.items() if sign in text.lower()]
        return finished, Outcome(failure="raised", text=f"rank {rank} raised:\n{text}{''.join(hints)}")

    def _hung(self) -> tuple[list[Outcome], Outcome]:
        job = self._complete_jobs()
        lines = [f"no progress for {self._timeout_s:.0f} s"]
        alive = [rank for rank in range(len(self._pids)) if rank not in self._exit_codes]
        for rank in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        for rank in alive:
            if os.path.exists(os.path.join(self._folder, f"result-{job}-{rank}")):
                lines.append(f"rank {rank} is done with this layout")
            else:
                lines.append(f"rank {rank} waits in {stack_of(self._read(f'stack-{rank}'))}")
        return self._finished(job), Outcome(failure="hung", text="\n".join(lines))
