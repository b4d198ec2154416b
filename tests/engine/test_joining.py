"""Ranks that are started again agree on a name of their own, whatever an earlier start left in the store."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tokennorm.engine.joining import agree_on_start
from tokennorm.errors import DistributedError

RANKS = 3


def agree(store: dist.Store, rank: int, delay_s: float = 0.0) -> str:
    time.sleep(delay_s)
    return agree_on_start(store, rank, RANKS, timeout_s=30.0)


@pytest.mark.parametrize("late", [(0,), (1, 2), (2,), ()])
def test_each_start_has_a_name_of_its_own(late: tuple[int, ...]) -> None:
    store, names = dist.HashStore(), []
    for _ in range(4):
        with ThreadPoolExecutor(RANKS) as pool:
            delays = [0.05 if rank in late else 0.0 for rank in range(RANKS)]
            (name,) = set(pool.map(agree, [store] * RANKS, range(RANKS), delays))
        names.append(name)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("survivors", [(0, 1), (0,), (1, 2), (2,)])
def test_a_start_that_was_broken_off_does_not_confuse_the_next(survivors: tuple[int, ...]) -> None:
    store = dist.HashStore()
    for rank in survivors:
        with pytest.raises(DistributedError, match=rf"rank {rank} of 3 waited 0 s for ranks that never came: "):
            agree_on_start(store, rank, RANKS, timeout_s=0.02)
    with ThreadPoolExecutor(RANKS) as pool:
        assert len(set(pool.map(agree, [store] * RANKS, range(RANKS), (0.0, 0.0, 0.1)))) == 1


def test_one_rank_alone_has_nobody_to_wait_for() -> None:
    assert agree_on_start(dist.HashStore(), 0, 1, timeout_s=0.0)
