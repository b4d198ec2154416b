"""A run folder belongs to one run at a time; a kill gives it back, and a file system without locks is no error."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokennorm.engine import RunFolder, Runtime, folder_lock
from tokennorm.engine.folder_lock import release_folder
from tokennorm.errors import ConfigError
from tokennorm.testing import spawn_ranks

HOLD = f"""
import sys, time, runpy
from pathlib import Path
# The file alone: importing the package would take seconds.
module = runpy.run_path({folder_lock.__file__!r})
assert module["hold_folder"](Path(sys.argv[1])) is None
print("held", flush=True)
time.sleep(600)
"""


def in_use(rank: int, world_size: int, folder: str) -> str:
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    with pytest.raises(ConfigError) as caught:
        RunFolder(folder, runtime=runtime, resume=True)
    return str(caught.value)


def test_a_folder_in_use_is_refused_on_all_ranks_until_its_run_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            for result in spawn_ranks(in_use, 2, str(tmp_path), timeout_s=240):
                assert f"the run folder {tmp_path} is in use by process {process.pid} on " in result.value
                assert "give another run folder" in result.value
            # Nothing is written before the refusal, nor read: the other run may be saving.
            assert [path.name for path in tmp_path.iterdir()] == [".in-use"]
        finally:
            process.send_signal(signal.SIGKILL)
    with RunFolder(tmp_path, resume=True) as folder:
        folder.log({"step": 1})


def test_a_folder_that_comes_into_being_meanwhile_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    late = RunFolder(tmp_path / "run", resume=True)
    (tmp_path / "run").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            for action in (late.hold, lambda: late.describe({}), lambda: late.log({"step": 1})):
                with pytest.raises(ConfigError, match="is in use by process"):
                    action()
        finally:
            process.kill()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".in-use"]


def test_closing_lets_others_in_and_a_forked_worker_does_not_keep_them_out(tmp_path: Path) -> None:
    def free() -> bool:
        with (tmp_path / ".in-use").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with RunFolder(tmp_path):
        assert not free()
        # The same process may go on with its folder, as after an error in a notebook.
        RunFolder(tmp_path)
        read, write = os.pipe()
        worker = os.fork()
        if worker == 0:
            os.write(write, b"x")
            signal.pause()
        os.read(read, 1)
        assert not free()
    try:
        assert free()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.close(read)
        os.close(write)


def test_a_file_system_without_locks_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)
    folder = RunFolder(tmp_path)
    folder.describe({})
    folder.log({"step": 1})
    assert capsys.readouterr().err.count("can't be locked here") == 1
    release_folder(tmp_path)
