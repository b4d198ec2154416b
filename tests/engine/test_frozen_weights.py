"""Checkpoints of a model with frozen weights leave them out, and go with the same frozen weights only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.toy import ToyLM, ToyWindows, build_engine, weights
from tokennorm.engine import CheckpointStore, Engine, frozen_fingerprint
from tokennorm.engine.checkpoint_tensors import read_index
from tokennorm.errors import CheckpointError

LEARNING = ("mix.weight", "norm.bias")


def partly_frozen(seed: int = 0) -> ToyLM:
    """Two tensors learn; a buffer counts on without being learned."""
    model = ToyLM(seed=seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in LEARNING)
    calls = torch.zeros((), dtype=torch.int64)
    model.register_buffer("calls", calls)

    def count(*_: object) -> None:
        calls.add_(1)

    model.register_forward_pre_hook(count)
    return model


def store_of(folder: Path, engine: Engine) -> CheckpointStore:
    return CheckpointStore(folder, frozen=frozen_fingerprint(engine.model))


def trained(model: nn.Module, steps: int) -> Engine:
    engine = build_engine(model)
    for window in ToyWindows().windows[:steps]:
        engine.train_step(window)
    return engine


def test_only_what_changes_is_saved_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    engine = trained(partly_frozen(), 2)
    path = store_of(tmp_path, engine).save(engine)
    saved = read_index(path)
    moments = {f"optimizer.{name}.{key}" for name in LEARNING for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(saved) == {"model.calls", *(f"model.{name}" for name in LEARNING), *moments}
    other = partly_frozen()
    with torch.no_grad():
        other.mix.weight.add_(1.0)
    again = build_engine(other)
    store_of(tmp_path, again).restore(again)
    for one in (engine, again):
        for window in ToyWindows().windows[2:]:
            one.train_step(window)
    assert torch.equal(weights(again.model), weights(engine.model))
    assert int(again.model.calls) == int(engine.model.calls) > 0  # type: ignore[arg-type]


def test_other_frozen_weights_are_refused_before_anything_changes(tmp_path: Path) -> None:
    engine = trained(partly_frozen(), 2)
    store_of(tmp_path, engine).save(engine)
    other = partly_frozen()
    with torch.no_grad():
        other.head.weight[3, 5] += 1e-12
    again = build_engine(other)
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"frozen weights: SHA-256 [0-9a-f]{12} there, [0-9a-f]{12} here"):
        store_of(tmp_path, again).restore(again)
    with pytest.raises(CheckpointError, match=r"frozen weights: SHA-256 [0-9a-f]{12} there, none here"):
        CheckpointStore(tmp_path).restore(again)
    assert torch.equal(weights(other), before)


def test_a_checkpoint_of_all_weights_brings_the_frozen_ones(tmp_path: Path) -> None:
    engine = trained(partly_frozen(seed=1), 2)
    CheckpointStore(tmp_path).save(engine)
    again = build_engine(partly_frozen(seed=2))
    store_of(tmp_path, again).restore(again)
    assert torch.equal(weights(again.model), weights(engine.model))


def _another_value(model: ToyLM) -> None:
    model.embedding.weight.data[16, 7] += 1e-12


def _another_dtype(model: ToyLM) -> None:
    model.head.weight.data = model.head.weight.data.view(torch.int64)


def _frozen_otherwise(model: ToyLM) -> None:
    model.norm.bias.requires_grad_(False)


@pytest.mark.parametrize("change", [_another_value, _another_dtype, _frozen_otherwise])
def test_the_fingerprint_is_that_of_what_never_changes(change: Callable[[ToyLM], None]) -> None:
    model = partly_frozen()
    before = frozen_fingerprint(model)
    assert before is not None
    assert frozen_fingerprint(ToyLM()) is None
    trained(model, 2)
    assert frozen_fingerprint(model) == before
    with torch.no_grad():
        change(model)
    assert frozen_fingerprint(model) != before
