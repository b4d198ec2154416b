"""One run at a time in a run folder: a lock that the system takes back when its process ends, however it ends."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["FolderInUseError", "hold_folder", "is_held", "release_folder"]

# The file stays when a run ends: deleting it would let a third run in beside one that waits at the old file.
LOCK_FILE = ".in-use"

# The open files of this process, by the folders that they lock.
_held: dict[Path, IO[str]] = {}


class FolderInUseError(Exception):
    """Another process runs in the folder; the text says which."""


def hold_folder(folder: Path) -> str | None:
    """Lock an existing folder for this process; one that it holds already stays locked.

    Returns:
        A note when the folder can't be locked (file systems without ``flock``, a full disk); None when it is.

    Raises:
        FolderInUseError: another process holds it.
    """
    folder = folder.resolve()
    if folder in _held:
        with suppress(OSError):
            if os.path.samestat(os.fstat(_held[folder].fileno()), (folder / LOCK_FILE).stat()):
                return None
        # The folder was deleted and made again.
        release_folder(folder)
    try:
        import fcntl

        file = (folder / LOCK_FILE).open("a+")
    except (ImportError, OSError) as error:
        return _note(folder, error)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(file)
        file.close()
        raise FolderInUseError(f"the run folder {folder} is in use{holder}") from None
    except OSError as error:
        file.close()
        return _note(folder, error)
    _held[folder] = file
    with suppress(OSError):  # who holds it is for the message only
        file.truncate(0)
        file.write(
            json.dumps(
                {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            )
        )
        file.flush()
    return None


def is_held(folder: Path) -> bool:
    """Whether this process holds the folder."""
    return folder.resolve() in _held


def release_folder(folder: Path) -> None:
    """Let others in; nothing happens when this process does not hold the folder."""
    file = _held.pop(folder.resolve(), None)
    if file is not None:
        with suppress(OSError):
            file.close()


def _holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        said = json.loads(file.read())
        return f" by process {said['process']} on {said['host']}, since {said['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _note(folder: Path, error: Exception) -> str:
    return f"nothing keeps a second run out of {folder}, which can't be locked here: {error}"


def _forked() -> None:
    # A worker would hold the folder beyond the end of the run that it was forked from.
    for file in _held.values():
        with suppress(OSError):
            file.close()
    _held.clear()


# So that no file is reported as left open.
atexit.register(lambda: [release_folder(folder) for folder in tuple(_held)])

if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forked)
