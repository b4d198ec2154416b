"""What ``metrics.jsonl`` says of a run that was ended and resumed: what it says of the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.toy import ToyLM, ToyWindows, build_engine, micro_batch, skipping_kit
from tests.engine.toy_run import IDENTITY, Disturbance, Killed, asks_in, numbers
from tokennorm.engine import (
    CheckpointStore,
    EvalReport,
    LoopConfig,
    RunFolder,
    RunStopped,
    resume_run,
    train,
)

STEPS = 6
NOTHING = [micro_batch(0, 4, 5)]


def windows() -> ToyWindows:
    """Six windows to train on; those after the third and the last are empty, one or two in a row."""
    source = ToyWindows(repeat=2)
    sound = source.windows[:STEPS]
    source.windows = [*sound[:3], NOTHING, NOTHING, *sound[3:5], NOTHING, *sound[5:]]
    return source


def go(
    folder: Path,
    *,
    resume: bool = False,
    checkpoint: Path | None = None,
    disturb: Disturbance = lambda *_: None,
    loss: Callable[[int], float | None] = lambda step: 1.0 + step,
    save_every: int = 3,
) -> list[int]:
    """Train to the end; return the steps that were evaluated in this call."""
    engine = build_engine(ToyLM(dtype=torch.float32), total_steps=STEPS, token_loss_kit=skipping_kit())
    source, run = windows(), RunFolder(folder, resume=resume)
    store, objective, evaluated = CheckpointStore(run.checkpoints, identity=IDENTITY), engine.objective, []
    if resume:
        resume_run(engine, source, store, run, checkpoint=checkpoint)

    def disturbed(model: Any, batch: Any) -> Any:
        disturb(engine, model)
        return objective(model, batch)

    def evaluate() -> EvalReport:
        evaluated.append(engine.step)
        return EvalReport(loss=loss(engine.step), effective_tokens=1, total_tokens=1)

    engine.objective = disturbed
    config = LoopConfig(save_every=save_every, eval_every=3)
    train(engine, source, total_steps=STEPS, config=config, evaluate=evaluate, run=run, checkpoints=store)
    run.close()
    return evaluated


def dies_at_forward(number: int) -> Disturbance:
    calls = 0

    def disturb(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Killed

    return disturb


def forwards_before(window: int) -> int:
    return sum(len(batches) for batches in windows().windows[:window])


# In the second empty window after the checkpoint of step 3, and in the window after both.
@pytest.mark.parametrize("window", [4, 5])
def test_windows_that_were_skipped_before_a_kill_are_listed_once(tmp_path: Path, window: int) -> None:
    assert go(tmp_path / "whole") == [0, 3, 6]
    whole = numbers(tmp_path / "whole")
    assert [line["step"] for line in whole if "skipped" in line] == [3, 3, 5]
    with pytest.raises(Killed):
        go(tmp_path / "killed", disturb=dies_at_forward(forwards_before(window) + 1))
    assert [line["step"] for line in numbers(tmp_path / "killed") if "skipped" in line] == [3] * (window - 3)
    assert go(tmp_path / "killed", resume=True) == [6]
    assert numbers(tmp_path / "killed") == whole


def test_a_stop_after_skipped_windows_and_another_after_the_resume(tmp_path: Path) -> None:
    go(tmp_path / "whole")
    folder = tmp_path / "stopped"
    with pytest.raises(RunStopped, match="after step 3/6"):
        # Asked in the first forward of the window after step 3, which is an empty one.
        go(folder, disturb=asks_in("train", 3))
    with pytest.raises(RunStopped, match=r"after step 3/6; the checkpoint is .*step-00000003"):
        go(folder, resume=True, disturb=asks_in("train", 3))
    go(folder, resume=True)
    assert numbers(folder) == numbers(tmp_path / "whole")


def test_an_evaluation_that_was_made_up_for_and_lost_again_is_listed_once(tmp_path: Path) -> None:
    go(tmp_path / "whole", save_every=0)
    folder = tmp_path / "stopped"
    with pytest.raises(RunStopped, match="after step 3/6"):
        go(folder, disturb=asks_in("train", 2), save_every=0)
    # The evaluation that the stop left out is made and written down, and the checkpoint is not saved again.
    save, CheckpointStore.save = CheckpointStore.save, dies
    try:
        with pytest.raises(Killed):
            go(folder, resume=True, save_every=0)
    finally:
        CheckpointStore.save = save
    assert [line["step"] for line in numbers(folder) if "eval_loss" in line] == [0, 3]
    assert go(folder, resume=True, save_every=0) == [3, 6]
    assert numbers(folder) == numbers(tmp_path / "whole")


def dies(*_: Any, **__: Any) -> Any:
    raise Killed


def test_held_out_data_without_a_token_are_evaluated_once_per_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Killed):
        go(folder, disturb=dies_at_forward(forwards_before(5) + 1), loss=lambda _: None)
    assert go(folder, resume=True, loss=lambda _: None) == [6]
    assert [line["step"] for line in numbers(folder) if "eval_loss" in line] == [0, 3, 6]


def test_a_run_that_began_with_the_checkpoint_of_another_forgets_its_own_lines_only(tmp_path: Path) -> None:
    go(tmp_path / "first")
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000003"
    second = tmp_path / "second"
    with pytest.raises(Killed):
        go(second, resume=True, checkpoint=checkpoint, disturb=dies_at_forward(4))
    assert [line["step"] for line in numbers(second) if "skipped" in line]
    go(second, resume=True, checkpoint=checkpoint)
    whole = numbers(tmp_path / "first")
    after = [line for line in whole if line["step"] > 3 or "skipped" in line]
    assert [line for line in numbers(second) if line["step"] > 3 or "skipped" in line] == after
