"""Split models, half precision and adapters in real runs of two steps: what they train and what they export."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from recipes.sft.tests.tiny import tiny_config
from tokennorm.engine import DistributedConfig, LoopConfig
from tokennorm.engine.checkpoint_tensors import read_index
from tokennorm.errors import CheckpointError
from tokennorm.recipes.sft import run
from tokennorm.recipes.sft.config import LoraConfig, ModelConfig, RunConfig, TrainConfig
from tokennorm.testing import spawn_ranks


def short(folder: Path, name: str, **changes: Any) -> Any:
    settings = RunConfig(dir=str(folder / name), checkpoints=False, question="say beta 1 times", answer_tokens=3)
    return tiny_config(folder, name, **{"run": settings, "train": TrainConfig(max_steps=2), **changes})


SPLIT = DistributedConfig(strategy="fsdp", head_unit="own", accumulate="sharded")
ADAPTED = LoraConfig(rank=4, export="adapter")


def split_on_rank(rank: int, world_size: int, folder: str) -> list[tuple[float | None, float | None]]:
    losses = []
    for name, lora in {"split": LoraConfig(), "split-adapted": ADAPTED}.items():
        settings, loop = RunConfig(dir=str(Path(folder) / name)), LoopConfig(save_every=1)
        result = run(short(Path(folder), name, distributed=SPLIT, run=settings, loop=loop, lora=lora))
        losses.append((result.before, result.after))
    return losses


@pytest.fixture(scope="module")
def split_losses(tiny_folder: Path) -> list[list[tuple[float | None, float | None]]]:
    """Losses before and after: of each run, on each of two ranks."""
    ranks = [result.value for result in spawn_ranks(split_on_rank, 2, str(tiny_folder), timeout_s=280)]
    return [list(run) for run in zip(*ranks, strict=True)]


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float64).state_dict()


def test_a_split_run_trains_and_exports_the_same_model(
    tiny_folder: Path, split_losses: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    one = run(short(tiny_folder, "whole"))
    for before, after in split_losses[0]:
        assert before == pytest.approx(one.before, rel=1e-10)
        assert after == pytest.approx(one.after, rel=1e-6)
    start = AutoModelForCausalLM.from_pretrained(tiny_folder / "model", dtype=torch.float64).state_dict()
    weights = exported(tiny_folder / "whole")
    for name, weight in exported(tiny_folder / "split").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7)
        assert (weight - start[name]).abs().max() > 1e-4, "everything was trained"
    config = json.loads((tiny_folder / "split" / "export" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    # Its checkpoint of the first step, resumed in one process that cuts the same windows otherwise.
    shutil.rmtree(tiny_folder / "split" / "checkpoints" / "step-00000002")
    resume = RunConfig(dir=str(tiny_folder / "split"), resume=True)
    data = tiny_config(tiny_folder, "split").data
    with pytest.raises(CheckpointError, match=r"data\.rows_per_window: 3 there, 6 here"):
        run(short(tiny_folder, "split", run=resume, data=replace(data, micro_batch_size=2)))
    capsys.readouterr()
    other = replace(data, micro_batch_size=3, micro_batches_per_window=1)
    again = run(short(tiny_folder, "split", run=resume, data=other))
    assert again.after == pytest.approx(one.after, rel=1e-6)
    assert "micro_batch_size: 1 there, 3 here" in capsys.readouterr().out
    for name, weight in exported(tiny_folder / "split").items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-5, atol=1e-7)


def test_adapters_on_a_split_base_are_saved_without_it_and_go_on_in_one_process(
    tiny_folder: Path, split_losses: Any
) -> None:
    one = run(short(tiny_folder, "adapted-whole", lora=ADAPTED))
    for before, after in split_losses[1]:
        assert before == pytest.approx(one.before, rel=1e-10)
        assert after == pytest.approx(one.after, rel=1e-6)
    folder = tiny_folder / "split-adapted"
    whole = load_file(tiny_folder / "adapted-whole" / "export" / "adapter_model.safetensors")
    assert len(whole) == 2 * 7 * 2
    assert all(weight.norm() > 1e-3 for weight in whole.values()), "both matrices have learned"

    def check() -> None:
        split = load_file(folder / "export" / "adapter_model.safetensors")
        assert split.keys() == whole.keys()
        for name, weight in split.items():
            torch.testing.assert_close(weight, whole[name], rtol=1e-5, atol=1e-7)

    check()
    saved = read_index(folder / "checkpoints" / "step-00000001")
    assert len(saved) == 4 * len(whole), "the adapters, and two moments and a count for each"
    assert all("lora_" in name for name in saved)
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    resume = RunConfig(dir=str(folder), resume=True)
    # A base of which one weight is another one.
    shutil.copytree(tiny_folder / "model", tiny_folder / "other-model")
    weights = load_file(tiny_folder / "other-model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, tiny_folder / "other-model" / "model.safetensors", metadata={"format": "pt"})
    other = ModelConfig(path=str(tiny_folder / "other-model"), dtype="float64")
    with pytest.raises(CheckpointError, match=r"frozen weights: SHA-256 .{12} there, .{12} here"):
        run(short(tiny_folder, "split-adapted", run=resume, lora=ADAPTED, model=other))
    again = run(short(tiny_folder, "split-adapted", run=resume, lora=ADAPTED))
    assert again.after == pytest.approx(one.after, rel=1e-6)
    check()


def test_a_float16_run_with_adapters_exports_the_merged_model(tiny_folder: Path) -> None:
    path = str(tiny_folder / "model")
    model = ModelConfig(path=path, dtype="float32", autocast="float16", gradient_checkpointing=True)
    # A loss scale of 65536 overflows once or twice before it fits.
    config = short(tiny_folder, "adapted", model=model, lora=LoraConfig(rank=4, alpha=4))
    result = run(config)
    assert result.before is not None
    assert result.after is not None
    assert result.after < result.before
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).state_dict()
    adapter = load_file(result.folder / "export-adapter" / "adapter_model.safetensors")
    merged = exported(result.folder)
    assert len(adapter) == 2 * 7 * 2
    for name, weight in base.items():
        stem = "base_model.model." + name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight), name
            continue
        learned = adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
        assert learned.abs().max() > 1e-5, name
        torch.testing.assert_close(merged[name], weight + learned, rtol=1e-6, atol=1e-7)
