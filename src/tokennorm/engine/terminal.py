"""Lines for whoever watches a run: lost when the terminal or the disk of the log is gone, and never its end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

__all__ = ["print_line", "warn_line"]


def print_line(text: str, stream: TextIO) -> bool:
    """Print a line at once; False when the stream takes none any more, from then on it is pointed at nothing.

    Raises:
        BrokenPipeError: the reader of a pipe has left, which ends a command.
    """
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        raise
    # ValueError: the stream was closed.
    except (OSError, ValueError) as error:
        _silence(stream)
        if stream is not sys.stderr:
            warn_line(f"warning: no more lines are printed here, the run goes on: {error}")
        return False
    return True


def warn_line(text: str) -> None:
    """Print a line to standard error, if anybody can read it."""
    with suppress(BrokenPipeError):
        print_line(text, sys.stderr)


def _silence(stream: TextIO) -> None:
    # What is still in the stream's buffer would fail once more when the interpreter ends, and be its exit code.
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
