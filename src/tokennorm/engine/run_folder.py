"""The run folder: what was run, with what, from what code, and what came of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

from tokennorm.engine.distributed import Runtime, broadcast_from_main
from tokennorm.engine.folder_lock import FolderInUseError, hold_folder, is_held, release_folder
from tokennorm.engine.sinks import MetricSink
from tokennorm.engine.terminal import warn_line
from tokennorm.errors import ConfigError, RunFolderError

__all__ = ["RunFolder", "config_to_dict"]

_LIBRARIES = ("tokennorm", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def config_to_dict(config: Any) -> Any:
    """Return a configuration dataclass as nested JSON values."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: config_to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): config_to_dict(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [config_to_dict(value) for value in config]
    return config if config is None or isinstance(config, bool | int | float | str) else str(config)


class RunFolder:
    """Writes ``run.json``, ``config.json`` and ``metrics.jsonl`` on rank 0; other ranks know the path only.

    The folder is locked (``flock`` on a file in it, by rank 0) from when it exists until :meth:`close` or the end
    of the process, also by a kill. A process that opens a folder again goes on holding it.

    Args:
        path: the folder; it is made by :meth:`describe`, so that a run that can't start leaves nothing behind.
        runtime: this process's place among the ranks.
        resume: the run that the folder holds goes on.

    Raises:
        ConfigError: on all ranks; the folder holds a run already and this one doesn't resume it, or a run in
            another process is using it.
    """

    def __init__(self, path: Path | str, *, runtime: Runtime | None = None, resume: bool = False) -> None:
        self.path = Path(path)
        self.runtime = runtime or Runtime()
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        # Further places for the records, while a training has any open.
        self.sinks: MetricSink | None = None
        self._metrics = self.path / "metrics.jsonl"
        self._records: int | None = None
        self._resume = resume
        # Whether this object has looked for another run, on rank 0.
        self._mine = False
        self.hold()

    def __enter__(self) -> RunFolder:
        """Return the folder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do :meth:`close`."""
        self.close()

    def hold(self, *, make: bool = False) -> None:
        """Lock the folder if it is there; with ``make``, make it first. Every rank calls it.

        Raises:
            ConfigError: on all ranks: see the class, or the folder can't be made.
        """
        # Rank 0 looks before it writes anything, and every rank hears what it saw.
        problem = broadcast_from_main(self._problem(make) if self.runtime.is_main else None, self.runtime)
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Let other runs into the folder."""
        if self.runtime.is_main:
            release_folder(self.path)
            self._mine = False

    def _problem(self, make: bool) -> ConfigError | None:
        if self.path.exists() and not self.path.is_dir():
            return ConfigError(f"the run folder {self.path} is a file", fix="give another run folder")
        try:
            if make:
                self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return ConfigError(f"the run folder {self.path} can't be made: {error}", fix="give another run folder")
        if self._mine or not self.path.is_dir():
            return None
        held_before = is_held(self.path)
        try:
            note = hold_folder(self.path)
        except FolderInUseError as error:
            return ConfigError(
                str(error),
                why="two runs in one folder overwrite each other's records and checkpoints",
                fix="wait until that run has ended, or give another run folder",
            )
        if self._metrics.exists() and not self._resume:
            if not held_before:
                release_folder(self.path)
            return ConfigError(
                f"the folder {self.path} already holds a run", fix="resume it, or give another run folder"
            )
        if note is not None:
            warn_line(f"note: {note}")
        self._mine = True
        return None

    def describe(
        self, config: Any, *, facts: Mapping[str, Any] | None = None, argv: Sequence[str] | None = None
    ) -> None:
        """Make the folder and write what is run: the command, versions, git state and the resolved configuration.

        Every rank calls it.

        Raises:
            ConfigError: the folder can't be made, or a run in another process is using it.
            RunFolderError: the files can't be written; those of an earlier start are still there.
        """
        self.hold(make=True)
        if not self.runtime.is_main:
            return
        run = {
            "command": list(sys.argv if argv is None else argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "ranks": self.runtime.world_size,
            "device": str(self.runtime.device),
            "python": platform.python_version(),
            "versions": _versions(),
            "git": _git_state(),
            **(facts or {}),
        }
        self._write_json("run.json", run)
        self._write_json("config.json", config_to_dict(config))

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``; the line is on disk when this returns.

        Raises:
            RunFolderError: it can't be written; what was there is still there.
            ConfigError: :meth:`describe` was not called, and another run has come into the folder.
        """
        if self.runtime.is_main:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lines = self.records
                problem = self._problem(make=False)
                if problem is not None:
                    raise problem
                with self._metrics.open("a") as file:
                    file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
                self._records = lines + 1
            except OSError as error:
                raise _unwritten(self._metrics, error) from error
            if self.sinks is not None:
                self.sinks.log(record)

    @property
    def records(self) -> int:
        """Lines that ``metrics.jsonl`` has, as far as rank 0 knows; 0 on the others."""
        if self._records is None:
            there = self.runtime.is_main and self._metrics.exists()
            self._records = len(self._metrics.read_text().splitlines()) if there else 0
        return self._records

    def forget_after(self, step: int, *, records: int | None = None) -> None:
        """Drop the lines of what a resumed run will do again, also a last line cut off by a kill.

        Args:
            step: that the run goes on from.
            records: lines that there were when that was saved. None: all up to that step stay, without the
                skipped windows that came after it.

        Raises:
            RunFolderError: they can't be written; what was there is still there.
        """
        if not self.runtime.is_main or not self._metrics.exists():
            return
        kept = []
        for line in self._metrics.read_text().splitlines()[:records]:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            place = record.get("step", 0)
            if place < step or (place == step and (records is not None or "skipped" not in record)):
                kept.append(line + "\n")
        _replace(self._metrics, "".join(kept))
        self._records = len(kept)

    def _write_json(self, name: str, value: Any) -> None:
        _replace(self.path / name, json.dumps(value, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a whole file, or leave the one that is there."""
    temporary = path.with_name(f".partial-{path.name}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> RunFolderError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return RunFolderError(
        f"{path} could not be written: {error}",
        why="without it nobody could tell what was run and what came of it",
        fix=f"{'free some space' if full else 'check the folder'}, and resume from the last checkpoint",
    )


def _finite(value: Any) -> Any:
    """NaN and infinity are no JSON: null instead, so that any reader can read the line."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return value


def _versions() -> dict[str, str]:
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _git_state() -> dict[str, Any] | None:
    """Return commit and whether files differ from it, for the current directory; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
