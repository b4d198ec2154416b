"""Losses by group of tokens: pairs that add up over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokennorm.engine import CausalLMObjective, evaluate
from tokennorm.loss import merge_ratios

NAMES = ("code", "chat")


class PerTokenLosses(nn.Module):
    """Returns the loss that each input id stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, input_ids, shift_labels, num_supervised, use_cache):
        loss = torch.where(shift_labels != -100, input_ids.double() / 8, 0.0) * self.scale
        return {"loss": loss.flatten()}


def batch(seed: int, rows: int = 3, length: int = 7):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (rows, length), generator=generator)
    labels[torch.rand((rows, length), generator=generator) < 0.4] = -100
    return {
        "input_ids": torch.randint(1, 50, (rows, length), generator=generator),
        "shift_labels": labels,
        "groups": torch.randint(-1, 2, (rows, length), generator=generator),
        "effective_tokens": int((labels != -100).sum()),
        "total_tokens": rows * length,
    }


def by_hand(batches, place: int) -> tuple[float, int]:
    total, count = 0.0, 0
    for one in batches:
        for row in range(one["input_ids"].shape[0]):
            for at in range(one["input_ids"].shape[1]):
                if one["shift_labels"][row, at] != -100 and one["groups"][row, at] == place:
                    total += float(one["input_ids"][row, at]) / 8
                    count += 1
    return total, count


def test_each_group_is_a_sum_over_its_supervised_tokens():
    objective, model = CausalLMObjective(groups=NAMES), PerTokenLosses()
    batches = [batch(seed) for seed in range(3)]
    outputs = [objective(model, one) for one in batches]
    merged = merge_ratios(output.metrics for output in outputs)
    assert set(merged) == {"loss/code", "loss/chat"}
    means = []
    for place, name in enumerate(NAMES):
        pair = merged[f"loss/{name}"]
        total, count = by_hand(batches, place)
        assert (float(pair.num), float(pair.den)) == (total, count)
        means.append(pair.mean)
    # Tokens of no group count in the loss alone; means of means would differ.
    assert sum(float(merged[name].den) for name in merged) < sum(one["effective_tokens"] for one in batches)
    first = [output.metrics["loss/code"].mean for output in outputs]
    assert merged["loss/code"].mean != pytest.approx(sum(first) / 3)
    report = evaluate(model, objective, batches)
    assert [report.metrics[f"loss/{name}"] for name in NAMES] == means


def test_groups_one_place_late_are_noticed():
    """The token that is predicted decides, through its position: a shift changes the sums."""
    objective, model, one = CausalLMObjective(groups=NAMES), PerTokenLosses(), batch(0)
    late = {**one, "groups": one["groups"].roll(1, dims=1)}
    pair = objective(model, late).metrics["loss/code"]
    assert (float(pair.num), float(pair.den)) != by_hand([one], 0)


def test_a_dummy_counts_nothing_and_a_nan_that_is_not_supervised_does_not_spread():
    objective, model = CausalLMObjective(groups=NAMES), PerTokenLosses()
    metrics = objective(model, objective.dummy(batch(0))).metrics
    assert {name: (pair.num, pair.den) for name, pair in metrics.items()} == {
        "loss/code": (0.0, 0),
        "loss/chat": (0.0, 0),
    }
    assert metrics["loss/code"].mean is None

    class Broken(PerTokenLosses):
        def forward(self, input_ids, shift_labels, num_supervised, use_cache):
            loss = super().forward(input_ids, shift_labels, num_supervised, use_cache)["loss"]
            return {"loss": torch.where(shift_labels.flatten() == -100, torch.nan, loss)}

    one = batch(1)
    pair = objective(Broken(), one).metrics["loss/code"]
    assert (float(pair.num), float(pair.den)) == by_hand([one], 0)
    assert CausalLMObjective()(model, one).metrics == {}
