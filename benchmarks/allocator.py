"""What this process has in use of the memory that it holds, as glibc's allocator tells it."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["give_back", "memory_in_use"]


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL("libc.so.6")
_libc.mallinfo2.restype = _Mallinfo2


def memory_in_use() -> dict[str, int]:
    """Return bytes and a number.

    ``used_bytes``: what was asked for and not freed: tensors, what libraries hold, Python objects above 512 bytes.
    ``kept_bytes``: freed, and not given back to the system. ``python_blocks``: living blocks of Python's own
    allocator, which holds the small objects.
    """
    info = _libc.mallinfo2()
    return {
        "used_bytes": info.uordblks + info.hblkhd,
        "kept_bytes": info.fordblks,
        "python_blocks": sys.getallocatedblocks(),
    }


def give_back() -> None:
    """Give freed blocks back to the system (``malloc_trim``)."""
    _libc.malloc_trim(0)
