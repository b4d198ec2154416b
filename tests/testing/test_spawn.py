"""The helper that spawns ranks: results come back whole, failures end everything."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tokennorm.errors import DistributedError
from tokennorm.testing import spawn_ranks


def _sum_of_ranks(rank: int, world_size: int, scale: int) -> torch.Tensor:
    value = torch.full((3,), float(rank * scale))
    dist.all_reduce(value)
    return value


def _second_fails(rank: int, world_size: int) -> str:
    if rank == 1:
        raise ValueError("planted")
    dist.barrier()
    return "never"


def _second_dies(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(7)
    time.sleep(0.2)
    return "alive"


def _hangs(rank: int, world_size: int) -> None:
    time.sleep(60)


def test_tensors_come_back_by_value() -> None:
    results = spawn_ranks(_sum_of_ranks, 2, 10)
    assert [result.rank for result in results] == [0, 1]
    for result in results:
        assert torch.equal(result.value, torch.full((3,), 10.0))


def test_a_rank_that_raises_ends_the_others_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(DistributedError, match="planted"):
        spawn_ranks(_second_fails, 2, timeout_s=100)
    assert time.monotonic() - start < 60


def test_a_rank_that_dies_without_a_word_is_named() -> None:
    results = spawn_ranks(_second_dies, 2, check=False)
    assert results[0].value == "alive"
    assert "exit code 7" in (results[1].error or "")


def test_a_rank_that_hangs_is_killed_at_the_time_limit() -> None:
    with pytest.raises(DistributedError, match="did not finish before the time limit"):
        spawn_ranks(_hangs, 1, timeout_s=8)
