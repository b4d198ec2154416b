"""Joining the ranks that torchrun started, also when it starts them again.

torchrun keeps one key-value store for all restarts (pytorch issue 135712). A rank of a new start may find there
what a dead one left, connect to an address where nobody is, and fail or wait for ever. Restart counts don't tell
the starts apart: each machine has its own. So the ranks that are alive agree on a name for this start, and
everything of their process group lives under it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from tokennorm.errors import DistributedError

__all__ = ["agree_on_start", "join_ranks"]

_PREFIX = "tokennorm/start"
_LONGEST_PAUSE_S = 0.2


def join_ranks(backend: str, timeout: timedelta) -> None:
    """Do ``init_process_group`` from the environment (``env://``), apart from what earlier starts left.

    Raises:
        DistributedError: not all ranks came in time.
    """
    # torch types it as an iterator over anything.
    found = cast(Iterator[tuple[Store, int, int]], rendezvous("env://", timeout=timeout))
    store, rank, ranks = next(found)
    start = agree_on_start(store, rank, ranks, timeout_s=timeout.total_seconds())
    dist.init_process_group(backend, store=PrefixStore(start, store), rank=rank, world_size=ranks, timeout=timeout)


def agree_on_start(store: Store, rank: int, ranks: int, *, timeout_s: float) -> str:
    """Return a name that the ranks which are alive have in common, and no earlier start had.

    Each rank makes up a name. Rank 0 answers what it reads of the others with its own name and theirs; an answer
    to a name that was just made up comes from a living rank 0, and one that rank 0 finds accepted under its own
    name from a living rank. What earlier starts left fits neither.

    Args:
        store: that all ranks share, whatever is in it.
        rank: of this process.
        ranks: how many there are.
        timeout_s: seconds to wait for the others.

    Raises:
        DistributedError: not all ranks came in time.
    """
    own = uuid.uuid4().hex
    missing = set(range(1, ranks)) if rank == 0 else {0}
    answered: dict[int, str] = {}
    deadline, pause = time.monotonic() + timeout_s, 0.001
    if rank != 0:
        store.set(_key("here", rank), own)
    while missing:
        for other in sorted(missing):
            if rank != 0:
                start, _, name = _read(store, _key("answer", rank)).partition(" ")
                if name == own:
                    store.set(_key("accepted", rank), start)
                    return start
            elif _read(store, _key("accepted", other)) == own:
                missing.discard(other)
            else:
                name = _read(store, _key("here", other))
                # It may be a dead rank's; the living one overwrites it.
                if name and answered.get(other) != name:
                    store.set(_key("answer", other), f"{own} {name}")
                    answered[other] = name
        if missing and time.monotonic() > deadline:
            raise DistributedError(
                f"rank {rank} of {ranks} waited {timeout_s:.0f} s for ranks that never came: "
                + ", ".join(str(other) for other in sorted(missing)[:8]),
                fix="look for their output: one may have failed before it could join",
            )
        time.sleep(pause if missing else 0)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return own


def _key(kind: str, rank: int) -> str:
    return f"{_PREFIX}/{kind}/{rank}"


def _read(store: Store, key: str) -> str:
    """The value, empty where there is none yet; get() alone would wait for it."""
    return store.get(key).decode() if store.check([key]) else ""
