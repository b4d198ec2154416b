"""A part of the catalogue, one seed each; benchmarks/audit_catalogue.py runs all of it with three."""

from __future__ import annotations

import math

import pytest
import torch

from tests.audit import loop_pieces as pieces
from tests.audit import mistaken_loops as mistaken
from tests.audit.loops import EXACT, MISTAKES, Loop
from tokennorm.audit import CATALOGUE, Layout

# One of each kind: what is counted, how it is averaged, which loss, which scale, what is left out, rounding.
IN_CI = (
    "mean of both",
    "counted before the shift",
    "prompt supervised",
    "/ ranks",
    "rescaled twice",
    "fixed division, short last window",
    "router loss x ranks x accumulation",
    "label smoothing averaged per micro-batch",
    "targets cross documents",
    "attention mask on packed rows",
    "float16 loss",
    "clipped before rescaling",
    "skipped micro-batch counted",
    "one rank missing",
    "ranks never meet",
    "not cleared",
    "a gradient thrown away",
)
# These are computed under wrong definitions, micro-batch by micro-batch: fewer layouts will do here.
SLOW = {"prompt supervised", "float16 loss", "targets cross documents", "attention mask on packed rows"}
EXACT_IN_CI = (
    "DDP, deferred, clipped",
    "summed by hand, counted",
    "own clipping",
    "FSDP2, clipped",
    "loss scaler",
    "router loss",
    "weighted tokens",
)


def named(name: str) -> Loop:
    return next(loop for loop in (*EXACT, *MISTAKES) if loop.name == name)


def test_the_catalogue_has_a_loop_for_every_mistake():
    planted = {name for loop in MISTAKES for name in loop.expected}
    without_loop = {"not_finite", "nan_from_empty_micro_batch", "optimizer_never_stepped", "loop_failed"}
    without_loop |= {"unknown", "cannot_tell", "rounding"}
    assert planted == set(CATALOGUE) - without_loop
    assert len(EXACT) >= 20


@pytest.mark.parametrize("name", IN_CI)
def test_a_mistake_gets_its_name(name, audit):
    loop = named(name)
    report = audit(loop, ranks=(1, 2) if name in SLOW else (1, 2, 3))
    assert not report.exact
    assert report.diagnosis is not None
    assert (report.diagnosis.name, *report.diagnosis.also) == loop.expected, str(report)
    # Layouts in which the mistake can't show are exact, and say so: with one micro-batch on one rank, most.
    assert any(layout.error > 1e-4 for layout in report.layouts)


@pytest.mark.parametrize("name", EXACT_IN_CI)
def test_a_right_loop_is_not_accused(name, audit):
    report = audit(named(name))
    assert report.exact, str(report)
    assert report.diagnosis is None
    assert all(layout.error < 5e-6 for layout in report.layouts)
    assert report.token_weights is not None
    assert report.token_weights.min == pytest.approx(1, abs=1e-4)
    assert report.token_weights.max == pytest.approx(1, abs=1e-4)


def test_token_weights_are_those_that_the_loop_gave(audit):
    report = audit(named("mean of both"), ranks=(2,))
    layout = next(layout for layout in report.layouts if layout.name == "uneven ranks and micro-batches")
    (window,) = layout.windows
    tokens: dict[tuple[int, int], float] = {}
    for w in window.weights:
        place = (w.rank, w.micro_batch)
        tokens[place] = tokens.get(place, 0.0) + w.tokens
    total = sum(tokens.values())
    assert total == window.supervised_tokens
    assert len(window.weights) == 9
    for w in window.weights:
        due = total / (2 * 3 * tokens[w.rank, w.micro_batch])
        assert w.weight == pytest.approx(due, rel=1e-4)
    assert max(w.weight for w in window.weights) > 2 * min(w.weight for w in window.weights)


def test_two_mistakes_of_one_loop_are_both_named(audit):
    report = audit(Loop(name="both", step=mistaken.means_of_all_tokens), ranks=(1, 2))
    assert report.diagnosis is not None
    assert {report.diagnosis.name, *report.diagnosis.also} == {
        "mean_of_rank_and_micro_batch_means",
        "prompt_supervised",
    }


def test_a_logged_loss_that_is_off_is_noted(audit):
    notes = audit(named("mean of both"), ranks=(2,)).notes
    assert any("logged loss" in note for note in notes)
    notes = audit(named("x ranks"), ranks=(2,), packed=False).notes
    assert not any("logged" in note for note in notes)


def test_it_says_when_it_cannot_tell(audit):
    """Two ranks and two micro-batches: a factor of two may be either."""
    square = tuple(
        Layout(name=str(samples), windows=((((samples[0],), (samples[1],)), ((samples[2],), (samples[3],))),))
        for samples in ((0, 1, 2, 3), (4, 5, 6, 7))
    )
    report = audit(named("x ranks"), layouts=square)
    assert report.diagnosis is not None
    assert report.diagnosis.name == "cannot_tell"
    assert set(report.diagnosis.candidates) == {"factor_ranks_too_much", "factor_accumulation_too_much"}


def test_it_says_when_it_is_none_of_the_known_ones(audit):
    report = audit(Loop(name="decay", step=mistaken.with_weight_decay_in_the_loss), ranks=(1,))
    assert report.diagnosis is not None
    assert report.diagnosis.name == "unknown"
    assert report.diagnosis.residual > 1e-3


def test_a_tolerance_of_ones_own(audit):
    """Rounding is no mistake of the normalisation, and is not called one."""
    report = audit(named("DDP, counted"), ranks=(1,), tolerance=1e-9)
    assert report.diagnosis is not None
    assert report.diagnosis.name == "rounding"
    assert audit(named("bfloat16 autocast"), ranks=(1,), tolerance=0.02).exact


def test_a_loop_without_packing_is_not_given_packs(audit):
    report = audit(Loop(name="bigram", step=pieces.counted, build=pieces.build_bigram), ranks=(1,))
    assert report.exact, str(report)
    assert not any(layout.packed for layout in report.layouts)
    assert any("position_ids" in note for note in report.notes)


def test_nan_in_empty_micro_batches(audit):
    report = audit(Loop(name="nan", step=mistaken.nan_when_empty))
    assert not report.exact
    assert report.diagnosis is not None
    assert report.diagnosis.name == "nan_from_empty_micro_batch"
    empty = [layout for layout in report.layouts if "empty" in layout.name]
    assert empty
    assert all(math.isnan(layout.error) for layout in empty)
    assert all(layout.exact for layout in report.layouts if "empty" not in layout.name)


def rows_to_points(samples, packed):
    """Not tokens at all: rows of a regression, each with as many targets as it says."""
    return {
        "x": torch.stack([torch.linspace(-1, 1, 6) * (1 + number) for number, _ in samples]),
        "targets": [count for _, count in samples],
    }


def squared_errors(model, batch):
    """Of the first targets of each row, and which row each belongs to."""
    outputs = model(batch["x"])
    keep = torch.arange(outputs.shape[1]) < torch.tensor(batch["targets"])[:, None]
    row = torch.arange(len(outputs))[:, None].expand_as(outputs)
    return (outputs - 1.0).square()[keep], torch.ones(int(keep.sum())), row[keep]


def build_regression():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("means", [False, True])
def test_data_and_loss_of_another_kind(audit, means):
    def step(model, optimizer, batches):
        losses = [squared_errors(model, batch)[0] for batch in batches]
        optimizer.zero_grad()
        if means:
            sum(pieces.mean_or_zero(each) / len(losses) for each in losses).backward()
        else:
            torch.cat(losses).mean().backward()
        optimizer.step()

    report = audit(
        Loop(name="regression", step=step, build=build_regression),
        samples=[(number, 1 + 5 * (number % 3 == 0)) for number in range(7)],
        make_batch=rows_to_points,
        token_loss=squared_errors,
        ranks=(1,),
    )
    if means:
        assert report.diagnosis is not None
        assert report.diagnosis.name == "mean_of_micro_batch_means"
    else:
        assert report.exact, str(report)
