"""The option guard: it reaches the engine, what is refused is reported with its text, a checkpoint knows it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.sft.tests.tiny import tiny_config
from tokennorm.engine import CausalLMObjective, CheckpointStore, OptimConfig, Runtime
from tokennorm.errors import CheckpointError, ConfigError
from tokennorm.recipes.sft import default, prepare, run
from tokennorm.recipes.sft.config import GuardConfig, RunConfig, TrainConfig
from tokennorm.testing import spawn_ranks

# So tight that the ordinary ups and downs of tiny micro-batches are spikes.
TIGHT = GuardConfig(enabled=True, spike_multiplier=1.002, window_size=8, min_history=2, files=3)


def test_refused_micro_batches_are_reported_and_written_with_their_text(tiny_folder: Path, tmp_path: Path) -> None:
    # One chat per micro-batch, and hardly any learning: losses go up and down.
    config = tiny_config(
        tiny_folder,
        "unused",
        guard=TIGHT,
        data=dataclasses.replace(tiny_config(tiny_folder, "unused").data, packing=False),
        optim=OptimConfig(lr=1e-5),
        train=TrainConfig(epochs=2, empty_window="skip"),
        run=RunConfig(dir=str(tmp_path / "run"), checkpoints=False, export=False),
    )
    result = run(config)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    refused = [one for line in lines for one in line.get("refused", [])]
    assert len(refused) > 3
    assert all(one["reason"] == "spike" and one["loss"] > one["limit"] > 0 for one in refused)
    trained = sum(line["effective_tokens"] for line in lines if "effective_tokens" in line)
    assert 0 < trained < 2 * sum(prepare(config, Runtime()).datasets.train.supervised_lengths)
    files = [json.loads(path.read_text()) for path in sorted((result.folder / "refused").iterdir())]
    assert len(files) == 3
    for file in files:
        (text,) = file["text"]
        assert "<|im_start|>user\nsay " in text
        ((source,),) = file["batch"]["sources"]
        line = (tiny_folder / "chats.jsonl").read_text().splitlines()[int(source.removeprefix("chats.jsonl:")) - 1]
        assert json.loads(line)["messages"][0]["content"] in text
        assert sum(file["token_losses"]) / file["batch"]["effective_tokens"] == pytest.approx(file["loss"])


def train_with_a_broken_window(rank: int, world_size: int, folder: str) -> tuple[int, bytes]:
    """All of rank 1's second window is NaN: the third and fifth forward, each followed by its dummy's."""
    whole, calls = CausalLMObjective.__call__, 0

    def broken(self: CausalLMObjective, model: Any, batch: Any) -> Any:
        nonlocal calls
        outputs = whole(self, model, batch)
        calls += torch.is_grad_enabled()
        if rank == 1 and torch.is_grad_enabled() and calls in (3, 5):
            outputs = dataclasses.replace(outputs, loss_sum=outputs.loss_sum * torch.nan)
        return outputs

    CausalLMObjective.__call__ = broken
    guard = GuardConfig(enabled=True, spike_multiplier=math.inf)
    base = tiny_config(Path(folder), "broken", guard=guard)
    # As many micro-batches as are whole windows on both ranks.
    data = dataclasses.replace(base.data, micro_batches_per_window=4, eval_fraction=0.0)
    result = run(dataclasses.replace(base, data=data, train=TrainConfig(epochs=2)))
    weights = (result.folder / "export" / "model.safetensors").read_bytes()
    return result.steps, weights


def test_a_window_that_one_rank_of_two_empties_does_not_end_the_run(tiny_folder: Path) -> None:
    results = [one.value for one in spawn_ranks(train_with_a_broken_window, 2, str(tiny_folder), timeout_s=300)]
    text = (tiny_folder / "broken" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    skipped = [index for index, line in enumerate(lines) if "skipped" in line]
    assert skipped == [1]
    assert (lines[1]["skipped"], lines[1]["step"], lines[1]["effective_tokens"]) == ("all refused", 1, 0)
    assert [one["non_finite_ranks"] for one in lines[1]["refused"]] == [1, 1]
    assert results[0] == results[1]
    assert results[0][0] == len(lines) - 1 == lines[-1]["step"]
    written = sorted(path.name for path in (tiny_folder / "broken" / "refused").iterdir())
    assert written == [f"step-00000002-micro-00{index}-rank-1.json" for index in (0, 1)]
    assert json.loads((tiny_folder / "broken" / "config.json").read_text())["train"]["empty_window"] == "raise"


def test_the_guard_is_off_by_default_and_belongs_to_the_identity_of_a_run(
    tiny_folder: Path, tmp_path: Path
) -> None:
    assert not default().guard.enabled
    plain = prepare(tiny_config(tiny_folder, "unused"), Runtime())
    assert plain.engine.token_loss_kit.loss_guard is None
    guarded = prepare(tiny_config(tiny_folder, "unused", guard=TIGHT), Runtime())
    CheckpointStore(tmp_path, identity=guarded.identity).save(guarded.engine)
    looser = dataclasses.replace(TIGHT, spike_multiplier=2.0)
    for other, named in ((plain, "guard.enabled"), (None, "guard.spike_multiplier: 1.002 there, 2.0 here")):
        job = other or prepare(tiny_config(tiny_folder, "unused", guard=looser), Runtime())
        with pytest.raises(CheckpointError, match=named):
            CheckpointStore(tmp_path, identity=job.identity).restore(job.engine)
    same = prepare(tiny_config(tiny_folder, "unused", guard=dataclasses.replace(TIGHT, files=0)), Runtime())
    CheckpointStore(tmp_path, identity=same.identity).restore(same.engine)


@pytest.mark.parametrize(
    "options",
    [{"spike_multiplier": 1.0}, {"window_size": 10, "min_history": 11}, {"min_history": 0}, {"files": -1}],
)
def test_impossible_settings_are_refused_where_they_are_built(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"guard\."):
        GuardConfig(**options)  # type: ignore[arg-type]
