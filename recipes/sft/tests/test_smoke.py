"""Real training of a tiny Llama: the same in one process and in two ranks, resumed, exported and loaded."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.sft.tests.tiny import tiny_config
from tokennorm.engine import CausalLMObjective, Engine, OptimConfig, Runtime, evaluate
from tokennorm.errors import CheckpointError
from tokennorm.kit import apply_chunked_token_loss_patch
from tokennorm.recipes.sft import SftResult, prepare, run
from tokennorm.recipes.sft.config import RunConfig, SftConfig
from tokennorm.testing import spawn_ranks


def train_on_rank(rank: int, world_size: int, folder: str) -> tuple[float | None, float | None, int]:
    result = run(tiny_config(Path(folder), f"ranks-{world_size}"))
    return result.before, result.after, result.steps


@pytest.fixture(scope="module")
def one(tiny_folder: Path) -> SftResult:
    """The run in a process of its own: the reference of all others."""
    (result,) = spawn_ranks(train_on_rank, 1, str(tiny_folder))
    before, after, steps = result.value
    return SftResult(folder=tiny_folder / "ranks-1", before=before, after=after, steps=steps)


# What a step cost differs from run to run.
TIMES = ("seconds", "data_wait", "memory_bytes")

# What tells of a run besides its checkpoints.
FILES = ("run.json", "config.json", "metrics.jsonl")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in TIMES} for line in lines if kind in line]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float64).state_dict()


def test_it_learns_and_leaves_a_complete_run_folder(one: SftResult) -> None:
    assert one.before is not None
    assert one.after is not None
    assert one.steps == 10
    assert one.after < one.before - 1.0
    losses = [record["loss"] for record in records(one.folder, "loss")]
    assert losses[-1] < losses[0] - 1.0
    assert [record["step"] for record in records(one.folder, "eval_loss")] == [0, 5, one.steps]
    assert {path.name for path in one.folder.iterdir()} == {
        ".in-use",
        "checkpoints",
        "config.json",
        "export",
        "metrics.jsonl",
        "run.json",
    }
    config = json.loads((one.folder / "config.json").read_text())
    assert config["optim"]["lr"] == 0.01
    assert config["data"]["micro_batches_per_window"] == 3
    assert json.loads((one.folder / "run.json").read_text())["ranks"] == 1
    assert len(list((one.folder / "checkpoints").iterdir())) == 2


def test_two_ranks_train_the_same_model(one: SftResult, tiny_folder: Path) -> None:
    results = spawn_ranks(train_on_rank, 2, str(tiny_folder))
    for result in results:
        assert result.value[0] == pytest.approx(one.before, rel=1e-10)
        assert result.value[1] == pytest.approx(one.after, rel=1e-6)
        assert result.value[2] == one.steps
    two = tiny_folder / "ranks-2"
    for mine, theirs in zip(records(two, "loss"), records(one.folder, "loss"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)
        assert mine["effective_tokens"] == theirs["effective_tokens"]
    weights = exported(one.folder)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder / "model", dtype=torch.float64).state_dict()
    for name, weight in exported(two).items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7)
        assert (weight - start[name]).abs().max() > 1e-3, "everything was trained"


def test_the_export_is_an_ordinary_model_with_the_reported_loss(one: SftResult, tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(one.folder / "export", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(one.folder / "export")
    assert (type(model).__name__, model.config.architectures) == ("LlamaForCausalLM", ["LlamaForCausalLM"])
    assert model.config.use_cache
    job = prepare(tiny_config(tiny_folder, "unused"), Runtime())
    report = evaluate(apply_chunked_token_loss_patch(model), CausalLMObjective(), job.held_out)
    assert report.loss == pytest.approx(one.after, rel=1e-9)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say alpha 2 times"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


class Killed(BaseException):
    """Nothing in the library catches this."""


def test_a_killed_run_resumes_to_the_same_weights(
    one: SftResult, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    step = Engine.train_step

    def dying(self: Engine, window: Any) -> Any:
        if self.step == 5:
            raise Killed
        return step(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train_step", dying)
        with pytest.raises(Killed):
            run(tiny_config(tiny_folder, "killed"))
    resume = RunConfig(dir=str(tiny_folder / "killed"), resume=True, question="say beta 1 times", answer_tokens=4)
    written = {name: (tiny_folder / "killed" / name).read_bytes() for name in FILES}
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.01 there, 0\.5 here"):
        run(tiny_config(tiny_folder, "killed", run=resume, optim=OptimConfig(lr=0.5)))
    for name, content in written.items():
        assert (tiny_folder / "killed" / name).read_bytes() == content, (
            f"{name} is the run's, not the refused one's"
        )
    result = run(tiny_config(tiny_folder, "killed", run=resume))
    assert (result.before, result.after, result.steps) == (None, one.after, one.steps)
    assert records(result.folder, "step") == records(one.folder, "step")
    weights = exported(one.folder)
    for name, weight in exported(result.folder).items():
        assert torch.equal(weight, weights[name]), name
    lines = capsys.readouterr().out
    assert "resumed from" in lines
    assert "step-00000004" in lines
    assert lines.count("question: say beta 1 times\nanswer ") == 2


def test_a_finished_run_goes_on_with_more_steps_at_another_rate(tiny_folder: Path) -> None:
    def config(steps: int, lr: float, **go_on: Any) -> SftConfig:
        settings = tiny_config(tiny_folder, "longer", optim=OptimConfig(lr=lr, warmup=1))
        train = replace(settings.train, max_steps=steps)
        return replace(settings, train=train, run=RunConfig(dir=str(tiny_folder / "longer"), **go_on))

    run(config(4, 0.01))
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.01 there, 0\.005 here; train\.max_steps: 4"):
        run(config(6, 0.005, resume=True))
    result = run(config(6, 0.005, resume=True, allow_changes=("optim.lr", "train.max_steps")))
    assert result.steps == 6
    lines = records(result.folder, "loss")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    # The new schedule from where it would be: a cosine over six steps.
    assert lines[4]["lr"] == pytest.approx(0.005 * 0.5 * (1 + math.cos(math.pi * 4 / 5)))
    (change,) = json.loads((result.folder / "run.json").read_text())["changes"]
    assert change == {
        "step": 4,
        "changed": ["optim.lr: 0.01 there, 0.005 here", "train.max_steps: 4 there, 6 here"],
    }
