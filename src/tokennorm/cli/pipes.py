"""What a command does when nobody reads its output any more: ``tokennorm train sft --help | head -3``."""

from __future__ import annotations

import os
import select
import sys
from typing import IO

__all__ = ["READER_GONE", "leave_closed_pipes"]

READER_GONE = 141
"""128 + SIGPIPE: what a shell shows for any program that its reader left."""


def leave_closed_pipes() -> bool:
    """Point the standard streams that nobody reads at nothing; whether there were any.

    What is still buffered for them would otherwise fail once more when the interpreter ends, and say so.
    """
    closed = [stream for stream in (sys.stdout, sys.stderr) if _is_closed(stream)]
    for stream in closed:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    return bool(closed)


def _is_closed(stream: IO[str] | None) -> bool:
    try:
        place = stream.fileno() if stream is not None else -1
    except (OSError, ValueError):  # a stream of a test or a notebook has no file
        return False
    if place < 0:
        return False
    poll = select.poll()
    poll.register(place, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
