"""The Trainer on two ranks (DDP, gloo). All scenarios run in one spawn: a rank's imports cost more than that."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer
from trl import SFTTrainer

from tests.integrations import hf_toy as toy
from tokennorm.errors import ConfigError
from tokennorm.integrations.hf import token_normalised
from tokennorm.testing import spawn_ranks

# Dealt out alternately, two micro-batches per window and rank: rank 1 has nothing but empty ones in the first
# window, the long sample is in the second, the third is short.
ORDER = (0, 11, 4, 12, 10, 2, 3, 7, 5, 9)
EVALUATED = (0, 1, 2, 3, 10, 11, 4, 5, 6)


def exact(cls: Any = Trainer) -> Any:
    return token_normalised(cls)


def dealt_windows() -> list[list[dict[str, torch.Tensor]]]:
    return list(toy.windows(ORDER, 4))


class Iterable(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter(toy.rows(EVALUATED))


def train(cls: Any, make: Callable[..., Any], **options: Any) -> dict[str, Any]:
    model = make(options.pop("dtype", torch.float64))
    run = cls(
        model=model,
        args=toy.arguments(**{"gradient_accumulation_steps": 2, **options}),
        train_dataset=toy.rows(ORDER),
        data_collator=toy.pad,
        optimizers=(toy.Recording(model), None),
    )
    run.train()
    assert isinstance(run.model_wrapped, DistributedDataParallel)
    return {"gradients": run.optimizer.optimizer.seen, "log": run.state.log_history}


def evaluate(cls: Any, collator: Any, batch_size: int, **options: Any) -> dict[str, float]:
    run = cls(
        model=toy.mixture() if options.pop("router", False) else toy.dense(),
        args=toy.arguments(per_device_eval_batch_size=batch_size, **options),
        eval_dataset=toy.rows(EVALUATED),
        data_collator=collator,
    )
    return run.evaluate()


def fine_tune(make: Callable[..., Any]) -> dict[str, Any]:
    model = make(torch.float32)
    run = exact(SFTTrainer)(
        model=model,
        args=toy.sft_arguments(gradient_accumulation_steps=2, ddp_find_unused_parameters=True),
        train_dataset=Dataset.from_list(toy.rows(ORDER)),
        processing_class=toy.tokenizer(),
        optimizers=(toy.Recording(model), None),
    )
    run.train()
    return {"gradients": run.optimizer.optimizer.seen, "log": run.state.log_history}


def evaluate_packs(batch_size: int) -> dict[str, float]:
    """Rows of several documents, several such rows in one."""
    data = Dataset.from_list(
        [
            {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
            for row in toy.rows(EVALUATED)
        ]
    )
    run = exact(SFTTrainer)(
        model=toy.dense(torch.float32),
        args=toy.sft_arguments(
            per_device_eval_batch_size=batch_size,
            packing=True,
            max_length=56,
            dataset_kwargs=None,
            completion_only_loss=True,
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=toy.tokenizer(),
    )
    return {**run.evaluate(), "rows": len(run.eval_dataset)}


def refused(action: Callable[[], Any]) -> str:
    try:
        action()
    except ConfigError as error:
        return str(error)
    return "not refused"


def scenarios(rank: int, ranks: int) -> dict[str, Any]:
    del rank
    # As torchrun sets it; the process group is there already.
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    found: dict[str, Any] = {
        "dense": train(exact(), toy.dense),
        "dense, float32, clipped": train(exact(), toy.dense, dtype=torch.float32, max_grad_norm=1.0),
        "mixture": train(exact(), toy.mixture, ddp_find_unused_parameters=True, logging_steps=2),
        "stock mixture": train(Trainer, toy.mixture),
        "stock evaluation": evaluate(Trainer, toy.pad, 2),
    }
    for name, collator in (("padded", toy.pad), ("flattened", toy.flatten)):
        for batch_size in (1, 2, 4):
            found[f"{name} {batch_size}"] = evaluate(exact(), collator, batch_size)
    found["router"] = evaluate(exact(), toy.pad, 1, router=True)
    run = exact()(
        model=toy.dense(),
        args=toy.arguments(accelerator_config={"dispatch_batches": True}, per_device_eval_batch_size=2),
        eval_dataset=Iterable(),
        data_collator=toy.pad_to_64,
    )
    found["dispatched"] = run.evaluate()
    found["unsized"] = refused(
        lambda: exact()(
            model=toy.dense(),
            args=toy.arguments(accelerator_config={"dispatch_batches": False}),
            eval_dataset=Iterable(),
            data_collator=toy.pad,
        )
    )
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    found["SFT dense"] = fine_tune(toy.dense)
    found["SFT mixture"] = fine_tune(toy.mixture)
    for batch_size in (1, 2):
        found[f"packs {batch_size}"] = evaluate_packs(batch_size)
    found["rank means"] = refused(
        lambda: exact()(model=toy.dense(), args=toy.arguments(average_tokens_across_devices=False))
    )
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return [result.value for result in spawn_ranks(scenarios, 2, timeout_s=240)]


def logged(result: dict[str, Any], name: str) -> list[float]:
    return [entry[name] for entry in result["log"] if name in entry]


def test_dense(found: list[dict[str, Any]]) -> None:
    expected = [toy.truth(toy.dense(), window) for window in dealt_windows()]
    for rank in found:
        assert len(rank["dense"]["gradients"]) == 3
        for got, want in zip(rank["dense"]["gradients"], expected, strict=True):
            assert toy.error(got, want.gradient) < 1e-13
    assert logged(found[0]["dense"], "loss") == pytest.approx([want.loss for want in expected], rel=1e-12)
    assert logged(found[0]["dense"], "supervised_tokens") == [want.tokens for want in expected]


def test_clipped_in_float32(found: list[dict[str, Any]]) -> None:
    for window, got in zip(dealt_windows(), found[1]["dense, float32, clipped"]["gradients"], strict=True):
        want = toy.truth(toy.dense(), window).gradient
        assert toy.error(got, want / want.norm()) < 2e-6


def test_mixture(found: list[dict[str, Any]]) -> None:
    expected = [toy.truth(toy.mixture(), window) for window in dealt_windows()]
    for rank in found:
        for got, want in zip(rank["mixture"]["gradients"], expected, strict=True):
            assert toy.error(got, want.gradient) < 1e-6
    tokens = [want.tokens for want in expected[:2]]
    for name in ("loss", "router"):
        mean = sum(getattr(w, name) * w.tokens for w in expected[:2]) / sum(tokens)
        key = "loss" if name == "loss" else "router_loss"
        assert logged(found[0]["mixture"], key)[0] == pytest.approx(mean, rel=1e-6)


def test_the_trainer_itself_multiplies_the_router_loss(found: list[dict[str, Any]]) -> None:
    """Or the test above could not fail."""
    for got, window in zip(found[0]["stock mixture"]["gradients"], dealt_windows(), strict=True):
        assert toy.error(got, toy.truth(toy.mixture(), window).gradient) > 0.05


@pytest.mark.parametrize("layout", ["padded", "flattened"])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_evaluation_counts_every_sample_once(found: list[dict[str, Any]], layout: str, batch_size: int) -> None:
    """Nine samples: the loader repeats some to fill its last round."""
    want = toy.truth(toy.dense(), next(toy.windows(EVALUATED, 9))).loss
    for rank in found:
        assert rank[f"{layout} {batch_size}"]["eval_loss"] == pytest.approx(want, rel=1e-12)
    assert abs(found[0]["stock evaluation"]["eval_loss"] / want - 1) > 1e-3


def test_evaluation_of_an_iterable_dataset(found: list[dict[str, Any]]) -> None:
    want = toy.truth(toy.dense(), next(toy.windows(EVALUATED, 9))).loss
    assert found[1]["dispatched"]["eval_loss"] == pytest.approx(want, rel=1e-12)
    assert "no length" in found[0]["unsized"]


def test_evaluation_of_a_mixture(found: list[dict[str, Any]]) -> None:
    want = toy.truth(toy.mixture(), next(toy.windows(EVALUATED, 9)))
    assert found[0]["router"]["eval_loss"] == pytest.approx(want.loss, rel=1e-12)
    assert found[0]["router"]["eval_router_loss"] == pytest.approx(want.router, rel=1e-6)


def test_a_mean_of_rank_means_is_refused(found: list[dict[str, Any]]) -> None:
    assert "average_tokens_across_devices" in found[0]["rank means"]


@pytest.mark.parametrize("make", [toy.dense, toy.mixture])
def test_sft(found: list[dict[str, Any]], make: Any) -> None:
    expected = [toy.truth(make(), window) for window in dealt_windows()]
    for rank in found:
        for got, want in zip(rank[f"SFT {make.__name__}"]["gradients"], expected, strict=True):
            assert toy.error(got, want.gradient) < 2e-6
    result = found[0][f"SFT {make.__name__}"]
    assert logged(result, "loss") == pytest.approx([want.loss for want in expected], rel=1e-6)
    lengths = [len(toy.POOL[number].input_ids) for number in ORDER]
    # In the short last window as well.
    assert logged(result, "num_tokens") == [sum(lengths[:4]), sum(lengths[:8]), sum(lengths)]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_sft_evaluation_of_packs(found: list[dict[str, Any]], batch_size: int) -> None:
    result = found[1][f"packs {batch_size}"]
    assert result["rows"] % 2 == 1  # so that the loader repeats a row
    supervised = [number for number in EVALUATED if number != 11]  # TRL drops the others
    want = toy.truth(toy.dense(), next(toy.windows(supervised, len(supervised)))).loss
    assert result["eval_loss"] == pytest.approx(want, rel=1e-6)
