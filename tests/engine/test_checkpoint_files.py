"""A checkpoint folder is complete or invisible; damage and full disks are told apart and leave the rest usable."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tokennorm.engine import checkpoint_files as files
from tokennorm.engine.checkpoint_files import checkpoint_folders, prune, read_archive, read_manifest
from tokennorm.errors import CheckpointError


def payloads(value: float = 1.0) -> dict[str, object]:
    weight = torch.full((1000,), value)
    return {
        "model.pt": {"head": weight, "embedding": weight},
        "optimizer.pt": {"state": [{"step": 3, "avg": torch.full((50_000,), value)}]},
    }


def write(
    folder: Path, step: int, value: float = 1.0, facts: Mapping[str, object] | None = None, needed: int = 204_000
) -> Path:
    hidden = files.begin(folder, step, needed)
    for name, payload in payloads(value).items():
        files.write_archive(hidden / name, payload)
    entries = {name: files.file_entry(hidden / name) for name in payloads()}
    return files.commit(hidden, step, facts or {}, entries)


def read(path: Path) -> dict[str, object]:
    manifest = read_manifest(path)
    files.check_lengths(path, manifest)
    files.check_contents(path, manifest)
    return manifest


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint_folders(folder)]


def test_round_trip_keeps_values_facts_and_ties(tmp_path: Path) -> None:
    path = write(tmp_path, 7, 2.0, {"world_size": 2})
    assert path.name == "step-00000007"
    manifest = read_manifest(path)
    assert (manifest["step"], manifest["world_size"]) == (7, 2)
    assert manifest["files"]["model.pt"]["bytes"] == (path / "model.pt").stat().st_size
    model = read_archive(path, "model.pt")
    assert torch.equal(model["head"], torch.full((1000,), 2.0))
    assert model["head"].data_ptr() == model["embedding"].data_ptr()
    assert read_archive(path, "optimizer.pt")["state"][0]["step"] == 3


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1, 1.0)
    path = write(tmp_path, 1, 5.0)
    assert read_archive(path, "model.pt")["head"][0] == 5.0
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (3, 9, 10, 100):
        write(tmp_path, step)
    prune(tmp_path, 2, (tmp_path / "step-00000003",))
    assert names(tmp_path) == ["step-00000003", "step-00000010", "step-00000100"]
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000010", "step-00000100"]
    assert sorted(os.listdir(tmp_path)) == names(tmp_path)


def test_what_is_not_whole_is_not_kept_in_place_of_what_is(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    cut(tmp_path / "step-00000009")
    garble(tmp_path / "step-00000012")
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000009", "step-00000012"]
    write(tmp_path, 15)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["step-00000006", "step-00000009", "step-00000012", "step-00000015"]


def test_a_save_killed_halfway_is_invisible_and_cleaned_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def killed(*_: object) -> None:
        raise SystemExit  # stands for SIGKILL: nothing of ours runs afterwards

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_bytes", killed)
        with pytest.raises(SystemExit):
            write(tmp_path, 2)
    assert any(name.startswith(".partial-") for name in os.listdir(tmp_path))
    assert names(tmp_path) == ["step-00000001"]
    write(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", "manifest.json"])
def test_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The kernel itself answers "no space left" (/dev/full), wherever in the save it happens."""
    good = write(tmp_path, 1)

    def full(path: Path, mode: str):
        return builtins.open("/dev/full" if Path(path).name == file else path, mode)

    with monkeypatch.context() as patch:
        patch.setattr(files, "open", full, raising=False)
        with pytest.raises((OSError, RuntimeError)) as caught:
            write(tmp_path, 2)
    message = str(files.write_error([caught.value], tmp_path, 2))
    assert "step 2 could not be written" in message
    assert "No space left on device" in message
    assert "last complete checkpoint is step-00000001" in message
    assert "free some space" in message
    files.discard(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000001"]
    read(good)


def test_too_little_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(OSError, match=r"4,398,304 bytes are needed and 100,000 are free"):
        write(tmp_path, 2)
    assert os.listdir(tmp_path) == []


def test_a_file_that_another_rank_wrote_elsewhere_is_missed(tmp_path: Path) -> None:
    hidden = files.begin(tmp_path, 2, 0)
    with pytest.raises(
        OSError, match=r"rank-00001\.pt is not seen by rank 0: the ranks need one shared file system"
    ):
        files.commit(hidden, 2, {}, {"rank-00001.pt": {}})
    assert names(tmp_path) == []


def cut(path: Path) -> None:
    (path / "model.pt").write_bytes((path / "model.pt").read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray((path / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "optimizer.pt").write_bytes(data)


def drop(path: Path) -> None:
    (path / "model.pt").unlink()


def garble(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 2, "st')


def age(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, r"model\.pt has [\d,]+ bytes instead of"),
        (flip, r"contents of optimizer\.pt are not what was written"),
        (drop, r"model\.pt is missing"),
        (garble, r"manifest\.json can't be read"),
        (age, r"checkpoint format 1; this version of tokennorm reads 2"),
        (lambda path: (path / "manifest.json").unlink(), "no complete checkpoint"),
    ],
)
def test_damage_is_refused_and_named(tmp_path: Path, harm: Callable[[Path], None], message: str) -> None:
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    read(path)
    harm(path)
    with pytest.raises(CheckpointError, match=message):
        read(path)
    read(tmp_path / "step-00000001")


def test_ranks_share_the_work_of_checking(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    flip(path)
    manifest = read_manifest(path)
    files.check_contents(path, manifest, part=0, parts=2)
    with pytest.raises(CheckpointError, match=r"contents of optimizer\.pt"):
        files.check_contents(path, manifest, part=1, parts=2)


def test_code_in_an_archive_is_never_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save(Evil(), tmp_path / "model.pt")
    with pytest.raises(Exception, match="weights_only"):
        read_archive(tmp_path, "model.pt")
    assert not (tmp_path / "owned").exists()


def test_code_in_the_index_is_never_run(tmp_path: Path) -> None:
    import pickle

    from tokennorm.engine.checkpoint_tensors import read_index

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"no business with posix\.mkdir"):
        read_index(tmp_path)
    assert not (tmp_path / "owned").exists()
