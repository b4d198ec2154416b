"""Runs whose data is read while they train: killed, resumed on other ranks, refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.sft.tests.test_smoke import Killed, exported, records
from recipes.sft.tests.tiny import job_of, tiny_config
from tokennorm.data import StreamWindows
from tokennorm.engine import Engine
from tokennorm.errors import CheckpointError, ConfigError, DataError
from tokennorm.recipes.sft import SftResult, run
from tokennorm.recipes.sft.config import LoopConfig, RunConfig, SftConfig, TrainConfig
from tokennorm.testing import spawn_ranks

STEPS = 9


def stream_config(folder: Path, name: str, /, resume: bool = False, **data: Any) -> SftConfig:
    plain = tiny_config(folder, name).data
    changed = {
        "stream": True,
        "eval_path": str(folder / "chats.jsonl"),
        "shuffle_buffer": 10,
        "pack_buffer": 6,
        "mixture": (f"few={folder / 'few.jsonl'}", f"many={folder / 'many.jsonl'}@2"),
    }
    return tiny_config(
        folder,
        name,
        data=dataclasses.replace(plain, **{**changed, **data}),
        train=TrainConfig(max_steps=STEPS),
        loop=LoopConfig(save_every=4),
        run=RunConfig(dir=str(folder / name), resume=resume, export=True),
    )


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("few", lines[:9]), ("many", lines[9:])):
        (tiny_folder / f"{name}.jsonl").write_text("".join(part))
    return tiny_folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> SftResult:
    """The undisturbed run."""
    torch.set_num_threads(1)
    return run(stream_config(folder, "stream"))


def kill_at(step: int, config: SftConfig) -> None:
    plain = Engine.train_step

    def dying(self: Engine, window: Any) -> Any:
        if self.step == step:
            raise Killed
        return plain(self, window)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", dying)
        with pytest.raises(Killed):
            run(config)


def test_it_learns_and_reports_what_it_read(whole: SftResult, folder: Path) -> None:
    assert whole.steps == STEPS
    assert whole.before is not None
    assert whole.after is not None
    assert whole.after < whole.before - 0.5
    steps = records(whole.folder, "loss")
    assert len(steps) == STEPS
    assert all({"loss/few", "loss/many"} <= set(step) for step in steps)
    assert len({step["effective_tokens"] for step in steps}) > 3
    data = json.loads((whole.folder / "run.json").read_text())["data"]
    assert data["stream"]["many"]["weight"] == "2"
    job = job_of(folder, data=stream_config(folder, "x").data, train=TrainConfig(max_steps=STEPS))
    assert isinstance(job.windows, StreamWindows)
    windows = iter(job.windows)
    for step in steps:
        assert sum(batch["effective_tokens"] for batch in next(windows)) == step["effective_tokens"]


def test_a_killed_run_goes_on_to_the_same_weights_bit_for_bit(
    whole: SftResult, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_at(6, stream_config(folder, "killed-stream"))
    with pytest.raises(CheckpointError, match=r"data\.stream\.shuffle_buffer: 10 there, 11 here"):
        run(stream_config(folder, "killed-stream", resume=True, shuffle_buffer=11))
    few = folder / "few.jsonl"
    content = few.read_text()
    few.write_text(content + content.splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match=r"data\.stream\.few\.bytes"):
        run(stream_config(folder, "killed-stream", resume=True))
    few.write_text(content)
    result = run(stream_config(folder, "killed-stream", resume=True))
    assert records(result.folder, "step") == records(whole.folder, "step")
    weights = exported(whole.folder)
    for name, weight in exported(result.folder).items():
        assert torch.equal(weight, weights[name]), name
    said = capsys.readouterr().out
    assert "note: pass 2 over" in said
    assert f"stream: {folder / 'many.jsonl'}: " in said


def resume_on_rank(rank: int, world_size: int, folder: str) -> int:
    config = stream_config(Path(folder), "moved-stream", resume=True)
    data = dataclasses.replace(config.data, micro_batch_size=3, micro_batches_per_window=1)
    return run(dataclasses.replace(config, data=data)).steps


def test_two_ranks_go_on_with_other_cuts_to_the_same_model(whole: SftResult, folder: Path) -> None:
    """Their windows, gradients and so weights are those of one rank, up to rounding."""
    kill_at(5, stream_config(folder, "moved-stream"))
    assert [result.value for result in spawn_ranks(resume_on_rank, 2, str(folder))] == [STEPS] * 2
    for mine, theirs in zip(records(folder / "moved-stream", "loss"), records(whole.folder, "loss"), strict=True):
        assert mine["effective_tokens"] == theirs["effective_tokens"]
        assert mine == pytest.approx(theirs, rel=1e-6)
    weights = exported(whole.folder)
    for name, weight in exported(folder / "moved-stream").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7)


def test_what_a_stream_can_not_do_is_said_before_anything_is_read(folder: Path) -> None:
    config = stream_config(folder, "x")
    with pytest.raises(ConfigError, match=r"train\.max_steps None"):
        dataclasses.replace(config, train=TrainConfig())
    with pytest.raises(ConfigError, match=r"train\.epochs 2"):
        dataclasses.replace(config, train=TrainConfig(max_steps=3, epochs=2))
    with pytest.raises(ConfigError, match=r"no data\.eval_path"):
        dataclasses.replace(config.data, eval_path=None)
    with pytest.raises(ConfigError, match="pydoc"):
        dataclasses.replace(config.data, mixture=(), path="pydoc")
    with pytest.raises(ConfigError, match=r"data\.shuffle_buffer"):
        dataclasses.replace(config.data, shuffle_buffer=0)
    train = TrainConfig(max_steps=STEPS)
    with pytest.raises(DataError, match="max_length is 300 tokens, the model has 256 positions"):
        job_of(folder, data=dataclasses.replace(config.data, max_length=300), train=train)
    none = job_of(folder, data=dataclasses.replace(config.data, eval_path=None, eval_fraction=0.0), train=train)
    assert none.held_out == ()


def test_a_bad_row_ends_the_run_where_it_is_met(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "some.jsonl"
    path.write_text("".join([*lines, "nonsense\n"]))
    config = stream_config(folder, "bad-stream", mixture=(), path=str(path))
    with pytest.raises(DataError, match=r"^some\.jsonl:39: not JSON"):
        run(config)
    assert len(records(folder / "bad-stream", "loss")) > 0, "it trained until there"
