"""A run that goes on with settings that were changed on purpose: what it takes from where, and what it notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.guard_toy import SETTINGS
from tests.engine.toy import ToyLM, ToyWindows, build_engine, weights
from tokennorm.engine import (
    CheckpointStore,
    Engine,
    OptimConfig,
    build_optimizer,
    build_scaler,
    build_scheduler,
    learning_rate_factor,
)
from tokennorm.errors import CheckpointError, ConfigError
from tokennorm.kit import TokenNormedLossKit

BEFORE = OptimConfig(lr=0.05, warmup=2, schedule="cosine")
AFTER = OptimConfig(lr=0.02, warmup=2, schedule="linear", weight_decay=0.3, betas=(0.8, 0.99))


def engine_of(config: OptimConfig, steps: int, **options: Any) -> Engine:
    model = ToyLM(dtype=torch.float32, seed=4)
    optimizer = build_optimizer(model, config)
    engine = build_engine(model, optimizer=optimizer, **options)
    engine.scheduler = build_scheduler(optimizer, config, steps)
    return engine


def identity(config: OptimConfig, steps: int, **more: Any) -> dict[str, Any]:
    optim = {"lr": config.lr, "schedule": config.schedule, "betas": config.betas, "decay": config.weight_decay}
    return {"optim": optim, "train": {"max_steps": steps}, **more}


def saved(folder: Path, steps: int = 3) -> Engine:
    engine = engine_of(BEFORE, 8)
    for window in ToyWindows().windows[:steps]:
        engine.train_step(window)
    CheckpointStore(folder, identity=identity(BEFORE, 8)).save(engine)
    return engine


def test_a_changed_optimizer_and_schedule_are_those_of_the_run_that_goes_on(tmp_path: Path) -> None:
    before = saved(tmp_path)
    engine, said = engine_of(AFTER, 20), []
    store = CheckpointStore(tmp_path, identity=identity(AFTER, 20), allow_changes=("optim", "train.max_steps"))
    store.restore(engine, say=said.append)
    assert torch.equal(weights(engine.model), weights(before.model))
    assert [line for line in said if "purpose" in line] == [
        "note: changed on purpose: optim.betas: [0.9, 0.95] there, [0.8, 0.99] here",
        "note: changed on purpose: optim.decay: 0.01 there, 0.3 here",
        "note: changed on purpose: optim.lr: 0.05 there, 0.02 here",
        "note: changed on purpose: optim.schedule: 'cosine' there, 'linear' here",
        "note: changed on purpose: train.max_steps: 8 there, 20 here",
    ]
    factor = learning_rate_factor(AFTER, 20)
    assert {group["lr"] for group in engine.optimizer.param_groups} == {0.02 * factor(3)}
    assert {group["betas"] for group in engine.optimizer.param_groups} == {(0.8, 0.99)}
    assert {group["weight_decay"] for group in engine.optimizer.param_groups} == {0.3, 0.0}
    for mine, theirs in zip(engine.optimizer.state.values(), before.optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    rates = [engine.train_step(window).lr for window in ToyWindows().windows]
    assert rates == pytest.approx([0.02 * factor(step) for step in range(3, 7)])
    # Written down for good, also by later checkpoints; the same command fits those.
    path = store.save(engine)
    again = CheckpointStore(tmp_path, identity=identity(AFTER, 20), allow_changes=("optim", "train.max_steps"))
    said.clear()
    again.restore(engine_of(AFTER, 20), say=said.append)
    assert said == []
    again.save(engine)
    for manifest in (path / "manifest.json", path / "manifest.json"):
        (change,) = json.loads(manifest.read_text())["changes"]
        assert (change["step"], change["changed"][2]) == (3, "optim.lr: 0.05 there, 0.02 here")


def test_what_was_not_allowed_is_refused_and_a_name_that_is_none_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    changed = identity(AFTER, 20)
    store = CheckpointStore(tmp_path, identity=changed, allow_changes=("optim.lr", "train"))
    with pytest.raises(CheckpointError, match=r"another run: optim\.betas.*; optim\.decay.*; optim") as caught:
        store.restore(engine_of(AFTER, 20))
    assert "optim.lr" not in str(caught.value)
    assert "run.allow_changes" in str(caught.value)
    for wrong, help_with_it in (("optim.l", "mean optim.lr"), ("lr", "the entries are optim.betas, optim.decay")):
        with pytest.raises(ConfigError, match=rf"is called '{wrong}'(.|\n)*{help_with_it}"):
            CheckpointStore(tmp_path, identity=changed, allow_changes=(wrong,)).restore(engine_of(AFTER, 20))


def test_without_a_difference_the_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole = saved(tmp_path)
    engine = engine_of(BEFORE, 8)
    CheckpointStore(tmp_path, identity=identity(BEFORE, 8), allow_changes=("optim", "train")).restore(engine)
    for one in (whole, engine):
        for window in ToyWindows().windows:
            one.train_step(window)
    assert torch.equal(weights(engine.model), weights(whole.model))


def test_a_guard_and_a_scaler_may_come_later_and_go_again(tmp_path: Path) -> None:
    saved(tmp_path)
    kit = TokenNormedLossKit("cpu", 1)
    guard = kit.build_loss_guard(**SETTINGS)
    options = {"token_loss_kit": kit, "scaler": build_scaler(torch.float16, "cpu")}
    engine = engine_of(BEFORE, 8, **options)
    more = {"guard": {"enabled": True}, "model": {"autocast": "float16"}}
    store = CheckpointStore(tmp_path, identity=identity(BEFORE, 8, **more))
    with pytest.raises(CheckpointError, match=r"guard\.enabled: 'nothing' there, True here"):
        store.restore(engine)
    store.allow_changes = ("guard", "model.autocast")
    store.restore(engine)
    assert engine.train_step(ToyWindows().windows[3]).skipped is None
    assert len(guard.history.losses) == len(ToyWindows().windows[3])
    store.save(engine)
    back = CheckpointStore(tmp_path, identity=identity(BEFORE, 8), allow_changes=("guard", "model"))
    plain = engine_of(BEFORE, 8)
    back.restore(plain)
    assert torch.equal(weights(plain.model), weights(engine.model))
    assert [change["step"] for change in back.changes] == [3, 4]
