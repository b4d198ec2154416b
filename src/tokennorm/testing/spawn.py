"""Run a function in several processes joined by gloo, and bring back what each returned.

The rendezvous is a file in a temporary folder, so no port is fixed and tests may run side by side.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tokennorm.errors import DistributedError

__all__ = ["RankResult", "spawn_ranks"]


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank brought back: ``value`` (picklable), or ``error`` with its traceback as text."""

    rank: int
    value: Any = None
    error: str | None = None


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    # Several ranks share the cores of one machine; one thread each is both fairest and reproducible.
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(rank, world_size, *args)
        # Pickled here, by value: the queue would send tensors as handles that die with this process.
        results.put(pickle.dumps(RankResult(rank=rank, value=value)))
    except BaseException:
        results.put(pickle.dumps(RankResult(rank=rank, error=traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def spawn_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    check: bool = True,
) -> list[RankResult]:
    """Run ``function(rank, world_size, *args)`` in ``world_size`` new processes joined by gloo.

    Args:
        function: a module-level function (it is pickled by name); its return value must be picklable.
        world_size: number of ranks.
        args: further arguments, the same for every rank.
        timeout_s: seconds after which every process is killed.
        check: raise when a rank failed; otherwise its traceback is in ``RankResult.error``.

    Returns:
        One result per rank, in rank order.

    Raises:
        DistributedError: a rank raised, died, or the time ran out. No process is left behind.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    collected: dict[int, RankResult] = {}
    with tempfile.TemporaryDirectory(prefix="tokennorm-ranks-") as folder:
        rendezvous = os.path.join(folder, "store")
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, rendezvous, timeout_s, function, args, results),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _collect(processes, results, collected, time.monotonic() + timeout_s, stop_on_error=check)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    ordered = [collected[rank] for rank in sorted(collected)]
    failed = [result for result in ordered if result.error is not None]
    if check and failed:
        raise DistributedError(
            "\n".join(f"rank {result.rank} of {world_size} failed:\n{result.error}" for result in failed)
        )
    return ordered


def _collect(
    processes: list[Any],
    results: Any,
    collected: dict[int, RankResult],
    deadline: float,
    *,
    stop_on_error: bool,
) -> None:
    """Gather one result per rank until the deadline; a rank that died without a word counts as failed."""
    while len(collected) < len(processes):
        try:
            result = pickle.loads(results.get(timeout=0.1))
        except queue.Empty:
            for rank, process in enumerate(processes):
                if rank not in collected and not process.is_alive():
                    # Its last words may still be in the pipe: look once more before giving up on it.
                    try:
                        last = pickle.loads(results.get(timeout=0.5))
                        collected[last.rank] = last
                    except queue.Empty:
                        collected[rank] = RankResult(rank=rank, error=f"died with exit code {process.exitcode}")
            if time.monotonic() > deadline:
                for rank in range(len(processes)):
                    collected.setdefault(rank, RankResult(rank=rank, error="did not finish before the time limit"))
            continue
        collected[result.rank] = result
        if stop_on_error and result.error is not None:
            return
