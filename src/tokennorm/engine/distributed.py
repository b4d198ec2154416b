"""Processes: joining the group that torchrun describes, choosing a device, and leaving without hanging."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tokennorm.engine.joining import join_ranks
from tokennorm.errors import ConfigError, DistributedError, TokenNormError

__all__ = [
    "DistributedConfig",
    "Runtime",
    "all_ranks_or_none",
    "broadcast_from_main",
    "check_ranks_agree",
    "distributed_session",
    "set_gradient_sync",
    "unwrap_model",
    "wrap_ddp",
]

T = TypeVar("T")

_CPU = torch.device("cpu")

# Set on an FSDP2 model whose gradients are reduce-scattered at every micro-batch.
SHARDED_GRADIENTS = "_tokennorm_sharded_gradients"

# How a collective fails when the other side is gone (gloo's words; NCCL raises DistBackendError).
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Broken pipe")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Where the run computes. Start several ranks with torchrun; nothing is to be set here for that."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model: a GPU when there is one (auto), or as given."""
    threads: int | None = None
    """CPU threads of each rank; by default the cores of this machine divided by its ranks."""
    timeout_s: float = 600.0
    """Seconds that a collective may wait for another rank before it is an error."""
    alone_timeout_s: float = 43_200.0
    """Seconds that ranks may wait for what one does alone: fetching, encoding, exporting."""
    strategy: Literal["ddp", "fsdp", "hsdp"] = "ddp"
    """ddp: a whole model on each rank. fsdp: one, split over all ranks. hsdp: one per group of shard_ranks."""
    shard_ranks: int | None = None
    """hsdp: ranks that hold one model together, neighbours; by default those of a machine."""
    head_unit: Literal["root", "own"] = "root"
    """fsdp, hsdp: gather embedding and head with the rest of the model, or each when it runs (less memory)."""
    accumulate: Literal["full", "sharded"] = "full"
    """fsdp, hsdp: gradients between micro-batches, whole on each rank (less traffic) or split (less memory)."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("strategy", ("ddp", "fsdp", "hsdp")),
            ("head_unit", ("root", "own")),
            ("accumulate", ("full", "sharded")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"distributed.{name} is {getattr(self, name)!r}", fix=f"give {' or '.join(allowed)}"
                )
        if self.shard_ranks is not None and (self.shard_ranks < 1 or self.strategy != "hsdp"):
            raise ConfigError(
                f"distributed.shard_ranks is {self.shard_ranks} with the strategy {self.strategy}",
                fix="give 1 or more with hsdp; leave it out otherwise",
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"distributed.threads is {self.threads}", fix="give 1 or more, or none")
        for name in ("timeout_s", "alone_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"distributed.{name} is {getattr(self, name)}", fix="give a positive number of seconds"
                )


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """This process's place in the run; ``group`` None is the default group (or no group at all).

    ``patient`` is a group of the same ranks, on the CPU, that waits for what a rank does alone; None: ``group``.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = _CPU
    group: dist.ProcessGroup | None = None
    patient: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes."""
        return self.rank == 0


@contextmanager
def distributed_session(config: DistributedConfig | None = None) -> Iterator[Runtime]:
    """Join the ranks that torchrun started (or stand alone), and leave them at the end.

    A process group that already exists is used and left alone. When the body raises, the group is aborted
    rather than destroyed, since a graceful end would wait for ranks that will never come; the error gets a note
    with the rank. The other ranks then fail in their next collective, with an error that points here.

    Raises:
        DistributedError: a collective failed because another rank is gone.
    """
    config = config or DistributedConfig()
    owns_group = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    runtime = _join(config, owns_group)
    try:
        yield runtime
    except BaseException as error:
        if owns_group:
            _abort(runtime)
        if runtime.world_size > 1 and _peer_is_gone(error):
            raise DistributedError(
                f"rank {runtime.rank} of {runtime.world_size} stopped: a collective failed because another rank "
                "is gone or stuck",
                why="ranks work in step; one that ends takes all others with it",
                fix="look for the traceback of the other rank: that one is the cause",
            ) from error
        if runtime.world_size > 1:
            error.add_note(f"(raised on rank {runtime.rank} of {runtime.world_size})")
        raise
    else:
        if owns_group:
            dist.destroy_process_group()
        elif runtime.patient is not None:
            dist.destroy_process_group(runtime.patient)


def _join(config: DistributedConfig, owns_group: bool) -> Runtime:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = _choose_device(config.device, local_rank)
    if owns_group:
        join_ranks("nccl" if device.type == "cuda" else "gloo", timedelta(seconds=config.timeout_s))
    _set_threads(config.threads, local_world_size)
    if not dist.is_initialized():
        return Runtime(device=device)
    world_size = dist.get_world_size()
    patient = None
    if world_size > 1:
        # gloo on any device: on a GPU a wait would be a kernel, and its end that of the process.
        patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.alone_timeout_s))
        assert isinstance(patient, dist.ProcessGroup), "every rank is a member"
    return Runtime(
        rank=dist.get_rank(), local_rank=local_rank, world_size=world_size, device=device, patient=patient
    )


def _choose_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("the device is 'cuda', but torch sees no GPU", fix="give distributed.device cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: this machine has {torch.cuda.device_count()}",
            fix="start at most one rank per GPU (torchrun --nproc_per_node)",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _set_threads(threads: int | None, local_world_size: int) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    elif local_world_size > 1:
        # torchrun exports OMP_NUM_THREADS=1 by itself, which leaves most cores of a CPU run idle.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_world_size))


def _abort(runtime: Runtime) -> None:
    # NCCL: ends kernels that wait for another rank. gloo has nothing to abort: its sockets close with us.
    if runtime.device.type == "cuda" and dist.group.WORLD is not None:
        dist.group.WORLD.abort()


def _peer_is_gone(error: BaseException) -> bool:
    if isinstance(error, TokenNormError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or any(
        phrase in str(error) for phrase in _PEER_GONE
    )


def broadcast_from_main(value: T, runtime: Runtime) -> T:
    """Return rank 0's ``value`` on every rank (a picklable object)."""
    if runtime.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=runtime.group, device=_message_device(runtime))
    return box[0]


def gather_objects(value: T, runtime: Runtime, *, patiently: bool = False) -> list[T]:
    """Return every rank's ``value`` in rank order, on every rank.

    ``patiently`` after work whose time differs between ranks: its limit is ``alone_timeout_s``.
    """
    if runtime.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * runtime.world_size
    group = runtime.patient if patiently and runtime.patient is not None else runtime.group
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _message_device(runtime: Runtime) -> torch.device | None:
    return runtime.device if runtime.device.type == "cuda" else None


def check_ranks_agree(values: Mapping[str, object], runtime: Runtime) -> None:
    """Compare facts that every rank must share (windows, parameters, configuration), once, before the start.

    Waits patiently: loading and encoding came before it.

    Raises:
        DistributedError: on every rank, naming what differs and its value on each rank.
    """
    everyone = gather_objects(dict(values), runtime, patiently=True)
    for name in sorted({name for one in everyone for name in one}):
        seen = [one.get(name) for one in everyone]
        if any(value != seen[0] for value in seen):
            raise DistributedError(
                f"the ranks disagree about {name}: "
                + ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(seen)),
                why="ranks that plan different work wait for each other forever, or train different models",
                fix="start every rank with the same command, files and library versions",
            )


def all_ranks_or_none(action: Callable[[], T], runtime: Runtime) -> T:
    """Run ``action`` on this rank; when it raises on any rank, raise on all of them instead of hanging.

    Ranks that are done wait for the others up to ``alone_timeout_s``.

    Returns:
        This rank's result.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    messages = gather_objects(None if error is None else str(error), runtime, patiently=True)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise DistributedError(f"rank {rank} of {runtime.world_size} failed: {message}")
    return result  # type: ignore[return-value]


def wrap_ddp(model: nn.Module, runtime: Runtime) -> nn.Module:
    """Wrap ``model`` in DDP, or return it as it is for one rank. Apply the loss patch before, not after.

    Buffers are synced once, here, and not before each forward: a causal LM's are constants (rotary
    frequencies), and the sync would be one more collective per window.
    """
    if runtime.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[runtime.local_rank] if runtime.device.type == "cuda" else None,
        process_group=runtime.group,
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Say whether the next forward and backward reduce gradients over the ranks.

    It has to be set before the forward, which prepares the reduction: the same as ``no_sync()`` around both. A
    model whose gradients are to stay split (``accumulate="sharded"``) is reduced inside each group of shards in
    any case, and between the groups only when ``sync`` is set.
    """
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = sync
    elif isinstance(model, FSDPModule):
        model.set_is_last_backward(sync)
        if getattr(model, SHARDED_GRADIENTS, False):
            model.set_requires_all_reduce(sync)
        else:
            model.set_requires_gradient_sync(sync)


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DDP. FSDP2 does not wrap: its model is returned as it is."""
    return model.module if isinstance(model, DistributedDataParallel) else model
