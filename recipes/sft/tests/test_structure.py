"""The wiring: counted is what is supervised, steps keep their order, logged is what was reduced."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from recipes.sft.tests.tiny import EPOCHS, job_of, tiny_config
from tokennorm.engine import CheckpointStore, LoopConfig, OptimConfig, Runtime
from tokennorm.errors import CheckpointError, ConfigError, EmptyWindowError
from tokennorm.recipes.sft import default, demo, prepare, run
from tokennorm.recipes.sft.config import DataConfig, RunConfig, TrainConfig


def padded(folder: Path) -> DataConfig:
    return dataclasses.replace(tiny_config(folder, "unused").data, packing=False, micro_batch_size=3)


def test_order_of_reduce_unscale_rescale_clip_optimizer_scheduler(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tiny_folder)
    engine, calls = job.engine, []

    def record(target: Any, name: str) -> None:
        original = getattr(target, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            calls.append(name.strip("_"))
            return original(*args, **kwargs)

        monkeypatch.setattr(target, name, spy)

    for name in ("accumulate_microbatch", "reduce_window", "rescale_gradients", "reset"):
        record(engine.token_loss_kit, name)
    record(engine.scaler, "unscale_")
    record(engine.scheduler, "step")
    # The clipping that really multiplies gradients, where the engine looks it up.
    record(__import__("tokennorm.engine.clipping", fromlist=["x"]), "clip_grads_with_norm_")
    engine.optimizer.register_step_pre_hook(lambda *_: calls.append("optimizer"))
    window = next(iter(job.windows))
    report = engine.train_step(window)
    assert calls == [
        *["accumulate_microbatch"] * len(window),
        "reduce_window",
        "unscale",
        "rescale_gradients",
        "clip_grads_with_norm",
        "optimizer",
        "step",
        "reset",
    ]
    assert len(window) > 1
    assert report.grad_norm is not None
    assert report.grad_norm > 0


@pytest.mark.parametrize("packing", [True, False])
def test_counts_are_the_supervised_targets_after_masking_and_packing(tiny_folder: Path, packing: bool) -> None:
    job = job_of(tiny_folder) if packing else job_of(tiny_folder, data=padded(tiny_folder))
    train = job.datasets.train
    supervised = total = documents = 0
    spoken: list[str] = []
    for window in job.windows:
        for batch in window:
            labels = batch["shift_labels"]
            assert batch["effective_tokens"] == int((labels != -100).sum())
            assert ("attention_mask" in batch) is not packing
            supervised += batch["effective_tokens"]
            total += batch["total_tokens"]
            documents += int((batch["position_ids"] == 0).sum())
            spoken.append(job.tokenizer.decode(labels[labels != -100]))
    # Every token of every chat in each epoch.
    assert supervised == EPOCHS * sum(train.supervised_lengths)
    assert total == EPOCHS * sum(train.lengths)
    # Only what the assistant says, its end token included; padding of a row starts at position 0 as well.
    text = "".join(spoken)
    assert text.count("<|im_end|>") == EPOCHS * sum(
        int((sample.input_ids[sample.supervised] == job.tokenizer.eos_token_id).sum()) for sample in train
    )
    assert "say" not in text
    assert "user" not in text
    assert documents >= EPOCHS * len(train)


def test_one_divisor_per_window(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tiny_folder)
    kit = job.engine.token_loss_kit
    divisors: list[float] = []
    accumulate, reduce_window = kit.accumulate_microbatch, kit.reduce_window

    def spy(**kwargs: Any) -> torch.Tensor:
        loss = accumulate(**kwargs)
        divisors.append(float(kwargs["loss_sum"].detach() / loss.detach()))
        return loss

    def check() -> Any:
        stats = reduce_window()
        # loss_sum / loss rounds in its last digits; the divisor itself is a power of two.
        assert divisors == pytest.approx([stats.backward_divisor] * len(divisors), rel=1e-14)
        divisors.clear()
        return stats

    monkeypatch.setattr(kit, "accumulate_microbatch", spy)
    monkeypatch.setattr(kit, "reduce_window", check)
    for window in job.windows:
        job.engine.train_step(window)
    assert job.engine.step == job.total_steps > 3


def test_logged_values_are_those_of_the_whole_window(tiny_folder: Path) -> None:
    """Against an unpatched model in a plain loop over the same windows: sums, one division per window."""
    config = tiny_config(tiny_folder, "logged", loop=LoopConfig())
    result = run(config)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    job = prepare(config, Runtime())
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    first = steps[0]
    window = next(iter(job.windows))
    losses, means, tokens, total = [], [], 0, 0
    for batch in window:
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        labels = batch["shift_labels"].flatten()
        losses.append(cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum").item())
        means.append(losses[-1] / batch["effective_tokens"])
        tokens += batch["effective_tokens"]
        total += batch["total_tokens"]
    assert first["loss"] == pytest.approx(sum(losses) / tokens, rel=1e-10)
    assert (first["effective_tokens"], first["total_tokens"]) == (tokens, total)
    # The two usual mistakes would be seen: the last micro-batch's loss, and the mean of means.
    assert abs(first["loss"] - means[-1]) > 1e-4
    assert abs(first["loss"] - sum(means) / len(means)) > 1e-5
    assert [line["step"] for line in steps] == list(range(1, result.steps + 1))
    assert sum(line["effective_tokens"] for line in steps) == EPOCHS * sum(job.datasets.train.supervised_lengths)
    # The last window of an epoch is short, truly: fewer tokens than the others.
    assert steps[-1]["total_tokens"] < steps[0]["total_tokens"]


class HeadProducts(TorchDispatchMode):
    """Counts the matrix products that have the vocabulary as a dimension."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            shapes = {size for arg in args if isinstance(arg, torch.Tensor) for size in arg.shape}
            self.count += self.vocabulary in shapes
        return func(*args, **(kwargs or {}))


def test_the_head_costs_three_matrix_products_per_micro_batch(tiny_folder: Path) -> None:
    """Logits, their gradient's two products, and nothing recomputed: the sum reaches the loss as a broadcast."""
    job = job_of(tiny_folder)
    vocabulary = job.engine.model.get_input_embeddings().weight.shape[0]
    batch = next(iter(job.windows))[0]
    with HeadProducts(vocabulary) as products:
        job.engine.backward_step(job.engine.forward_step(batch), batch)
    assert products.count == 3
    # Another upstream gradient is right as well, and costs the logits again.
    with HeadProducts(vocabulary) as products:
        loss = job.engine.model(
            **{name: batch[name] for name in ("input_ids", "position_ids", "shift_labels")}, use_cache=False
        ).loss
        (loss * torch.rand_like(loss)).sum().backward()
    assert products.count > 3


def test_the_policy_for_empty_windows_reaches_the_kit(tiny_folder: Path) -> None:
    for policy in ("raise", "skip"):
        job = job_of(tiny_folder, train=TrainConfig(empty_window=policy))
        window = next(iter(job.windows))
        empty = [
            {**batch, "shift_labels": torch.full_like(batch["shift_labels"], -100), "effective_tokens": 0}
            for batch in window
        ]
        if policy == "skip":
            assert job.engine.train_step(empty).skipped == "empty window"
        else:
            with pytest.raises(EmptyWindowError):
                job.engine.train_step(empty)


def test_a_run_continues_only_itself(tiny_folder: Path, tmp_path: Path) -> None:
    job = job_of(tiny_folder)
    job.engine.train_step(next(iter(job.windows)))
    CheckpointStore(tmp_path, identity=job.identity).save(job.engine, loader_state=job.windows.state_dict())
    for changes, named in (
        ({"optim": OptimConfig(lr=0.02, warmup=1)}, "optim.lr: 0.01 there, 0.02 here"),
        ({"train": TrainConfig(epochs=EPOCHS, seed=7)}, "train.seed: 0 there, 7 here"),
        ({"data": padded(tiny_folder)}, "data.packing: True there, False here"),
    ):
        other = job_of(tiny_folder, **changes)
        with pytest.raises(CheckpointError, match=named):
            CheckpointStore(tmp_path, identity=other.identity).restore(other.engine)
    # What does not decide the weights may change.
    same = job_of(tiny_folder, loop=LoopConfig(log_every=5), run=RunConfig(question="?"))
    assert CheckpointStore(tmp_path, identity=same.identity).restore(same.engine) == {"epoch": 0, "window": 1}


def test_impossible_configurations_are_refused_where_they_are_built(tiny_folder: Path) -> None:
    for build in (
        lambda: DataConfig(micro_batches_per_window=0),
        lambda: DataConfig(max_length=1),
        lambda: DataConfig(eval_fraction=1.0),
        lambda: DataConfig(packing=False, pack_length=2048),
        lambda: DataConfig(max_length=64, pack_length=32),
        lambda: DataConfig(packing=False, pack_buffer=8),
        lambda: DataConfig(max_bad_share=2.0),
        lambda: DataConfig(mixture=("code.jsonl",)),
        lambda: TrainConfig(epochs=0),
        lambda: TrainConfig(max_steps=0),
        lambda: RunConfig(resume=True),
    ):
        with pytest.raises(ConfigError):
            build()
    assert default().data.packing
    assert demo().data.micro_batches_per_window * (demo().train.max_steps or 0) == 240
    data = dataclasses.replace(tiny_config(tiny_folder, "x").data, max_length=512)
    # No chat here is longer than the model: only what is really there is refused.
    assert job_of(tiny_folder, data=data).total_steps > 0
