"""Every stage on a tiny target: from prompts to an export, the same in one process and in two ranks, resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.dspark.tests.tiny import tiny_config, write_answers
from tokennorm import cli
from tokennorm.draft import load_drafter
from tokennorm.engine import Engine, OptimConfig
from tokennorm.errors import CheckpointError, ConfigError
from tokennorm.recipes.dspark import DSparkResult, run
from tokennorm.recipes.dspark.config import RunConfig
from tokennorm.testing import spawn_ranks


def train_on_rank(rank: int, world_size: int, folder: str) -> tuple[float | None, float | None, int]:
    result = run(tiny_config(Path(folder), f"ranks-{world_size}"))
    return result.before, result.after, result.steps


@pytest.fixture(scope="module")
def one(tiny_folder: Path) -> DSparkResult:
    """The run in a process of its own: the reference of all others."""
    write_answers(tiny_folder, tiny_folder / "ranks-1")
    (result,) = spawn_ranks(train_on_rank, 1, str(tiny_folder))
    before, after, steps = result.value
    return DSparkResult(folder=tiny_folder / "ranks-1" / "drafter", before=before, after=after, steps=steps)


# What a step cost differs from run to run.
TIMES = ("seconds", "data_wait", "memory_bytes")

# What tells of a run besides its checkpoints.
FILES = ("run.json", "config.json", "metrics.jsonl")


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in line if name not in TIMES} for line in lines if kind in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_drafter(folder / "drafter", dtype=torch.float64).state_dict()


def test_it_learns_and_leaves_a_drafter(one: DSparkResult) -> None:
    assert one.before is not None
    assert one.after is not None
    assert one.steps == 36
    assert one.after > one.before + 0.3
    root = one.folder.parent
    losses = [record["loss"] for record in records(root, "loss")]
    assert losses[-1] < losses[0] - 0.5
    assert [record["step"] for record in records(root, "eval_loss")] == [0, 20, 36]
    # What is logged beside the loss are the window's means: each term, and the acceptance of each proposal.
    last = records(root, "loss")[-1]
    assert {"ce", "l1", "confidence", "tau", "accept_rate", "accept_rate_3"} <= last.keys()
    assert last["loss"] == pytest.approx(0.1 * last["ce"] + 0.9 * last["l1"] + last["confidence"], rel=1e-9)


def test_two_ranks_train_the_same_drafter(one: DSparkResult, tiny_folder: Path) -> None:
    write_answers(tiny_folder, tiny_folder / "ranks-2")
    for result in spawn_ranks(train_on_rank, 2, str(tiny_folder)):
        assert result.value[0] == pytest.approx(one.before, rel=1e-6)
        assert result.value[1] == pytest.approx(one.after, rel=1e-4)
        assert result.value[2] == one.steps
    for mine, theirs in zip(
        records(tiny_folder / "ranks-2", "loss"), records(tiny_folder / "ranks-1", "loss"), strict=True
    ):
        # The same blocks on any number of ranks, so the same weight of supervised slots.
        assert mine["effective_tokens"] == pytest.approx(theirs["effective_tokens"], rel=1e-12)
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    expected = weights(tiny_folder / "ranks-1")
    for name, weight in weights(tiny_folder / "ranks-2").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


class Killed(BaseException):
    """Nothing in the library catches this."""


def test_a_killed_training_resumes_to_the_same_weights(
    one: DSparkResult, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    write_answers(tiny_folder, tiny_folder / "killed")
    step = Engine.train_step

    def dying(self: Engine, window: Any) -> Any:
        if self.step == 17:
            raise Killed
        return step(self, window)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "train_step", dying)
        with pytest.raises(Killed):
            run(tiny_config(tiny_folder, "killed"))
    with pytest.raises(ConfigError, match="already holds a run"):
        run(tiny_config(tiny_folder, "killed"))
    resume = RunConfig(dir=str(tiny_folder / "killed"), resume=True)
    written = {name: (tiny_folder / "killed" / "train" / name).read_bytes() for name in FILES}
    with pytest.raises(CheckpointError, match=r"optim\.lr: 0\.01 there, 0\.5 here"):
        run(tiny_config(tiny_folder, "killed", run=resume, optim=OptimConfig(lr=0.5)))
    for name, content in written.items():
        assert (tiny_folder / "killed" / "train" / name).read_bytes() == content, (
            f"{name} is the run's, not the refused one's"
        )
    result = run(tiny_config(tiny_folder, "killed", run=resume))
    assert (result.before, result.after, result.steps) == (None, one.after, one.steps)
    assert "step-00000016" in capsys.readouterr().out
    assert records(tiny_folder / "killed", "step") == records(tiny_folder / "ranks-1", "step")
    expected = weights(tiny_folder / "ranks-1")
    for name, weight in weights(tiny_folder / "killed").items():
        assert torch.equal(weight, expected[name]), name


def arguments(folder: Path, run: str) -> list[str]:
    """The tiny configuration as a user would type it."""
    given = []
    for name, value in (
        ("target.path", folder / "model"),
        ("answers.prompts", folder / "prompts.jsonl"),
        ("answers.max-new-tokens", 12),
        ("cache.shard-tokens", 256),
        ("draft.block-size", 3),
        ("draft.layers", 1),
        ("draft.target-layers", "0 1"),
        ("draft.mask-token-id", 300),
        ("draft.markov-rank", 8),
        ("draft.vocabulary", 128),
        ("data.max-length", 128),
        ("data.anchors", 6),
        ("optim.lr", 0.01),
        ("train.epochs", 3),
        ("loop.log-every", 10),
        ("evaluate.prompts-per-group", 2),
        ("evaluate.untrained-prompts-per-group", 1),
        ("evaluate.max-new-tokens", 12),
        ("distributed.device", "cpu"),
        ("distributed.threads", 1),
        ("run.dir", folder / run),
    ):
        given += [f"--{name}", *str(value).split(" ")]
    return [*given, "--evaluate.no-calibrate", "--config", "demo"]


def test_one_command_goes_from_prompts_to_an_export_and_does_nothing_twice(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"say {word} {times} times", "group": group, "held_out": times == 3}
        for group, words in (("greek", ("alpha", "beta", "gamma")), ("others", ("omega", "sigma")))
        for word in words
        for times in (1, 2, 3)
    ]
    (tiny_folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["draft", "run", *arguments(tiny_folder, "all")]
    assert cli.main(argv) == 0
    lines = capsys.readouterr().out
    root = tiny_folder / "all"
    made = {path.name for path in root.iterdir()}
    assert made >= {"answers.jsonl", "held_out.jsonl", "cache", "train", "drafter", "evaluation", "export"}
    assert len((root / "answers.jsonl").read_text().splitlines()) == 10
    # Greedy speculative decoding is the target's own greedy decoding, for an untrained drafter too.
    report = json.loads((root / "evaluation" / "report.json").read_text())
    assert set(report) == {"untrained", "trained", "scheduled"}
    assert "\ntrained: 4 of 4 answers identical" in lines
    assert "\nscheduled: 4 of 4 answers identical" in lines
    assert list((root / "evaluation").glob("*.png"))
    # The schedule was chosen on the one held-out prompt that is in no table.
    assert "schedule, chosen on 1 other held-out prompts" in lines
    chosen = json.loads((root / "evaluation" / "schedule.json").read_text())
    decoded = (root / "evaluation" / "prompts.jsonl").read_text().splitlines()
    assert not {json.loads(line)["id"] for line in decoded[1:]} & set(chosen["settings"]["prompts"])
    assert json.loads(decoded[0])["settings"]["schedule"] == chosen["schedule"]
    target = AutoModelForCausalLM.from_pretrained(tiny_folder / "model")
    drafter = load_drafter(root / "export", target=target)
    assert drafter.config.draft_vocab_size == 128
    made_once = [path for path in root.rglob("*") if path.suffix in (".jsonl", ".safetensors")]
    files = {path: path.read_bytes() for path in made_once if root / "export" not in path.parents}
    assert cli.main(argv) == 0
    assert "is there already" in capsys.readouterr().out
    assert all(path.read_bytes() == content for path, content in files.items()), "nothing was done twice"
    assert cli.main([*argv, "--loss.gamma", "2.0"]) == 1
    assert "loss.gamma: 4.0 there, 2.0 here" in capsys.readouterr().err


def test_stages_need_those_before_them(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage, before in (("cache", "generate"), ("evaluate", "train dspark"), ("export", "train dspark")):
        assert cli.main(["draft", stage, *arguments(tiny_folder, "empty")]) == 1
        assert before in capsys.readouterr().err
