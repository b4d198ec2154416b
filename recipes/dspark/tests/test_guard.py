"""The loss guard in a drafter's training: what is refused leaves no trace in the gradient, and is written down."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipes.dspark.tests.guard_case import (
    FEW,
    MANY,
    NOTHING,
    ONE_ROW,
    TOKENS,
    engine_of,
    error,
    micro,
    objective_of,
    reference_gradient,
    weights,
)
from recipes.dspark.tests.tiny import tiny_config, write_answers
from tests.draft.drafter_toy import toy_drafter
from tokennorm.draft import DraftModel, HiddenStateCache
from tokennorm.engine import Batch, CheckpointStore, LoopConfig, ObjectiveOutput, Runtime, wrap_ddp
from tokennorm.errors import CheckpointError, EmptyWindowError, KitUsageError, NonFiniteError, NonFiniteSlotError
from tokennorm.recipes.dspark import prepare, run
from tokennorm.recipes.dspark.config import GuardConfig, TrainConfig
from tokennorm.recipes.dspark.objective import DSparkObjective
from tokennorm.recipes.dspark.windows import window_flops
from tokennorm.testing import spawn_ranks

SHAPES: dict[str, dict[str, Any]] = {
    "DSpark": {},
    "bonus anchor, gated": {"first_supervised_slot": 1, "markov_head_type": "gated"},
    "no heads": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}


def sound(drafter: DraftModel) -> list[dict[str, Any]]:
    """Uneven: seven blocks a row, one, none."""
    return [micro(drafter, MANY, 1), micro(drafter, FEW, 2), micro(drafter, NOTHING, 3)]


def broken(drafter: DraftModel, states: str = "features", **options: Any) -> dict[str, Any]:
    return micro(drafter, MANY, 9, broken=states, **options)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("states", ["features", "last_hidden"])
def test_a_nan_in_the_targets_states_leaves_the_gradient_of_the_window_without_it(shape: str, states: str) -> None:
    drafter = toy_drafter(**SHAPES[shape])
    engine, kit = engine_of(drafter)
    window, before = sound(drafter), weights(drafter)
    report = engine.train_step([window[0], broken(drafter, states, at=(0, 2)), *window[1:]])
    expected = reference_gradient(sound(drafter), **SHAPES[shape])
    assert error(before - weights(drafter), expected) < 1e-12
    (refused,) = report.refused
    assert (refused.index, refused.verdict.reason, report.total_tokens) == (1, "non-finite", 3 * TOKENS)
    # Each (num, den) pair is the window's without the micro-batch.
    alone = engine_of(toy_drafter(**SHAPES[shape]))[0].train_step(sound(drafter))
    assert (alone.loss, alone.effective_tokens) == (report.loss, report.effective_tokens)
    assert alone.metrics == report.metrics
    assert report.metrics["tau"] is not None
    assert kit.loss_guard is not None
    assert kit.loss_guard.refused_total == 1


def test_the_dummy_counts_nothing_of_any_term() -> None:
    drafter = toy_drafter()
    objective = objective_of(drafter)
    batch = objective.dummy(broken(drafter))
    outputs = objective(drafter, batch)
    assert {"ce", "l1", "confidence", "tau", "accept_rate_4", "confidence_bias"} <= outputs.metrics.keys()
    assert outputs.metrics.keys() == objective(drafter, micro(drafter, FEW, 1)).metrics.keys()
    assert all(float(pair.num) == 0 == float(pair.den) for pair in outputs.metrics.values())
    assert float(outputs.loss_sum.detach()) == 0 == float(torch.as_tensor(outputs.count(batch)))
    outputs.loss_sum.backward()
    found = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
    # Through the whole drafter, as every rank's hooks need it.
    assert all(gradient is not None and not gradient.any() for gradient in found.values()), found


def test_what_no_supervised_slot_sees_is_judged_too() -> None:
    """Its gradient is zero, and on the way to the weights zero is multiplied by it."""
    drafter = toy_drafter()
    engine, _ = engine_of(drafter)
    hidden_nan = micro(drafter, ONE_ROW, 9, broken="features", at=(1, 3))
    before = weights(drafter)
    assert len(engine.train_step([*sound(drafter), hidden_nan]).refused) == 1
    assert error(before - weights(drafter), reference_gradient(sound(drafter))) < 1e-12
    # A state of the teacher that no slot learns from is never read.
    unread = micro(drafter, ONE_ROW, 9, broken="last_hidden", at=(1, 3))
    assert not engine_of(toy_drafter())[0].train_step([*sound(drafter), unread]).refused


class SameStates(DSparkObjective):
    """The planted mistake: a dummy that loses its blocks, and keeps the states that made the NaN."""

    def dummy(self, batch: Batch) -> Batch:
        kept = {
            name: batch[name] for name in ("input_ids", "position_ids", "documents", "features", "last_hidden")
        }
        blank = super().dummy(batch)
        blocks = micro(toy_drafter(), NOTHING, 9)
        return {**blank, **kept, "blocks": blocks["blocks"], "plan": blocks["plan"]}


class LossAlone(DSparkObjective):
    """The planted mistake: the guard sees the loss and nothing else."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        return dataclasses.replace(super().__call__(model, batch), judged=None)


class KeepsSlots(DSparkObjective):
    """The planted mistake: the loss is gone, its slots stay in the count."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        outputs = super().__call__(model, batch)
        return outputs if batch["total_tokens"] else dataclasses.replace(outputs, denominator=12.0)


def test_the_planted_mistakes_are_caught() -> None:
    drafter = toy_drafter()
    unseen = micro(drafter, ONE_ROW, 9, broken="features", at=(1, 3))
    for kind, bad, caught in (
        (SameStates, broken(drafter), NonFiniteError),
        (LossAlone, unseen, NonFiniteError),
        (KeepsSlots, broken(drafter), KitUsageError),
    ):
        engine, _ = engine_of(drafter, objective=objective_of(drafter, kind))
        with pytest.raises(caught):
            engine.train_step([*sound(drafter), bad])
    # Where no guard would refuse it, a slot that is not finite stays an error that names it.
    objective = objective_of(drafter)
    with torch.no_grad(), pytest.raises(NonFiniteSlotError, match=r"slot \[b=0"):
        objective(drafter, broken(drafter))


class Louder(DSparkObjective):
    """Multiplies the loss of a micro-batch that has a "factor"."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        outputs, factor = super().__call__(model, batch), batch.get("factor", 1.0)
        assert outputs.judged is not None
        return dataclasses.replace(outputs, loss_sum=outputs.loss_sum * factor, judged=outputs.judged * factor)


def test_a_spike_is_measured_on_the_whole_objective_per_weighted_slot() -> None:
    drafter = toy_drafter()
    engine, kit = engine_of(drafter, objective=objective_of(drafter, Louder), lr=0.0)
    alone = [engine.train_step([micro(drafter, MANY, seed)]) for seed in range(4)]
    assert kit.loss_guard is not None
    # The guard's losses are those of the log: all terms, over the sum of the slots' weights.
    for loss, report in zip(kit.loss_guard.history.losses, alone, strict=True):
        means: Any = report.metrics
        assert loss == pytest.approx(report.loss, rel=1e-12)
        assert loss == pytest.approx(0.1 * means["ce"] + 0.9 * means["l1"] + means["confidence"], rel=1e-9)
    (refused,) = engine.train_step([{**micro(drafter, MANY, 2), "factor": 10.0}, micro(drafter, FEW, 2)]).refused
    verdict = refused.verdict
    assert (refused.index, verdict.reason) == (0, "spike")
    assert alone[2].loss is not None
    assert verdict.loss == pytest.approx(10 * alone[2].loss)
    assert verdict.limit == pytest.approx(3 * statistics.median(kit.loss_guard.history.losses[:4]))


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_window_of_refused_micro_batches_is_skipped_whatever_the_policy(policy: str) -> None:
    drafter = toy_drafter()
    window = [broken(drafter), broken(drafter, "last_hidden")]
    engine, _ = engine_of(drafter, empty_window=policy)
    before = weights(drafter)
    report = engine.train_step(window)
    assert (report.skipped, report.step, len(report.refused)) == ("all refused", 0, 2)
    assert torch.equal(weights(drafter), before)
    assert engine.train_step(sound(drafter)).skipped is None
    empty = micro(drafter, NOTHING, 9)
    engine, _ = engine_of(drafter, empty_window=policy)
    if policy == "raise":
        with pytest.raises(EmptyWindowError):
            engine.train_step([empty])
    else:
        assert engine.train_step([empty]).skipped == "empty window"


def pairs(drafter: DraftModel, place: int | None, states: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(rank 0, rank 1) of each index; at ``place`` the target's states are NaN on rank 1."""
    window = [
        (micro(drafter, MANY, 1), micro(drafter, FEW, 2)),
        (micro(drafter, FEW, 3), micro(drafter, MANY, 4)),
        (micro(drafter, NOTHING, 5), micro(drafter, FEW, 6)),
    ]
    if place is not None:
        window[place] = (window[place][0], broken(drafter, states))
    return window


CASES = [("features", 0), ("features", 2), ("last_hidden", 1)]


def both_ranks(rank: int, ranks: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    runtime = Runtime(rank=rank, local_rank=rank, world_size=ranks)
    for states, place in CASES:
        drafter = toy_drafter()
        engine, kit = engine_of(drafter, wrap_ddp(drafter, runtime), ranks=ranks)
        before = weights(drafter)
        report = engine.train_step([pair[rank] for pair in pairs(drafter, place, states)])
        (refused,) = report.refused
        assert kit.loss_guard is not None
        found[states, place] = (
            before - weights(drafter),
            refused.index,
            refused.verdict.own_offence,
            report.loss,
            report.metrics,
            kit.loss_guard.state_dict(),
        )
    # Split over the ranks, where every forward is a collective.
    drafter = toy_drafter()
    for layer in drafter.layers:
        fully_shard(layer)
    fully_shard(drafter)
    head = toy_drafter().lm_head.weight.detach()
    objective = DSparkObjective(objective_of(toy_drafter()).loss, capture=None, teacher_head=head, guarded=True)
    engine, _ = engine_of(drafter, objective=objective, ranks=ranks)

    def whole() -> torch.Tensor:
        own = [p for p in drafter.parameters() if p.requires_grad]
        return torch.cat([(p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten() for p in own])

    before = whole()
    engine.train_step([pair[rank] for pair in pairs(toy_drafter(), 1, "features")])
    found["sharded"] = before - whole()
    return found


def test_a_nan_on_one_rank_of_two_leaves_both_with_the_gradient_of_the_rest() -> None:
    results = [result.value for result in spawn_ranks(both_ranks, 2, timeout_s=300)]
    drafter = toy_drafter()
    sides = pairs(drafter, None, "")
    for states, place in CASES:
        left = [batch for index, pair in enumerate(sides) if index != place for batch in pair]
        expected = reference_gradient(left)
        for rank, found in enumerate(results):
            gradient, index, own, *_ = found[states, place]
            assert (index, own) == (place, rank == 1)
            assert error(gradient, expected) < 1e-12, (states, place)
            # Refused on the one rank alone, the other's slots would stay: another gradient, plainly.
            if place != 2:
                assert error(gradient, reference_gradient([*left, sides[place][0]])) > 0.05
        assert results[0][states, place][3:] == results[1][states, place][3:], "both ranks report the same"
    left = [batch for index in (0, 2) for batch in sides[index]]
    for found in results:
        assert error(found["sharded"], reference_gradient(left)) < 1e-12


@pytest.mark.parametrize("cached", [False, True])
def test_the_dummy_fits_both_sources_of_states_and_a_reduced_vocabulary(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    """From a cache with log-totals, or from the target itself, which the dummy does not run."""
    write_answers(tiny_folder, tiny_folder / "sources")
    config = tiny_config(tiny_folder, "sources", guard=GuardConfig(enabled=True))
    config = dataclasses.replace(
        config,
        draft=dataclasses.replace(config.draft, vocabulary=64),
        cache=dataclasses.replace(config.cache, enabled=cached),
    )
    jobs = [prepare(config, Runtime()) for _ in range(2)]
    window = list(next(iter(jobs[0].windows)))
    assert (window[1].get("log_total") is not None) == cached
    expected = jobs[1].engine.train_step([window[0], window[2]])
    calls: list[int] = []
    if cached:
        window[1]["features"][0, 2] = torch.nan
    else:
        objective: Any = jobs[0].engine.objective
        capture = objective.capture

        def broken_once(**inputs: torch.Tensor) -> Any:
            calls.append(inputs["input_ids"].shape[1])
            captured = capture(**inputs)
            factor = torch.nan if len(calls) == 2 else 1.0
            return dataclasses.replace(captured, last_hidden=captured.last_hidden * factor)

        broken_once.layer_ids = capture.layer_ids  # type: ignore[attr-defined]
        monkeypatch.setattr(objective, "capture", broken_once)
    report = jobs[0].engine.train_step(window)
    assert len(report.refused) == 1
    assert len(calls) == (0 if cached else 3), "once for each micro-batch, and not for the dummy"
    assert (report.loss, report.metrics) == (expected.loss, expected.metrics)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    for one, other in zip(jobs[0].drafter.parameters(), jobs[1].drafter.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_run_with_a_broken_document_goes_on_and_writes_it_down(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_answers(tiny_folder, tiny_folder / "guarded")
    guard = GuardConfig(enabled=True, spike_multiplier=math.inf, files=1)
    loop = LoopConfig(save_every=4, peak_tflops=1e-3)
    train = TrainConfig(epochs=2, empty_window="skip")
    config = tiny_config(tiny_folder, "guarded", guard=guard, train=train, loop=loop)
    read = HiddenStateCache.__getitem__

    def poisoned(self: HiddenStateCache, index: Any) -> Any:
        document = read(self, index)
        if index == 5 and len(self) > 10:
            document.features[3, :4] = torch.nan
        return document

    monkeypatch.setattr(HiddenStateCache, "__getitem__", poisoned)
    result = run(config)
    folder = tiny_folder / "guarded" / "train"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one["reason"] for line in lines for one in line.get("refused", [])] == ["non-finite"] * 2, (
        "one an epoch"
    )
    assert result.after is not None
    (path,) = (folder / "refused").iterdir()
    text = path.read_text()
    assert not re.search(r"NaN|Infinity", text)
    file = json.loads(text)
    ((source,),) = file["batch"]["sources"]
    assert source == "chat-5"
    assert "<|im_start|>user\nsay " in file["text"][0]
    assert file["batch"]["features_non_finite"] == [[0, 3]]
    assert file["batch"]["last_hidden_non_finite"] == []
    assert "features" not in file["batch"]
    assert len(file["batch"]["blocks"]["anchors"][0]) == len(file["token_losses"][0])
    # Its checkpoint has the guard's history, and belongs to a run with the same guard.
    same = prepare(dataclasses.replace(config, guard=dataclasses.replace(guard, files=0)), Runtime())
    store = CheckpointStore(folder / "checkpoints", identity=same.identity)
    store.restore(same.engine)
    steps = [line for line in lines if "mfu" in line]
    # With a known peak the work is in the log; one process does all of it.
    for line, window in zip(steps, same.windows, strict=True):
        work = window_flops(same.drafter, window) / 1e9
        if "refused" not in line:
            assert line["mfu"] * line["seconds"] == pytest.approx(work, rel=0.05), "of the rounded seconds"
    kept = same.engine.token_loss_kit.loss_guard
    assert kept is not None
    assert (kept.refused_total, len(kept.history.losses)) == (2, 2 * 26 - 2)
    for other, named in (
        (dataclasses.replace(guard, spike_multiplier=4.0), "guard.spike_multiplier"),
        (GuardConfig(), "guard.enabled"),
    ):
        job = prepare(dataclasses.replace(config, guard=other), Runtime())
        with pytest.raises(CheckpointError, match=named):
            CheckpointStore(folder / "checkpoints", identity=job.identity).restore(job.engine)
