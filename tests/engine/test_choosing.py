"""Which checkpoint a run goes on from: the newest that is sound, or a chosen one; nothing else is read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tests.engine.toy_run import IDENTITY, Killed, dies_in, fingerprint, numbers, start
from tokennorm.engine import CheckpointStore, RunFolder, resume_run
from tokennorm.errors import CheckpointError, DamagedCheckpointError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """An undisturbed run, and its folder; it has checkpoints of the steps 9 and 12."""
    folder = tmp_path_factory.mktemp("choosing") / "whole"
    return fingerprint(start(folder)), folder


def killed(folder: Path) -> Path:
    """A run that was killed after step 8, with checkpoints of the steps 3 and 6; their folder."""
    with pytest.raises(Killed):
        start(folder, disturb=dies_in(8))
    assert sorted(os.listdir(folder / "checkpoints")) == ["step-00000003", "step-00000006"]
    return folder / "checkpoints"


def flip(path: Path) -> None:
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[-2000] ^= 1
    (path / "__0_0.distcp").write_bytes(data)


def cut(path: Path) -> None:
    (path / "state.pt").write_bytes(b"")


def empty(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("harm", [flip, cut, empty])
def test_a_damaged_newest_checkpoint_is_passed_over(
    tmp_path: Path, whole: tuple[dict[str, Any], Path], harm: Callable[[Path], None]
) -> None:
    checkpoints, said = killed(tmp_path), []
    harm(checkpoints / "step-00000006")
    assert fingerprint(start(tmp_path, resume=True, say=said.append)) == whole[0]
    assert numbers(tmp_path) == numbers(whole[1])
    assert f"warning: the checkpoint {checkpoints / 'step-00000006'} is damaged" in said[0] or harm is empty
    assert said[0].endswith("it is passed over")
    assert said[-1] == f"resumed from {checkpoints / 'step-00000003'}"
    (aside,) = checkpoints.glob("set-aside-*")
    assert os.listdir(aside) == ["step-00000006"]


def test_when_all_are_damaged_the_run_does_not_start_from_the_beginning(tmp_path: Path) -> None:
    checkpoints = killed(tmp_path)
    for path in checkpoints.iterdir():
        flip(path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(DamagedCheckpointError, match="step-00000006 is damaged: the contents of __0_0"):
        start(tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_folders_with_other_names_are_neither_read_nor_deleted(
    tmp_path: Path, whole: tuple[dict[str, Any], Path]
) -> None:
    checkpoints = killed(tmp_path)
    foreign = ("step-foo", "step-99999999-old", "step-7", "step-000000099")
    for name in foreign:
        shutil.copytree(checkpoints / "step-00000003", checkpoints / name)
    assert CheckpointStore(checkpoints).latest() == checkpoints / "step-00000006"
    assert fingerprint(start(tmp_path, resume=True)) == whole[0]
    assert sorted(os.listdir(checkpoints)) == sorted([*foreign, "step-00000009", "step-00000012"])


def test_a_chosen_checkpoint_of_the_run_itself(tmp_path: Path, whole: tuple[dict[str, Any], Path]) -> None:
    """What came after it is nothing that the run may go on from, even when it is killed before it saves."""
    run = tmp_path / "run"
    shutil.copytree(whole[1], run)
    chosen = run / "checkpoints" / "step-00000009"
    with pytest.raises(Killed):
        start(run, resume=True, checkpoint=chosen, disturb=dies_in(10))
    assert CheckpointStore(run / "checkpoints").latest() == chosen
    assert numbers(run)[-1]["step"] == 10
    said: list[str] = []
    assert fingerprint(start(run, resume=True, say=said.append)) == whole[0]
    assert said == [f"resumed from {chosen}"]
    assert numbers(run) == numbers(whole[1])


def test_a_chosen_checkpoint_of_another_run(tmp_path: Path, whole: tuple[dict[str, Any], Path]) -> None:
    chosen, before = whole[1] / "checkpoints" / "step-00000009", sorted(whole[1].rglob("*"))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        start(tmp_path, resume=True, checkpoint=whole[1])
    assert fingerprint(start(tmp_path, resume=True, checkpoint=chosen)) == whole[0]
    assert sorted(whole[1].rglob("*")) == before
    assert numbers(tmp_path) == [line for line in numbers(whole[1]) if line["step"] > 9]
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000012"]


def test_a_chosen_checkpoint_that_is_damaged_is_refused(tmp_path: Path) -> None:
    checkpoints = killed(tmp_path)
    flip(checkpoints / "step-00000006")
    with pytest.raises(DamagedCheckpointError, match=r"resume from another one \(step-00000003\)"):
        start(tmp_path, resume=True, checkpoint=checkpoints / "step-00000006")


def test_a_refused_checkpoint_changes_nothing_on_the_disk(tmp_path: Path) -> None:
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    killed(tmp_path)
    before = files()
    store = CheckpointStore(tmp_path / "checkpoints", identity={**IDENTITY, "model": "other"})
    engine = build_engine(ToyLM(dtype=torch.float32))
    with pytest.raises(CheckpointError, match="belongs to another run: model: 'toy' there, 'other' here"):
        resume_run(engine, ToyWindows(), store, RunFolder(tmp_path, resume=True))
    assert files() == before


def test_a_save_killed_between_its_two_renames_leaves_the_checkpoint_that_it_was_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, store = build_engine(ToyLM(dtype=torch.float32)), CheckpointStore(tmp_path)
    store.save(engine, loader_state={"place": 1})
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name == ".partial-step-00000000":
            raise SystemExit  # stands for SIGKILL: nothing of ours runs afterwards
        return real(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(SystemExit):
            store.save(engine, loader_state={"place": 2})
    assert CheckpointStore(tmp_path).latest() is None, "the killed save lies between its two renames"
    assert CheckpointStore(tmp_path).restore(engine) == {"place": 1}
    store.save(engine, loader_state={"place": 3})
    assert os.listdir(tmp_path) == ["step-00000000"]
    assert store.restore(engine) == {"place": 3}
