"""A guarded engine: what is refused leaves no trace in the gradient, and is reported, written down and resumed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.guard_toy import (
    BROKEN,
    SETTINGS,
    Factor,
    broken,
    error,
    guarded,
    reference_gradient,
    sound,
    step_gradient,
    toy,
)
from tests.engine.toy import weights
from tokennorm.engine import (
    Batch,
    CheckpointStore,
    Engine,
    LoopConfig,
    ObjectiveOutput,
    ProgressPrinter,
    RefusedFolder,
    RunFolder,
    train,
)
from tokennorm.errors import CheckpointError, EmptyWindowError, KitUsageError, NonFiniteError

SOUND = [sound(3, 9, 1), sound(20, 30, 2), sound(0, 6, 3), sound(7, 7, 4)]


class SameInputs(Factor):
    """The planted mistake: a dummy that only loses its labels, and not the inputs that made the NaN."""

    def dummy(self, batch: Batch) -> Batch:
        labels = torch.full_like(batch["shift_labels"], -100)
        return {**batch, "shift_labels": labels, "effective_tokens": 0, "total_tokens": 0}


class KeepsTokens(Factor):
    """The planted mistake: the loss is gone, its tokens stay in the count."""

    def __call__(self, model: Any, batch: Batch) -> ObjectiveOutput:
        outputs = super().__call__(model, batch)
        return outputs if batch["total_tokens"] else dataclasses.replace(outputs, denominator=12.0)


@pytest.mark.parametrize("router", [0.0, 0.4])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_nan_in_a_window_leaves_the_gradient_of_the_window_without_it(place: int, router: float) -> None:
    model = toy(router=router)
    engine, _ = guarded(model)
    window = [*SOUND[:place], broken(12, 15, 9), *SOUND[place:]]
    found = step_gradient(engine, window, model)
    assert error(found, reference_gradient(SOUND, router=router)) < 1e-12
    # Had its 12 tokens stayed in the count, each gradient would be 30/42 of this.
    assert error(found * 30 / 42, reference_gradient(SOUND, router=router)) > 0.1


def test_the_planted_mistakes_are_caught() -> None:
    window = [*SOUND, broken(12, 15, 9)]
    for objective, caught in ((SameInputs(), NonFiniteError), (KeepsTokens(), KitUsageError)):
        engine, _ = guarded(toy(), objective=objective)
        with pytest.raises(caught):
            engine.train_step(window)
    engine, _ = guarded(toy(), guard=False)
    with pytest.raises(NonFiniteError):
        engine.train_step(window)


def test_a_router_loss_that_is_not_finite_is_refused_like_the_loss_itself() -> None:
    model = toy(router=0.4)
    engine, kit = guarded(model)
    forward = model.forward

    def infinite_router(**inputs: Any) -> Any:
        outputs = forward(**inputs)
        return {
            **outputs,
            "extra_loss": outputs["extra_loss"] * (math.inf if inputs["num_supervised"] == 7 else 1),
        }

    model.forward = infinite_router
    found = step_gradient(engine, SOUND, model)
    assert error(found, reference_gradient(SOUND[:3], router=0.4)) < 1e-12
    assert kit.loss_guard is not None
    assert kit.loss_guard.refused_total == 1


def test_a_spike_is_refused_and_reported_and_a_new_level_is_taken_in_the_end() -> None:
    model = toy()
    engine, _ = guarded(model, lr=1e-3)
    engine.train_step(SOUND * 2)
    before, gradient = weights(model), reference_gradient(SOUND)
    report = engine.train_step([*SOUND, {**sound(12, 15, 9), "factor": 5.0}])
    (refused,) = report.refused
    verdict = refused.verdict
    assert (refused.index, verdict.step, verdict.reason, report.skipped) == (4, 2, "spike", None)
    assert verdict.loss is not None
    assert verdict.limit is not None
    assert 3 * 2.0 < verdict.limit < verdict.loss < 5 * 4.0, "nats per token"
    assert "refused micro-batch 4 on all ranks: loss 1" in str(refused)
    assert report.effective_tokens == 30
    assert report.total_tokens == 52
    # The weights moved a little since the reference's, by a step of 1e-3.
    assert error((before - weights(model)) / 1e-3, gradient) < 0.01
    hard = [{**batch, "factor": 5.0} for batch in SOUND]
    counts = [len(engine.train_step([*SOUND, *hard]).refused) for _ in range(2)]
    counts += [len(engine.train_step(hard).refused) for _ in range(6)]
    assert counts[:2] == [3, 3], "the one without tokens is no spike"
    assert counts[-3:] == [0, 0, 0]
    assert sum(counts[2:]) <= SETTINGS["window_size"] // 2 + 1


def test_an_infinite_loss_costs_an_fp16_run_its_micro_batch_and_not_its_window() -> None:
    infinite = {**sound(12, 15, 9), "factor": math.inf}
    outcomes = []
    for guard in (True, False):
        model = toy().float()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        engine, _ = guarded(model, guard=guard, scaler=scaler)
        before = weights(model)
        report = engine.train_step([*SOUND, infinite])
        outcomes.append((report.skipped, engine.step, scaler.get_scale(), len(report.refused)))
        if guard:
            assert error((before - weights(model)).double(), reference_gradient(SOUND)) < 1e-5
    assert outcomes == [(None, 1, 1024.0, 1), ("fp16 overflow", 0, 512.0, 0)]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_window_that_the_guard_empties_is_skipped_whatever_the_policy(policy: str) -> None:
    window = [broken(3, 5, 1), sound(0, 5, 3), broken(4, 5, 2)]
    model = toy()
    engine, _ = guarded(model, empty_window=policy)
    engine.scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 + step)
    before = weights(model)
    report = engine.train_step(window)
    assert (report.skipped, report.step, len(report.refused), report.loss) == ("all refused", 0, 2, None)
    assert torch.equal(weights(model), before)
    report = engine.train_step(SOUND)
    assert (report.skipped, report.step, report.lr) == (None, 1, 1.0), "the schedule did not move"
    assert error(before - weights(model), reference_gradient(SOUND)) < 1e-12


def test_data_without_a_supervised_token_follow_the_policy_whatever_the_guard_refuses() -> None:
    window = [sound(0, 5, 1), {**sound(0, 5, 2), "factor": math.nan}]
    for policy in ("raise", "skip"):
        engine, _ = guarded(toy(), empty_window=policy)
        engine.train_step([broken(3, 5, 1)])
        if policy == "raise":
            # The refused tokens were of another window.
            with pytest.raises(EmptyWindowError):
                engine.train_step(window)
        else:
            report = engine.train_step(window)
            assert (report.skipped, len(report.refused)) == ("empty window", 1)


def test_an_objective_without_a_dummy_is_refused_before_the_first_step() -> None:
    with pytest.raises(KitUsageError, match="the objective function has no method dummy"):
        guarded(toy(), objective=lambda model, batch: Factor()(model, batch))
    engine, kit = guarded(toy(), guard=False, objective=lambda model, batch: Factor()(model, batch))
    kit.build_loss_guard(**SETTINGS)
    with pytest.raises(KitUsageError, match="installed after the engine was built"):
        engine.train_step([broken(3, 5, 1)])


class Listed:
    """A window source over a list."""

    def __init__(self, windows: list[list[Batch]]) -> None:
        self.windows, self.place = windows, 0

    def __iter__(self) -> Any:
        while self.place < len(self.windows):
            self.place += 1
            yield self.windows[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        self.place = state["place"]


def some_windows() -> list[list[Batch]]:
    spike = {**sound(12, 15, 9), "factor": 6.0, "sources": ["chats.jsonl:7"]}
    return [SOUND, [*SOUND, spike], [broken(5, 8, 3), *SOUND], [*SOUND, spike], SOUND]


def test_skips_are_in_the_metrics_and_a_few_micro_batches_in_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    files = RefusedFolder(tmp_path / "refused", limit=2, decode=lambda ids: " ".join(f"t{i}" for i in ids))
    engine, _ = guarded(toy(), lr=1e-2, on_refused=files)
    train(engine, Listed(some_windows()), total_steps=5, run=run, progress=ProgressPrinter(5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [[r["reason"] for r in line.get("refused", [])] for line in lines] == [
        [],
        ["spike"],
        ["non-finite"],
        ["spike"],
        [],
    ]
    (logged,) = lines[2]["refused"]
    assert logged.pop("limit") > 0
    assert logged == {"micro_batch": 0, "reason": "non-finite", "loss": None, "non_finite_ranks": 1}
    names = sorted(path.name for path in files.folder.iterdir())
    assert names == ["step-00000002-micro-004-rank-0.json", "step-00000003-micro-000-rank-0.json"]
    spike, nan = (json.loads((files.folder / name).read_text()) for name in names)
    expected = sound(12, 15, 9)
    assert spike["batch"]["input_ids"] == expected["input_ids"].tolist()
    assert spike["batch"]["shift_labels"] == expected["shift_labels"].tolist()
    assert spike["batch"]["sources"] == ["chats.jsonl:7"]
    assert spike["text"] == [" ".join(f"t{i}" for i in expected["input_ids"][0].tolist())]
    assert sum(spike["token_losses"]) == pytest.approx(spike["own_loss_sum"])
    assert spike["token_losses"][:3] == [0.0] * 3
    assert spike["own_loss_sum"] / 12 == pytest.approx(spike["loss"])
    assert (nan["own_loss_sum"], nan["token_losses"][-1]) == ("nan", "nan")
    assert nan["batch"]["input_ids"][0][1] == BROKEN
    # The disk's trouble is not the run's.
    blocked = tmp_path / "file"
    blocked.write_text("")
    engine, _ = guarded(toy(), on_refused=RefusedFolder(blocked / "refused"))
    with pytest.warns(RuntimeWarning, match="could not be written: FileExistsError|could not be written: NotADir"):
        assert engine.train_step([*SOUND, broken(5, 8, 3)]).skipped is None


def test_what_cannot_be_decoded_or_described_does_not_end_a_run(tmp_path: Path) -> None:
    def decode(ids: Any) -> str:
        raise IndexError(f"no token {ids[0]}")

    files = RefusedFolder(tmp_path / "ids", decode=decode)
    engine, _ = guarded(toy(), on_refused=files)
    assert engine.train_step([*SOUND, broken(5, 8, 3)]).skipped is None
    (path,) = files.folder.iterdir()
    written = json.loads(path.read_text())
    assert written["text"].startswith("not decoded: IndexError: no token ")
    assert written["batch"]["input_ids"] == broken(5, 8, 3)["input_ids"].tolist()
    engine, _ = guarded(toy(), on_refused=RefusedFolder(tmp_path / "none", describe=lambda _: 1 / 0))
    with pytest.warns(RuntimeWarning, match="could not be written: ZeroDivisionError"):
        assert engine.train_step([*SOUND, broken(5, 8, 3)]).skipped is None


def test_a_resumed_run_refuses_what_the_undisturbed_one_refuses(tmp_path: Path) -> None:
    whole_model = toy()
    whole, _ = guarded(whole_model, lr=1e-2)
    expected = [len(whole.train_step(window).refused) for window in some_windows()]
    assert expected == [0, 1, 1, 1, 0]
    first, kit = guarded(toy(), lr=1e-2)
    for window in some_windows()[:3]:
        first.train_step(window)
    store = CheckpointStore(tmp_path)
    store.save(first)
    model = toy()
    second, second_kit = guarded(model, lr=1e-2)
    store.restore(second)
    assert kit.loss_guard is not None
    assert second_kit.loss_guard is not None
    assert second_kit.loss_guard.state_dict() == kit.loss_guard.state_dict()
    assert [len(second.train_step(window).refused) for window in some_windows()[3:]] == expected[3:]
    assert torch.equal(weights(model), weights(whole_model))
    # The planted mistake: with a history that starts anew, the spike is taken.
    forgetful_model = toy()
    forgetful, forgetful_kit = guarded(forgetful_model, lr=1e-2)
    store.restore(forgetful)
    assert forgetful_kit.loss_guard is not None
    forgetful_kit.loss_guard.history.replace([])
    spike_first = list(reversed(some_windows()[3]))
    assert not forgetful.train_step(spike_first).refused
    other, _ = guarded(toy(), guard=False)
    with pytest.raises(CheckpointError, match="only one of the two has a loss guard"):
        store.restore(other)


def run_windows(engine: Engine, windows: list[list[Batch]], **options: Any) -> Any:
    return train(engine, Listed(windows), total_steps=len(windows), config=LoopConfig(**options))


def test_a_run_that_only_skips_ends_and_says_whose_fault_it_is() -> None:
    nan, engine = [broken(3, 5, 1)], guarded(toy())[0]
    with pytest.raises(NonFiniteError, match=r"all of 3 windows in a row.*after step 1 are all finite") as caught:
        run_windows(engine, [SOUND, *[nan] * 9], max_refused_windows=3)
    assert "loop.max_refused_windows" in str(caught.value)
    model = toy()
    engine, _ = guarded(model)
    with torch.no_grad():
        model.embedding.weight[3] = math.nan
    with pytest.raises(NonFiniteError, match=r"all of 2 windows in a row.*hold NaN or infinity themselves"):
        run_windows(engine, [nan] * 4, max_refused_windows=2)


def test_a_window_that_trains_ends_the_row_and_spikes_have_no_part_in_it() -> None:
    nan, engine = [broken(3, 5, 1)], guarded(toy(), lr=1e-3)[0]
    spike = [{**sound(4, 6, 9), "factor": 1e3}]
    row = [nan, nan, SOUND, nan, spike, nan]
    assert run_windows(engine, [SOUND, SOUND, *row, SOUND], max_refused_windows=3).steps == 4
    with pytest.raises(NonFiniteError):
        run_windows(guarded(toy(), lr=1e-3)[0], [SOUND, SOUND, *row, nan, SOUND], max_refused_windows=3)


def test_tokens_of_skipped_windows_are_in_no_total() -> None:
    report = run_windows(guarded(toy(), lr=1e-3)[0], [SOUND, [broken(3, 5, 1)], SOUND])
    tokens = [sum(batch[name] for batch in SOUND) for name in ("effective_tokens", "total_tokens")]
    assert [report.effective_tokens, report.total_tokens] == [2 * one for one in tokens]
