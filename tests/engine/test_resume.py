"""A resumed run ends with the undisturbed run's weights, bit for bit; a checkpoint of another run is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.toy import ToyLM, ToyWindows, build_engine, weights
from tests.engine.toy_run import IDENTITY, Killed, asks_in, dies_in, fingerprint, numbers, start
from tokennorm.engine import (
    CheckpointStore,
    Engine,
    EvalReport,
    LoopConfig,
    ProgressPrinter,
    RunFolder,
    RunStopped,
    checkpoint_files,
    evaluate,
    train,
)
from tokennorm.engine.throughput import StepCost
from tokennorm.errors import CheckpointError, DataError
from tokennorm.testing import spawn_ranks


@pytest.mark.parametrize("kill_at", [4, 8])
def test_resume_is_bitwise(tmp_path: Path, kill_at: int) -> None:
    undisturbed = fingerprint(start(tmp_path / "whole"))
    with pytest.raises(Killed):
        start(tmp_path / "cut", disturb=dies_in(kill_at))
    assert fingerprint(start(tmp_path / "cut", resume=True)) == undisturbed
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    saved = [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()]
    assert sorted(saved) == ["step-00000009", "step-00000012"]


def test_resume_without_the_generators_would_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake: the test above would notice a forgotten random state."""
    undisturbed = fingerprint(start(tmp_path / "whole"))
    with pytest.raises(Killed):
        start(tmp_path / "cut", disturb=dies_in(4))
    monkeypatch.setattr("tokennorm.engine.checkpoint.restore_rng_state", lambda *_: None)
    assert fingerprint(start(tmp_path / "cut", resume=True))["weights"] != undisturbed["weights"]


def on_ranks(rank: int, world_size: int, folder: str) -> Any:
    place = {"rank": rank, "world_size": world_size}
    StepCost.memory_bytes = lambda _: 1000 + rank  # type: ignore[method-assign]
    whole = fingerprint(start(Path(folder) / "whole", **place))
    # Both ranks die in the same step: what a killed job looks like to its checkpoints.
    with contextlib.suppress(Killed):
        start(Path(folder) / "killed", **place, disturb=dies_in(7))
    if rank == 0:
        # A file that rank 1 compares, so that only that rank sees the damage.
        path = Path(folder) / "killed" / "checkpoints" / "step-00000006" / "__0_0.distcp"
        data = bytearray(path.read_bytes())
        data[-2000] ^= 1
        path.write_bytes(data)
    else:
        # A shared file system may show a rank what was there a while ago.
        checkpoint_files.checkpoint_folders = lambda _: []
    dist.barrier()
    killed = fingerprint(start(Path(folder) / "killed", **place, resume=True))
    # One rank only gets a signal.
    config = LoopConfig(eval_every=7)
    evaluated = fingerprint(start(Path(folder) / "evaluated", **place, config=config))
    try:
        asks = asks_in("train", 6) if rank == 1 else lambda *_: None
        start(Path(folder) / "stopped", **place, disturb=asks, config=config)
        stopped = None
    except RunStopped as stop:
        stopped = (stop.exit_code, str(stop.checkpoint))
    again = fingerprint(start(Path(folder) / "stopped", **place, resume=True, config=config))
    return whole, killed, evaluated, stopped, again


def test_two_ranks_killed_or_stopped_resume_bitwise(tmp_path: Path) -> None:
    results = [result.value for result in spawn_ranks(on_ranks, 2, str(tmp_path), timeout_s=400)]
    for whole, killed, evaluated, stopped, again in results:
        assert whole == killed
        assert stopped == (143, str(tmp_path / "stopped" / "checkpoints" / "step-00000007"))
        assert evaluated == again
    assert results[0][0]["weights"] == results[1][0]["weights"]
    assert results[0][0]["random"] != results[1][0]["random"]
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert {line["memory_bytes"] for line in lines if "loss" in line} == {1001}, "of the rank that takes most"
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert list((tmp_path / "killed" / "checkpoints").glob("set-aside-*/step-00000006")), "passed over by both"
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "evaluated")


def saved(tmp_path: Path) -> Path:
    engine = build_engine(ToyLM(dtype=torch.float32))
    engine.train_step(ToyWindows().windows[0])
    return CheckpointStore(tmp_path, identity=IDENTITY).save(engine, loader_state={"place": 1})


def refused(tmp_path: Path, engine: Engine, identity: dict[str, Any] = IDENTITY) -> str:
    before = weights(engine.model)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path, identity=identity).restore(engine)
    assert torch.equal(weights(engine.model), before), "a refused checkpoint changes nothing"
    assert engine.step == 0
    return str(caught.value)


def test_another_configuration_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    saved(tmp_path)
    engine = build_engine(ToyLM(dtype=torch.float32))
    other = {"model": "toy", "optim": {"lr": 0.1, "betas": (0.9, 0.95)}, "data": "new"}
    message = refused(tmp_path, engine, other)
    assert "data: 'nothing' there, 'new' here; optim.lr: 0.05 there, 0.1 here" in message
    assert "betas" not in message


def test_another_model_is_refused_and_the_tensor_named(tmp_path: Path) -> None:
    saved(tmp_path)
    assert "embedding.weight: [17, 8] torch.float32 there, [17, 8] torch.float64 here" in refused(
        tmp_path, build_engine(ToyLM(dtype=torch.float64))
    )
    bigger = ToyLM(dtype=torch.float32)
    bigger.extra = torch.nn.Linear(2, 2)
    assert "extra.bias: no such tensor there, [2] torch.float32 here" in refused(tmp_path, build_engine(bigger))


def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    path = saved(tmp_path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[-2000] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    assert "contents of __0_0.distcp are not what was written" in refused(
        tmp_path, build_engine(ToyLM(dtype=torch.float32))
    )


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    assert "there is no checkpoint in" in refused(tmp_path, build_engine(ToyLM(dtype=torch.float32)))


def train_with_losses(folder: Path, *losses: float) -> Engine:
    """Ten steps with ``keep_best`` and an evaluation before them and after every second one."""
    engine, coming = build_engine(total_steps=10), iter(losses)
    train(
        engine,
        ToyWindows(repeat=3),
        total_steps=10,
        config=LoopConfig(eval_every=2, keep_best=True),
        evaluate=lambda: EvalReport(loss=next(coming), effective_tokens=1, total_tokens=1, metrics={}),
        checkpoints=CheckpointStore(folder, keep_last=1),
    )
    return engine


def test_the_best_is_kept_besides_the_last(tmp_path: Path) -> None:
    train_with_losses(tmp_path, 9.0, 5.0, 3.0, 4.0, 3.5, 6.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000010"]
    again = CheckpointStore(tmp_path, keep_best=True)
    assert again.best() == tmp_path / "step-00000004"
    assert (again.improves(3.5), again.improves(2.5), again.improves(None)) == (False, True, False)
    assert not CheckpointStore(tmp_path).improves(2.5), "not asked for"


def test_a_loss_that_is_no_number_is_never_the_best_and_a_damaged_checkpoint_neither(tmp_path: Path) -> None:
    engine = train_with_losses(tmp_path, 9.0, float("nan"), float("inf"), 4.0, float("nan"), 6.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000010"]
    store = CheckpointStore(tmp_path, keep_best=True)
    store.save(engine, held_out_loss=float("nan"))
    again = CheckpointStore(tmp_path, keep_best=True)
    assert again.best() == tmp_path / "step-00000006"
    assert (again.improves(4.5), again.improves(3.5), again.improves(float("nan"))) == (False, True, False)
    (tmp_path / "step-00000006" / "state.pt").unlink()
    assert CheckpointStore(tmp_path).best() is None


def test_a_save_changes_nothing_and_needs_no_step(tmp_path: Path) -> None:
    """An optimizer that has no state yet has none in the checkpoint either."""
    engine = build_engine(ToyLM(dtype=torch.float32))
    CheckpointStore(tmp_path).save(engine)
    assert engine.optimizer.state == {}
    other = build_engine(ToyLM(dtype=torch.float32, seed=3))
    CheckpointStore(tmp_path).restore(other)
    assert torch.equal(weights(other.model), weights(engine.model))
    assert other.optimizer.state == {}


def test_another_cut_of_the_same_windows_is_said_and_allowed(tmp_path: Path) -> None:
    def store(rows: int) -> CheckpointStore:
        return CheckpointStore(tmp_path, identity={**IDENTITY, "layout": {"micro_batch_size": rows}})

    engine = build_engine(ToyLM(dtype=torch.float32))
    engine.train_step(ToyWindows().windows[0])
    store(4).save(engine, loader_state={"place": 1})
    said: list[str] = []
    resumed = build_engine(ToyLM(dtype=torch.float32, seed=5))
    assert store(2).restore(resumed, say=said.append) == {"place": 1}
    assert said[0] == "note: micro_batch_size: 4 there, 2 here"
    assert "same samples follow in the same order" in said[1]
    assert torch.equal(weights(resumed.model), weights(engine.model))
    said.clear()
    store(4).restore(resumed, say=said.append)
    assert said == []


def test_a_finished_run_resumes_to_nothing_to_do(tmp_path: Path) -> None:
    done = fingerprint(start(tmp_path))
    lines = numbers(tmp_path)
    assert fingerprint(start(tmp_path, resume=True)) == done
    assert numbers(tmp_path) == lines


def test_the_loop_prints_evaluates_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_engine(total_steps=8)
    run = RunFolder(tmp_path)
    report = train(
        engine,
        ToyWindows(repeat=2),
        total_steps=8,
        config=LoopConfig(eval_every=4, log_every=3),
        evaluate=lambda: evaluate(engine.model, engine.objective, ToyWindows().windows[1]),
        run=run,
        progress=ProgressPrinter(8),
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "held-out after step 0",
        "step 1/8",
        "step 3/8",
        "held-out after step 4",
        "step 6/8",
        "step 8/8",
        "held-out after step 8",
    ]
    assert report.before is not None
    assert report.after is not None
    assert report.after.loss is not None
    assert lines[0] == f"held-out after step 0  loss {report.before.loss:.4f}  tok 46/79"
    assert lines[-1] == f"held-out after step 8  loss {report.after.loss:.4f}  tok 46/79"
    tokens = [
        batch[name] for name in ("effective_tokens", "total_tokens") for w in ToyWindows().windows for batch in w
    ]
    half = len(tokens) // 2
    assert (report.steps, report.effective_tokens, report.total_tokens) == (
        8,
        2 * sum(tokens[:half]),
        2 * sum(tokens[half:]),
    )
    records = numbers(tmp_path)
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 9))
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 4, 8]
    assert records[0]["eval_loss"] > records[-1]["eval_loss"], "it learns"


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    engine = build_engine(total_steps=8)
    objective = engine.objective

    def interrupted(model: Any, batch: Any) -> Any:
        if engine.step == 3:
            raise KeyboardInterrupt
        return objective(model, batch)

    engine.objective = interrupted
    store = CheckpointStore(tmp_path)
    with pytest.raises(
        KeyboardInterrupt, match=r"interrupted at step 3/8; the last checkpoint is .*step-00000002"
    ):
        train(engine, ToyWindows(repeat=2), total_steps=8, config=LoopConfig(save_every=2), checkpoints=store)


def test_data_without_any_supervised_token_is_an_error() -> None:
    from tests.engine.toy import micro_batch, skipping_kit

    windows = ToyWindows()
    windows.windows = [[micro_batch(0, 4, seed)] for seed in range(3)]
    with pytest.raises(DataError, match="no window of the data had a supervised token"):
        train(build_engine(token_loss_kit=skipping_kit()), windows, total_steps=3)
