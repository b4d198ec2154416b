"""A whole run of the toy model, with dropout so that the generators matter, and ways to disturb it."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.engine.toy import ToyLM, ToyWindows, build_engine, weights
from tokennorm.engine import (
    CausalLMObjective,
    CheckpointStore,
    Engine,
    LoopConfig,
    RunFolder,
    Runtime,
    evaluate,
    resume_run,
    seed_everything,
    train,
    unwrap_model,
    wrap_ddp,
)

STEPS = 12
IDENTITY = {"model": "toy", "optim": {"lr": 0.05, "betas": (0.9, 0.95)}}

Disturbance = Callable[[Engine, nn.Module], None]


class Killed(BaseException):
    """Nothing in the library catches this."""


def dies_in(step: int) -> Disturbance:
    """Die in the middle of the window after ``step``."""
    calls = 0

    def disturb(engine: Engine, model: nn.Module) -> None:
        nonlocal calls
        calls += model.training
        if model.training and engine.step == step and calls % 2 == 0:
            raise Killed

    return disturb


def asks_in(kind: str, step: int, number: int = signal.SIGTERM) -> Disturbance:
    """Get a signal within the training ("train") after ``step`` or the evaluation ("evaluate") there, once."""
    asked = []

    def disturb(engine: Engine, model: nn.Module) -> None:
        if (kind == "train") == model.training and engine.step == step and not asked:
            asked.append(os.kill(os.getpid(), number))

    return disturb


def start(
    folder: Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    resume: bool = False,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    disturb: Disturbance = lambda *_: None,
    config: LoopConfig | None = None,
) -> Engine:
    """Train to the end; ``disturb`` is called before each forward, of training and evaluation alike."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    seed_everything(rank)
    model = wrap_ddp(ToyLM(dtype=torch.float32, dropout=0.3, seed=1), runtime)
    engine = build_engine(model, total_steps=STEPS, dp_world_size=world_size)
    windows = ToyWindows(rank=rank, world_size=world_size, repeat=STEPS // 4)
    run = RunFolder(folder, runtime=runtime, resume=resume)
    store = CheckpointStore(run.checkpoints, identity=IDENTITY, runtime=runtime)
    if resume:
        resume_run(engine, windows, store, run, checkpoint=checkpoint, say=say)
    objective = CausalLMObjective()

    def disturbed(model: Any, batch: Any) -> Any:
        disturb(engine, model)
        return objective(model, batch)

    engine.objective = disturbed
    train(
        engine,
        windows,
        total_steps=STEPS,
        config=config or LoopConfig(save_every=3, eval_every=5),
        evaluate=lambda: evaluate(engine.model, disturbed, ToyWindows().windows[0]),
        run=run,
        checkpoints=store,
    )
    return engine


def fingerprint(engine: Engine) -> dict[str, Any]:
    """Weights, moments, schedule and generators, to be compared exactly."""
    return {
        "weights": weights(unwrap_model(engine.model)).tolist(),
        "moments": [{k: v.sum().item() for k, v in s.items()} for s in engine.optimizer.state.values()],
        "lr": engine.optimizer.param_groups[0]["lr"],
        "step": engine.step,
        "random": (random.random(), torch.rand(1).item()),
    }


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The run's records without what they cost."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = ("seconds", "data_wait", "memory_bytes")
    return [{k: v for k, v in line.items() if k not in costs} for line in lines]
