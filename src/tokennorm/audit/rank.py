"""One rank: a forked process that joins a gloo group and runs jobs until it is ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tokennorm.audit.frames import dumps

__all__ = ["run_rank", "stack_of"]

_PR_SET_PDEATHSIG = 1


def run_rank(
    loop: Any, rank: int, world_size: int, jobs: Sequence[Any], timeout_s: float, folder: str
) -> NoReturn:
    """Run every job as this rank; write each result, or the first error, to a file. Never returns."""
    try:
        _become_rank(rank, world_size, timeout_s, folder)
        known = set(sys.modules)
        for number, job in enumerate(jobs):
            result = dumps(job(loop, rank))
            if rank == 0:
                _write(folder, "modules", "\n".join(name for name in sys.modules if name not in known).encode())
            _write(folder, f"result-{number}-{rank}", result)
        # Stay until the launcher has read everything: a rank that left would break its neighbours' connections.
        time.sleep(timeout_s + 60)
    except BaseException:
        _write(folder, f"error-{rank}", _short_traceback().encode())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _write(folder: str, name: str, content: bytes) -> None:
    path = os.path.join(folder, name)
    hidden = os.path.join(folder, f".{name}")
    with open(hidden, "wb") as file:
        file.write(content)
    os.rename(hidden, path)  # complete or not there


def _become_rank(rank: int, world_size: int, timeout_s: float, folder: str) -> None:
    os.setpgid(0, 0)  # what the loop starts ends with its rank
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux: don't outlive the launcher
    output = os.open(os.path.join(folder, f"output-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # In a notebook or a test these are not the descriptors 1 and 2.
    sys.stdout = sys.stderr = os.fdopen(os.dup(output), "w", buffering=1)
    stack = open(os.path.join(folder, f"stack-{rank}"), "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Ranks share the cores of one machine; one thread each is fairest, and safe after a fork.
    torch.set_num_threads(1)
    os.environ.update(
        # Libraries that find it unset choose a number of threads themselves, and more than one hang after a fork.
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        # The launcher's own limit comes first: it can say where each rank waits.
        timeout=timedelta(seconds=4 * timeout_s + 60),
    )
    # A loop that joins or leaves a group itself is already in one, whatever address or port it asks for.
    dist.init_process_group = _already_joined
    dist.distributed_c10d.init_process_group = _already_joined
    dist.destroy_process_group = _stay
    dist.distributed_c10d.destroy_process_group = _stay


def _already_joined(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``init_process_group`` in a loop under test."""


def _stay(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``destroy_process_group`` in a loop under test."""


def _short_traceback() -> str:
    """The traceback without the audit's own frames at its beginning."""
    kind, error, trace = sys.exc_info()
    here = os.path.dirname(__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return "".join(traceback.format_exception(kind, error, trace)).strip()


def stack_of(dump: str) -> str:
    """From a faulthandler dump, the innermost call and the innermost line outside of torch and the audit."""
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', dump)
    if not frames:
        return "an unknown place"
    torch_folder = os.path.dirname(torch.__file__)
    audit_folder = os.path.dirname(__file__)
    own = [frame for frame in frames if not frame[0].startswith((torch_folder, audit_folder))]
    text = frames[0][2]
    if own:
        text += f", called at {own[0][0]}:{own[0][1]} in {own[0][2]}"
    return text
