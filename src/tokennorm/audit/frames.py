"""Pickled messages through a pipe, each with its length before it."""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from typing import Any

__all__ = ["PipeClosed", "read_frame", "write_frame"]

_LENGTH = struct.Struct("!Q")


class PipeClosed(Exception):  # noqa: N818 - an event, handled by whoever reads
    """The process at the other end is gone."""


def write_frame(descriptor: int, payload: bytes) -> None:
    """Send one message."""
    data = memoryview(_LENGTH.pack(len(payload)) + payload)
    while data:
        data = data[os.write(descriptor, data) :]


def read_frame(descriptor: int, *, deadline: float | None = None) -> bytes:
    """Receive one message.

    Args:
        descriptor: read end of a pipe.
        deadline: ``time.monotonic()`` after which to give up.

    Raises:
        PipeClosed: the writer is gone.
        TimeoutError: the deadline passed.
    """
    return _read(descriptor, _LENGTH.unpack(_read(descriptor, _LENGTH.size, deadline))[0], deadline)


def _read(descriptor: int, size: int, deadline: float | None) -> bytes:
    pieces = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise TimeoutError
        piece = os.read(descriptor, min(size, 1 << 20))
        if not piece:
            raise PipeClosed
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def dumps(value: Any) -> bytes:
    """Pickle, with the newest protocol."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
