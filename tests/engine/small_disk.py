"""A disk of a few MiB that really runs full, as long as the one who runs the tests may mount one (root).

Where that isn't allowed, a limit to the size of this process's files is set instead: writes then fail in the
kernel too, with other words.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SmallDisk", "small_disk"]

_UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


@dataclass(frozen=True, kw_only=True)
class SmallDisk:
    """The disk; picklable, so that ranks can share it."""

    path: Path
    mounted: bool

    @property
    def words(self) -> str:
        """What the kernel says when a write doesn't fit."""
        return "No space left on device" if self.mounted else "File too large"

    def used(self) -> int:
        """Bytes that are taken; 0 where they can't be known."""
        return shutil.disk_usage(self.path).used if self.mounted else 0

    def fill(self, leave: int = 0) -> None:
        """Take all space but so many bytes, as another program would do."""
        if self.mounted:
            with (self.path / "filler").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.path).free - leave)
        else:
            self.limit(leave)

    def limit(self, size: int) -> None:
        """Where nothing is mounted: let no file of this process become larger."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, _UNLIMITED[1]))

    def clear(self) -> None:
        """Give the space back."""
        (self.path / "filler").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, _UNLIMITED)


@contextmanager
def small_disk(path: Path, mib: int = 8) -> Iterator[SmallDisk]:
    """Make a disk of so many MiB at ``path`` for a while."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    disk = SmallDisk(path=path, mounted=mounted)
    try:
        yield disk
    finally:
        disk.clear()
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
