"""Split models through the Engine: FSDP2 and HSDP 2x2 on four ranks, exact, and none waits for another.

Uneven tokens, a rank without any, a short last window; ``pytest -s`` prints the errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import sharded
from tokennorm.engine import DistributedConfig, Runtime, wrap_model
from tokennorm.engine.sharding import decoder_blocks, shard_mesh
from tokennorm.errors import ConfigError, DistributedError
from tokennorm.testing import spawn_ranks

# The first test waits for all checks on all four ranks.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return [result.value for result in spawn_ranks(sharded.everything, 4, timeout_s=580)]


@pytest.mark.parametrize("name", sharded.STRATEGIES)
def test_a_split_model_has_the_exact_gradient(ranks: list[dict[str, Any]], name: str) -> None:
    for found in (result["strategies"] for result in ranks):
        for window in ("full", "short, clipped"):
            case = found[name, window]
            print(f"{name:<38} {window:<15} error {case.error:.1e}  norm {case.norm_error:.1e}")
            assert case.error < 1e-12
            assert case.norm_error < 1e-12
            assert case.tokens > 0
        assert found[name, "averaging"] == 4.0
        # Two blocks and the root; embedding and head where they are apart.
        assert found[name, "units"] == (5 if "apart" in name else 3, True)


def test_a_factor_of_the_shards_only_is_wrong(ranks: list[dict[str, Any]]) -> None:
    assert all(result["strategies"]["mistake"].error > 0.4 for result in ranks)


def test_one_supervised_token_against_a_thousand_does_not_hang(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        print(f"one token against a thousand          error {result['lonely token'].error:.1e}")
        assert result["lonely token"].tokens == 3001
        assert result["lonely token"].error < 1e-12


def test_adapters_on_a_split_frozen_base_are_exact(ranks: list[dict[str, Any]]) -> None:
    for found in (result["adapters"] for result in ranks):
        assert len(found["cases"]) == 6
        for name, case in found["cases"].items():
            print(f"adapters: {name:<52} error {case.error:.1e}  norm {case.norm_error:.1e}")
            assert case.error < 1e-12, name
            assert case.norm_error < 1e-12, name
        assert found["cases"]["one token against a thousand"].tokens == 3001
        assert found["frozen"], "the base is split, in units, and gets no gradient"
        assert found["mistake"] > 0.4


def test_a_unit_may_hold_a_half_precision_base_and_float32_adapters(ranks: list[dict[str, Any]]) -> None:
    for found in (result["adapters"]["mixed"] for result in ranks):
        for name, (error, naive, dtypes) in found.items():
            print(f"adapters: {name:<52} error {error:.1e}  naive {naive:.1e}")
            assert 1e-5 < error <= 1.5 * naive, name
            assert dtypes == {torch.float32}


def test_compiled_blocks_of_a_split_model_are_exact(ranks: list[dict[str, Any]]) -> None:
    for found in (result["compiled"] for result in ranks):
        assert len(found) == 4
        for name, compiled in found.items():
            print(f"compiled blocks: {name:<30} {compiled.graphs} graphs  error {compiled.case.error:.1e}")
            assert compiled.case.error < 1e-12, name
            assert compiled.case.norm_error < 1e-12, name
            assert compiled.same_names
            # Blocks share their graphs, and no hook breaks them: for one row, for more, and without a gradient;
            # behind a frozen embedding the first block has graphs of its own.
            assert 1 <= compiled.graphs <= (6 if "adapters" in name else 3), name


def test_a_tied_head_stays_in_the_root_unit(ranks: list[dict[str, Any]]) -> None:
    for units, error in (result["tied"] for result in ranks):
        print(f"tied head                             error {error:.1e}")
        assert units == 3
        assert error < 1e-12


def test_ranks_may_hold_different_numbers_of_evaluation_batches(ranks: list[dict[str, Any]]) -> None:
    for loss, alone, still_split in (result["held out"] for result in ranks):
        assert loss == pytest.approx(alone, rel=1e-13)
        assert still_split


def test_norms_of_plain_and_split_gradients_are_combined(ranks: list[dict[str, Any]]) -> None:
    for measured, norm, want, clipped in (result["mixed clipping"] for result in ranks):
        # The bfloat16 part has its own norm in float32.
        assert measured == pytest.approx(want, rel=1e-6)
        assert norm == measured
        # All by one factor; a bfloat16 gradient is rounded afterwards.
        assert clipped[:3] == pytest.approx([0.25] * 3, rel=1e-5)
        assert clipped[3] == pytest.approx(0.25, rel=1e-2)


def test_half_precision_is_as_good_as_a_naive_loop_in_it(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert len(result["half precision"]) == 4
        for name, (error, naive) in result["half precision"].items():
            print(f"{name:<38} error {error:.1e}  naive {naive:.1e}")
            assert 1e-5 < error <= 1.5 * naive, name


def test_an_infinity_in_one_part_of_a_gradient_stops_the_step_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for skipped, scale, steps, norm in (result["infinity"] for result in ranks):
        assert (skipped, scale, steps) == ("fp16 overflow", 512.0, 1)
        assert norm is not None
        assert 0 < norm < float("inf")


def test_float16_scales_plain_and_split_gradients_together(ranks: list[dict[str, Any]]) -> None:
    for found in (result["plain head"] for result in ranks):
        assert found["kinds"] == {True, False}
        print(f"float16, head left whole              error {found['case'].error:.1e}  naive {found['naive']:.1e}")
        assert 1e-5 < found["case"].error <= 1.5 * found["naive"]
        # An infinity on one rank, in its part of a split gradient or in its own copy of a whole one.
        assert found["split"] == ("fp16 overflow", 512.0, 1)
        assert found["whole"] == ("fp16 overflow", 256.0, 1)
        assert found["again"] == (None, 256.0, 2)


def test_shapes_of_the_mesh() -> None:
    assert shard_mesh(Runtime()) is None
    model = nn.Linear(2, 2)
    assert wrap_model(model, Runtime(), DistributedConfig(strategy="fsdp")) is model
    with pytest.raises(DistributedError, match="4 ranks can't be divided into groups of 3"):
        shard_mesh(Runtime(world_size=4), 3)
    with pytest.raises(ConfigError, match="shard_ranks is 3 for 4 ranks"):
        wrap_model(model, Runtime(world_size=4), DistributedConfig(strategy="hsdp", shard_ranks=3))
    with pytest.raises(ConfigError, match="shard_ranks is 2 with the strategy fsdp"):
        DistributedConfig(strategy="fsdp", shard_ranks=2)
    with pytest.raises(ConfigError, match="strategy is 'zero3'"):
        DistributedConfig(strategy="zero3")  # type: ignore[arg-type]


def test_blocks_are_the_outermost_lists_that_learn_something() -> None:
    inner = nn.ModuleList([nn.Linear(1, 1)])
    block = nn.Module()
    block.experts = inner
    model = nn.Module()
    model.layers = nn.ModuleList([block, nn.Linear(1, 1)])
    model.constants = nn.ModuleList([nn.Identity()])
    model.inside = nn.Sequential(nn.ModuleDict({"more": nn.ModuleList([nn.Linear(1, 1)])}))
    assert decoder_blocks(model) == [*model.layers, model.inside[0]["more"][0]]
    assert decoder_blocks(nn.Linear(1, 1)) == []
