"""A signal ends the run after the step that is being made, on all ranks, and the run goes on as if nothing was."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.toy import ToyWindows, build_engine
from tests.engine.toy_run import asks_in, fingerprint, numbers, start
from tokennorm.engine import CheckpointStore, Engine, EvalReport, LoopConfig, RunStopped, StopRequest, train


@pytest.fixture(autouse=True)
def _python_handles_interrupts() -> Iterator[None]:
    """Who starts the tests as a shell's background job has interrupts ignored, and so would they."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


CONFIG = LoopConfig(eval_every=5, keep_best=True)


Outcome = tuple[dict[str, Any], list[dict[str, Any]], Path | None]


def outcome(folder: Path, engine: Engine) -> Outcome:
    """Weights and generators, records, and the best checkpoint."""
    best = CheckpointStore(folder / "checkpoints").best()
    return fingerprint(engine), numbers(folder), None if best is None else best.relative_to(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("signals") / "whole"
    return outcome(folder, start(folder, config=CONFIG))


@pytest.mark.parametrize(
    ("asks", "number", "stopped_at"),
    [
        (("train", 3), signal.SIGTERM, 4),
        # An evaluation is due after this step, and one has begun in the next case.
        (("train", 4), signal.SIGTERM, 5),
        (("evaluate", 5), signal.SIGINT, 5),
        (("train", 11), signal.SIGTERM, 12),
    ],
)
def test_a_signal_saves_after_the_step_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Outcome, asks: tuple[str, int], number: int, stopped_at: int
) -> None:
    run, before = tmp_path / "run", signal.getsignal(number)
    with pytest.raises(RunStopped, match=f"after step {stopped_at}/12; the checkpoint is") as caught:
        start(run, disturb=asks_in(*asks, number), config=CONFIG)
    assert signal.getsignal(number) is before
    assert caught.value.exit_code == 128 + number
    assert caught.value.folder == run
    assert caught.value.checkpoint == run / "checkpoints" / f"step-{stopped_at:08d}"
    assert outcome(run, start(run, resume=True, config=CONFIG)) == undisturbed


def test_an_evaluation_that_a_stop_left_out_is_made_once_and_its_checkpoint_is_the_best(tmp_path: Path) -> None:
    """The losses are such that the left out evaluation is the lowest; a second stop comes within it."""
    losses: dict[int, float] = {0: 9.0, 4: 3.0, 8: 5.0, 12: 4.0}
    evaluated: list[int] = []

    def go(*asks: tuple[str, int]) -> Path | None:
        engine, windows = build_engine(total_steps=12), ToyWindows(repeat=3)
        store = CheckpointStore(tmp_path, keep_last=1)
        if store.latest() is not None:
            windows.load_state_dict(store.restore(engine))
        objective = engine.objective

        def asking(model: Any, batch: Any) -> Any:
            if ("train", engine.step) in asks:
                os.kill(os.getpid(), signal.SIGTERM)
            return objective(model, batch)

        def evaluate() -> EvalReport:
            evaluated.append(engine.step)
            if ("evaluate", engine.step) in asks:
                os.kill(os.getpid(), signal.SIGTERM)
            return EvalReport(loss=losses[engine.step], effective_tokens=1, total_tokens=1)

        engine.objective = asking
        config = LoopConfig(eval_every=4, keep_best=True)
        train(engine, windows, total_steps=12, config=config, evaluate=evaluate, checkpoints=store)
        return store.best()

    for asks in (("train", 3), ("evaluate", 4)):
        with pytest.raises(RunStopped, match="after step 4/12"):
            go(asks)
    assert evaluated == [0, 4]
    with pytest.raises(RunStopped, match="after step 12/12"):
        go(("train", 11))
    assert go() == tmp_path / "step-00000004"
    assert evaluated == [0, 4, 8, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000012"]
    assert CheckpointStore(tmp_path).was_evaluated(12)
    manifest = json.loads((tmp_path / "step-00000012" / "manifest.json").read_text())
    assert manifest["held_out_loss"] == 4.0


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="stopped by SIGTERM after step 0/12; nothing was saved") as caught:
        start(tmp_path / "run", disturb=asks_in("evaluate", 0), config=CONFIG)
    assert caught.value.checkpoint is None
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_second_interrupt_ends_at_once_but_not_the_echo_of_the_first(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 100.5, 105.0])
    monkeypatch.setattr("tokennorm.engine.signals.time.monotonic", lambda: next(clock))
    with StopRequest(device=torch.device("cpu")) as stop:
        assert stop.agreed() == 0
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("SIGINT: the run ends after this step") == 1


def test_ignored_signals_stay_ignored_and_a_forked_worker_dies_of_its_own() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest(device=torch.device("cpu")) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.agreed() == 0
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
        assert os.WTERMSIG(os.waitpid(worker, 0)[1]) == signal.SIGTERM
        assert stop.agreed() == 0
