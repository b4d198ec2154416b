"""A disk that really runs full, wherever in a run: a clear error, nothing lost, and the run goes on with space."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.small_disk import SmallDisk, small_disk
from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tests.engine.toy_run import fingerprint, numbers, start
from tokennorm.engine import CheckpointStore, LoopConfig, ProgressPrinter, RunFolder, checkpoint, train
from tokennorm.engine import checkpoint_files as files
from tokennorm.engine.checkpoint_room import check_room
from tokennorm.errors import CheckpointError, RunFolderError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("full") / "whole"
    return fingerprint(start(folder)), numbers(folder)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (files, "begin"),
        (checkpoint, "save_tensors"),
        (files, "write_archive"),
        (files, "commit"),
    ],
)
def test_a_save_that_does_not_fit_ends_the_run_and_the_last_checkpoint_continues_it(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, undisturbed: Any, module: Any, name: str
) -> None:
    """Another program takes all space right before a part of the second save."""
    run, used, real = disk.path / "run", [], getattr(module, name)

    def on_a_full_disk(*args: Any) -> Any:
        if (run / "checkpoints" / "step-00000003").exists() and not used:
            used.append(disk.used())
            disk.fill()
        return real(*args)

    words = "bytes are needed and 0 are free" if disk.mounted and name == "begin" else disk.words
    with monkeypatch.context() as patch:
        patch.setattr(module, name, on_a_full_disk)
        try:
            with pytest.raises(CheckpointError) as caught:
                start(run)
        finally:
            disk.clear()
    message = str(caught.value)
    assert "the checkpoint of step 6 could not be written" in message
    assert words in message
    assert "the last complete checkpoint is step-00000003; it is untouched" in message
    assert not disk.mounted or "free some space" in message
    assert os.listdir(run / "checkpoints") == ["step-00000003"]
    assert disk.used() <= used[0], "what the save had written is gone"
    assert (fingerprint(start(run, resume=True)), numbers(run)) == undisturbed


def log_steps(folder: RunFolder, last: int) -> None:
    for step in range(2, last):
        folder.log({"step": step})


def test_files_of_the_run_folder_that_do_not_fit(disk: SmallDisk) -> None:
    folder = RunFolder(disk.path / "run")
    folder.describe({"number": 1})
    folder.log({"step": 1})
    disk.fill()
    try:
        # What is on the disk already has room up to the end of its block.
        with pytest.raises(RunFolderError, match=rf"metrics\.jsonl could not be written: .*{disk.words}"):
            log_steps(folder, 2000)
        before = (folder.path / "metrics.jsonl").read_bytes()
        with pytest.raises(RunFolderError, match=rf"run\.json could not be written: .*{disk.words}"):
            folder.describe({"number": 2})
        with pytest.raises(RunFolderError, match=rf"metrics\.jsonl could not be written: .*{disk.words}"):
            folder.forget_after(1)
    finally:
        disk.clear()
    assert (folder.path / "metrics.jsonl").read_bytes() == before
    assert json.loads((folder.path / "config.json").read_text()) == {"number": 1}
    assert sorted(os.listdir(folder.path)) == [".in-use", "config.json", "metrics.jsonl", "run.json"]
    folder.forget_after(1)
    folder.log({"step": 2})
    assert numbers(folder.path) == [{"step": 1}, {"step": 2}]


def trained(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """Train the toy for 8 steps, print, and return the notes."""
    config, progress = LoopConfig(save_every=2, **options), ProgressPrinter(8)
    store = CheckpointStore(folder, keep_last=config.keep_last)
    train(
        build_engine(total_steps=8),
        ToyWindows(repeat=2),
        total_steps=8,
        config=config,
        checkpoints=store,
        progress=progress,
    )
    return "".join(line for line in capsys.readouterr().out.splitlines() if line.startswith("note"))


def test_too_little_room_is_said_after_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Weights and two moments of 17 x 8 x 2 + 8 x 8 + 8 x 3 float64 numbers, and six counters of steps.
    each = 8 * 3 * (2 * 17 * 8 + 8 * 8 + 3 * 8) + 4 * 6
    free = {"bytes": files.MARGIN_BYTES + each - 1}
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free["bytes"]))
    with pytest.raises(CheckpointError, match=r"takes 4\.0 MiB(.|\n)*everything after step 0 be lost"):
        trained(tmp_path / "none", capsys)
    assert "step 1/8" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()
    # Two are kept, and the third is complete before the first is deleted.
    free["bytes"] = files.MARGIN_BYTES + 3 * each - 1
    assert "3 more checkpoints of 0.0 MiB will be there at once" in trained(tmp_path / "two", capsys)
    assert "2 more" not in trained(tmp_path / "one", capsys, keep_last=1)
    free["bytes"] += 1
    assert trained(tmp_path / "three", capsys) == ""


def test_room_is_counted_for_what_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(ToyLM(dtype=torch.float32))
    engine.train_step(ToyWindows().windows[0])
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=files.MARGIN_BYTES + 2**13))
    said: list[str] = []
    for number, want in ((0, "4 more"), (1, "3 more"), (3, None), (5, None)):
        for step in range(number):
            (tmp_path / files.folder_name(step)).mkdir(exist_ok=True)
        check_room(store, engine, saves=10, say=said.append)
        assert (want in said.pop()) if want else said == []
    store = CheckpointStore(tmp_path / "last", keep_last=5)
    check_room(store, engine, saves=2, say=said.append)
    assert "2 more" in said.pop()
    check_room(store, engine, saves=1, say=said.append)
    assert said == []
