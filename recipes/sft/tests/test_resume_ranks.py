"""Runs that go on in the middle of an epoch: on other ranks, cut otherwise, with dropout and mixtures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from recipes.sft.tests.tiny import tiny_config
from tokennorm.engine import Engine, LoopConfig
from tokennorm.recipes.sft import run
from tokennorm.recipes.sft.config import DataConfig, LoraConfig, ModelConfig, RunConfig, SftConfig, TrainConfig
from tokennorm.testing import spawn_ranks

# Each of the two epochs has five windows.
FROM = 3
Steps = dict[int, list[str]]

pytestmark = pytest.mark.timeout(400)


@contextmanager
def watched() -> Iterator[Steps]:
    """For each step that this rank takes, the file and line of every document in its micro-batches."""
    steps: Steps = {}
    train_step = Engine.train_step

    def watching(self: Engine, window: Any) -> Any:
        window = list(window)
        steps[self.step] = [document for batch in window for row in batch["sources"] for document in row]
        return train_step(self, window)

    Engine.train_step = watching  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        Engine.train_step = train_step  # type: ignore[method-assign]


def config_of(folder: Path, name: str, *, cut: tuple[int, int] = (1, 3)) -> SftConfig:
    rows, micro_batches = cut
    config = tiny_config(folder, name, loop=LoopConfig(save_every=1, eval_every=5, keep_last=20))
    data = replace(config.data, micro_batch_size=rows, micro_batches_per_window=micro_batches)
    return replace(config, data=data, run=RunConfig(dir=str(folder / name), resume=True))


def train_on_rank(
    rank: int, world_size: int, folder: str, name: str, cut: tuple[int, int]
) -> tuple[Steps, float | None]:
    with watched() as steps:
        result = run(config_of(Path(folder), name, cut=cut))
    return steps, result.after


def train(folder: Path, name: str, ranks: int, cut: tuple[int, int] = (1, 3)) -> tuple[Steps, float]:
    """The documents of each step over all ranks, sorted, and the loss in the end."""
    results = [result.value for result in spawn_ranks(train_on_rank, ranks, str(folder), name, cut)]
    afters = {after for _, after in results}
    assert len(afters) == 1
    return {
        step: sorted(document for steps, _ in results for document in steps[step]) for step in results[0][0]
    }, afters.pop()


def forget(folder: Path, step: int) -> None:
    """As if the run had been killed after it saved this step."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    shutil.rmtree(folder / "export")


def curve(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "effective_tokens", "total_tokens")
    return [{name: line[name] for name in names} for line in lines if "loss" in line]


def test_a_run_of_two_ranks_goes_on_with_the_same_samples_on_any_other(tiny_folder: Path) -> None:
    whole, after = train(tiny_folder, "two", 2)
    assert sorted(whole) == list(range(10))
    assert all(whole.values())
    epochs = [sorted(document for step in part for document in whole[step]) for part in (range(5), range(5, 10))]
    assert epochs[0] == epochs[1]
    assert whole[FROM] != whole[FROM + 5], "each epoch has an order of its own"
    weights = AutoModelForCausalLM.from_pretrained(
        tiny_folder / "two" / "export", dtype=torch.float64
    ).state_dict()
    for ranks, cut in ((1, (3, 1)), (4, (1, 3))):
        name = f"two-to-{ranks}-{cut[0]}"
        shutil.copytree(tiny_folder / "two", tiny_folder / name)
        forget(tiny_folder / name, FROM)
        steps, loss = train(tiny_folder, name, ranks, cut)
        assert steps == {step: whole[step] for step in range(FROM, 10)}, name
        assert loss == pytest.approx(after, rel=1e-6)
        for mine, theirs in zip(curve(tiny_folder / name), curve(tiny_folder / "two"), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        own = AutoModelForCausalLM.from_pretrained(tiny_folder / name / "export", dtype=torch.float64).state_dict()
        for key, weight in own.items():
            torch.testing.assert_close(weight, weights[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("autocast", ["none", "float16"])
def test_dropout_and_a_mixture_go_on_bit_for_bit(tiny_folder: Path, autocast: Literal["none", "float16"]) -> None:
    torch.set_num_threads(1)
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (tiny_folder / "few.jsonl").write_text("".join(lines[::3]))

    def everything(name: str) -> SftConfig:
        return SftConfig(
            model=ModelConfig(path=str(tiny_folder / "model"), autocast=autocast),
            lora=LoraConfig(rank=4, dropout=0.3, export="adapter"),
            data=DataConfig(
                mixture=(f"all={tiny_folder / 'chats.jsonl'}", f"few={tiny_folder / 'few.jsonl'}@2"),
                eval_fraction=0.2,
                max_length=128,
                pack_buffer=4,
                micro_batches_per_window=3,
            ),
            train=TrainConfig(epochs=2, max_steps=8),
            loop=LoopConfig(save_every=1, keep_last=20),
            run=RunConfig(dir=str(tiny_folder / name), resume=True),
        )

    mixed, resumed = f"mixed-{autocast}", f"mixed-{autocast}-again"
    run(everything(mixed))
    want = load_file(tiny_folder / mixed / "export" / "adapter_model.safetensors")
    shutil.copytree(tiny_folder / mixed, tiny_folder / resumed)
    forget(tiny_folder / resumed, FROM)
    torch.manual_seed(123)
    run(everything(resumed))
    got = load_file(tiny_folder / resumed / "export" / "adapter_model.safetensors")
    assert got.keys() == want.keys()
    for name, weight in got.items():
        assert torch.equal(weight, want[name]), name
    assert curve(tiny_folder / resumed) == curve(tiny_folder / mixed)
