"""A checkpoint on disk: a folder that is there completely, or not at all.

Everything is written under a name that no reader looks at, forced to the disk, and renamed last. A manifest
holds the length and SHA-256 of every file, so that a damaged copy is refused instead of trained on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tokennorm.engine.checkpoint_names import (
    REPLACED,
    TEMPORARY,
    checkpoint_folders,
    folder_name,
    remove_leftovers,
    set_aside,
    settle,
)
from tokennorm.errors import CheckpointError, DamagedCheckpointError

__all__ = [
    "FORMAT",
    "MARGIN_BYTES",
    "begin",
    "check_contents",
    "check_lengths",
    "checkpoint_folders",
    "commit",
    "discard",
    "file_entry",
    "folder_name",
    "prune",
    "read_archive",
    "read_manifest",
    "set_aside",
    "settle",
    "sync_file",
    "whole_checkpoints",
    "write_archive",
    "write_error",
]

FORMAT = 2
_MANIFEST = "manifest.json"
_CHUNK = 1 << 24
# Room for the archives' headers, the manifest and the file system's own bookkeeping.
MARGIN_BYTES = 4 << 20


def begin(folder: Path, step: int, needed: int) -> Path:
    """Make the hidden folder that a checkpoint is written to and return it; what a killed save left is deleted.

    Args:
        folder: the run's checkpoint folder, made when it is missing.
        step: optimizer steps that the state has seen.
        needed: bytes of its tensors.

    Raises:
        OSError: no room, or the folder can't be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder)
    remove_leftovers(folder)
    free = shutil.disk_usage(folder).free
    if free < needed + MARGIN_BYTES:
        raise OSError(
            errno.ENOSPC, f"{needed + MARGIN_BYTES:,} bytes are needed and {free:,} are free", str(folder)
        )
    temporary = folder / f"{TEMPORARY}{folder_name(step)}"
    temporary.mkdir()
    return temporary


def commit(temporary: Path, step: int, facts: Mapping[str, object], files: Mapping[str, object]) -> Path:
    """Write the manifest, the last file, and give the folder its name.

    Args:
        temporary: from :func:`begin`, with every file written and synced.
        step: optimizer steps that the state has seen.
        facts: further fields of the manifest (JSON).
        files: name -> :func:`file_entry`, of all ranks.

    Raises:
        OSError: it can't be written, or a file that another rank wrote is not there.
    """
    missing = [name for name in files if not (temporary / name).is_file()]
    if missing:
        raise OSError(errno.ENOENT, f"{missing[0]} is not seen by rank 0: the ranks need one shared file system")
    folder, target = temporary.parent, temporary.parent / folder_name(step)
    manifest = {"format": FORMAT, "step": step, **facts, "files": dict(files)}
    _write_bytes(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
    _sync_folder(temporary)
    if target.exists():
        # One of the same step, without its loss perhaps. Whoever is killed between the two renames leaves it to
        # settle().
        target.rename(folder / f"{REPLACED}{target.name}")
    temporary.rename(target)
    _sync_folder(folder)
    remove_leftovers(folder)
    return target


def discard(folder: Path, step: int) -> None:
    """Delete what a failed save wrote."""
    settle(folder)
    shutil.rmtree(folder / f"{TEMPORARY}{folder_name(step)}", ignore_errors=True)


def write_archive(path: Path, payload: object) -> None:
    """Write nested tensors and plain values as one torch archive, down to the disk."""
    with open(path, "wb") as file:
        torch.save(payload, file)
        file.flush()
        os.fsync(file.fileno())


def read_archive(checkpoint: Path, name: str) -> Any:
    """Load one archive of a checkpoint onto the CPU; only tensors and plain values, never code."""
    return torch.load(checkpoint / name, map_location="cpu", weights_only=True)


def file_entry(path: Path) -> dict[str, object]:
    """Return the length and SHA-256 of a file, as the manifest has them."""
    digest, length = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            length += len(chunk)
    return {"bytes": length, "sha256": digest.hexdigest()}


def sync_file(path: Path) -> None:
    """Force a file that somebody else wrote down to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_error(errors: Iterable[BaseException], folder: Path, step: int) -> CheckpointError:
    """Say in words why a checkpoint could not be written; ``errors`` are those of all ranks that had one."""
    links: list[BaseException] = list(errors)
    for link in links:  # grows while it runs: what torch reports often hides the OSError that caused it
        links += [
            deeper for deeper in (link.__cause__, link.__context__) if deeper is not None and deeper not in links
        ]
    cause = next((link for link in reversed(links) if isinstance(link, OSError)), links[0])
    intact = whole_checkpoints(folder)
    full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: {cause}",
        why=f"the last complete checkpoint is {intact[-1].name}; it is untouched"
        if intact
        else "there is no earlier checkpoint in this run",
        fix="free some space, or give another run folder, and resume" if full else "check the folder and resume",
    )


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints with a readable manifest and all files at their length, the oldest step first."""
    return [path for path in checkpoint_folders(folder) if _looks_whole(path)]


def _looks_whole(checkpoint: Path) -> bool:
    try:
        check_lengths(checkpoint, read_manifest(checkpoint))
    except CheckpointError:
        return False
    return True


def prune(folder: Path, keep_last: int, keep: Collection[Path] = ()) -> None:
    """Delete all whole checkpoints but the newest ``keep_last`` and those in ``keep``.

    Each disappears from view before it is deleted. What is not whole neither counts nor is touched.
    """
    for old in whole_checkpoints(folder)[:-keep_last]:
        if old in keep:
            continue
        hidden = folder / f"{TEMPORARY}old-{old.name}"
        old.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; its files are looked at by :func:`check_lengths` and the next.

    Raises:
        DamagedCheckpointError: no manifest, or one that can't be read.
        CheckpointError: another format.
    """
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        _, found = manifest["files"], manifest["format"]
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{checkpoint} is no complete checkpoint: it has no {_MANIFEST}",
            fix="give one of the step-... folders under a run's checkpoints/",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"{_MANIFEST} can't be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has checkpoint format {found!r}; this version of tokennorm reads {FORMAT}",
            fix="resume with the version that wrote it (see run.json)",
        )
    return manifest


def check_lengths(checkpoint: Path, manifest: Mapping[str, Any]) -> None:
    """Look whether all files of the manifest are there, as long as they were written.

    Raises:
        DamagedCheckpointError: the file is named.
    """
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise _damaged(checkpoint, f"{name} is missing")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise _damaged(checkpoint, f"{name} has {size:,} bytes instead of {entry['bytes']:,}")


def check_contents(checkpoint: Path, manifest: Mapping[str, Any], *, part: int = 0, parts: int = 1) -> None:
    """Compare the contents of every ``parts``-th file with the manifest.

    Raises:
        DamagedCheckpointError: the file is named.
    """
    for name, entry in sorted(manifest["files"].items())[part::parts]:
        try:
            found = file_entry(checkpoint / name)
        except OSError as error:
            raise _damaged(checkpoint, f"{name} can't be read ({error})") from error
        if found != entry:
            raise _damaged(checkpoint, f"the contents of {name} are not what was written (SHA-256 differs)")


def _damaged(checkpoint: Path, detail: str) -> DamagedCheckpointError:
    others = [path.name for path in checkpoint_folders(checkpoint.parent) if path.name != checkpoint.name]
    return DamagedCheckpointError(
        f"the checkpoint {checkpoint} is damaged: {detail}",
        why="training on from it would silently train other weights",
        fix=f"resume from another one ({', '.join(others)}), or copy it again" if others else "copy it again",
    )
