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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tokennorm.errors import CheckpointError

__all__ = [
    "FORMAT",
    "checkpoint_folders",
    "payload_bytes",
    "prune",
    "read_manifest",
    "read_payload",
    "write_checkpoint",
]

FORMAT = 1
_MANIFEST = "manifest.json"
_PREFIX = "step-"
_TEMPORARY = ".partial-"
_CHUNK = 1 << 24
# Room for the archive's headers, the manifest and the file system's own bookkeeping.
_MARGIN_BYTES = 4 << 20


class _HashingFile:
    """A file open for writing that hashes what passes; the place where a full disk shows."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close()
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._hash.update(view)
        self._file.write(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()

    def close(self, *, sync: bool) -> None:
        try:
            if sync:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def entry(self) -> dict[str, object]:
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}


def payload_bytes(payload: object) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples (a shared storage counts once)."""
    seen: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)

    visit(payload)
    return sum(seen.values())


def write_checkpoint(folder: Path, step: int, payloads: Mapping[str, object], facts: Mapping[str, object]) -> Path:
    """Write ``folder/step-XXXXXXXX`` atomically and return it.

    Args:
        folder: the run's checkpoint folder, made when it is missing.
        step: optimizer steps that the state has seen.
        payloads: file name -> nested tensors and plain values, one torch archive each.
        facts: further fields of the manifest (JSON).

    Raises:
        CheckpointError: no room, or a write that failed. Older checkpoints are as they were.
    """
    target = folder / f"{_PREFIX}{step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        _check_room(folder, payload_bytes(payloads) + _MARGIN_BYTES)
        temporary.mkdir()
        entries = {name: _write_payload(temporary / name, payload) for name, payload in payloads.items()}
        manifest = {"format": FORMAT, "step": step, **facts, "files": entries}
        _write_bytes(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(temporary)
        if target.exists():
            # A damaged one of the same step: out of the readers' sight first, deleted with the leftovers.
            target.rename(folder / f"{_TEMPORARY}replaced-{target.name}")
        temporary.rename(target)
        _sync_folder(folder)
    # torch reports a failed write of its archive as RuntimeError; what lies behind it is the OSError.
    except (OSError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _write_error(error, folder, step) from error
    _remove_leftovers(folder)
    return target


def _write_payload(path: Path, payload: object) -> dict[str, object]:
    file = _HashingFile(path)
    try:
        torch.save(payload, file)  # type: ignore[arg-type]
    except BaseException:
        file.close(sync=False)
        raise
    file.close(sync=True)
    return file.entry()


def _write_bytes(path: Path, data: bytes) -> None:
    file = _HashingFile(path)
    try:
        file.write(data)
    finally:
        file.close(sync=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed:,} bytes are needed and {free:,} are free", str(folder))


def _write_error(error: Exception, folder: Path, step: int) -> CheckpointError:
    chain: list[BaseException] = [error]
    while (deeper := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(deeper)
    cause = next((link for link in reversed(chain) if isinstance(link, OSError)), error)
    intact = checkpoint_folders(folder)
    full = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: {cause}",
        why=f"the last complete checkpoint is {intact[-1].name}; it is untouched"
        if intact
        else "there is no earlier checkpoint in this run",
        fix="free some space, or give another run folder, and resume" if full else "check the folder and resume",
    )


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed save left behind."""
    for leftover in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first (a partial one has another name)."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.is_dir())


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest ``keep_last`` checkpoints; each disappears from view before it is deleted."""
    for old in checkpoint_folders(folder)[:-keep_last]:
        hidden = folder / f"{_TEMPORARY}old-{old.name}"
        old.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint after checking every file against it.

    Raises:
        CheckpointError: no checkpoint, one of another format, or one that is damaged; the file is named.
    """
    path = checkpoint / _MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        files, found = manifest["files"], manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(
            f"{checkpoint} is no complete checkpoint: it has no {_MANIFEST}",
            fix="give a run folder, or one of the step-... folders under its checkpoints/",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"{_MANIFEST} can't be read ({error})") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{checkpoint} has checkpoint format {found!r}; this version of tokennorm reads {FORMAT}",
            fix="resume with the version that wrote it (see run.json)",
        )
    for name, entry in files.items():
        _check_file(checkpoint, name, entry)
    return manifest


def _check_file(checkpoint: Path, name: str, entry: Mapping[str, object]) -> None:
    path = checkpoint / name
    if not path.is_file():
        raise _damaged(checkpoint, f"{name} is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _damaged(checkpoint, f"{name} has {size:,} bytes instead of {entry['bytes']:,}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise _damaged(checkpoint, f"the contents of {name} are not what was written (SHA-256 differs)")


def _damaged(checkpoint: Path, detail: str) -> CheckpointError:
    others = [path.name for path in checkpoint_folders(checkpoint.parent) if path.name != checkpoint.name]
    return CheckpointError(
        f"the checkpoint {checkpoint} is damaged: {detail}",
        why="training on from it would silently train other weights",
        fix=f"resume from another one ({', '.join(others)}), or copy it again" if others else "copy it again",
    )


def read_payload(checkpoint: Path, name: str) -> Any:
    """Load one archive of a checkpoint onto the CPU; only tensors and plain values, never code."""
    return torch.load(checkpoint / name, map_location="cpu", weights_only=True)
