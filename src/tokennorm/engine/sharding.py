"""Models split over ranks: FSDP2 on one axis, or replicas of split models on two (HSDP)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tokennorm.engine.distributed import SHARDED_GRADIENTS, DistributedConfig, Runtime, wrap_ddp
from tokennorm.errors import ConfigError, DistributedError

__all__ = ["decoder_blocks", "is_sharded", "reshard", "shard_mesh", "wrap_fsdp", "wrap_model"]


def wrap_model(
    model: nn.Module, runtime: Runtime, config: DistributedConfig, *, param_dtype: torch.dtype | None = None
) -> nn.Module:
    """Wrap ``model`` for the ranks as configured; a single rank gets it back as it is.

    Every strategy averages gradients over all ranks, so the averaging factor is ``runtime.world_size``, which is
    the kit's default (``kit.measure_averaging`` agrees). Apply the loss patch before.

    Args:
        model: on the device, except for FSDP, which moves it there unit by unit.
        runtime: the ranks.
        config: strategy, shape of the mesh, units.
        param_dtype: with a sharded model, compute in this dtype (:func:`wrap_fsdp`); DDP computes in the weights'
            own dtype, or in that of an autocast.
    """
    if config.strategy == "ddp":
        return wrap_ddp(model, runtime)
    return wrap_fsdp(
        model,
        runtime,
        shard_ranks=_shard_ranks(config, runtime),
        head_unit=config.head_unit,
        accumulate=config.accumulate,
        param_dtype=param_dtype,
    )


def wrap_fsdp(
    model: nn.Module,
    runtime: Runtime,
    *,
    shard_ranks: int | None = None,
    head_unit: Literal["root", "own"] = "root",
    accumulate: Literal["full", "sharded"] = "full",
    param_dtype: torch.dtype | None = None,
    blocks: list[nn.Module] | None = None,
) -> nn.Module:
    """Split ``model`` over the ranks with FSDP2, in place; one rank gets it back as it is.

    Each decoder block is a unit, gathered when it runs; all else is the root unit. Rank 0's weights are what every
    rank gets a part of, as with DDP. Gradients are reduced in float32 where the weights or ``param_dtype`` are
    narrower, and averaged over all ranks, shards and replicas alike.

    Args:
        model: with the loss patch already applied, and adapters before that.
        runtime: the ranks; all of them hold different tokens.
        shard_ranks: ranks that hold one model together. All of them (None, FSDP), or a divisor: neighbours share
            one, and each group has a replica (HSDP: a 2-D mesh, replicate x shard).
        head_unit: "own" makes embedding and head units of their own, gathered only when they run. Tied ones are
            one weight, which stays in the root unit.
        accumulate: "full" reduces once per window and holds the whole gradient until then, in float32 if reduced
            so. "sharded" reduces at every micro-batch and holds a part.
        param_dtype: compute in this dtype while the weights of record stay as they are.
        blocks: the units; by default :func:`decoder_blocks`.

    Raises:
        DistributedError: the ranks can't be divided into groups of ``shard_ranks``.
    """
    mesh = shard_mesh(runtime, shard_ranks)
    if mesh is None:
        return model
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=_reduce_dtype(model, param_dtype))
    units = decoder_blocks(model) if blocks is None else blocks
    embedding, head = _ends(model)
    if head_unit == "own":
        units = [*units, *(part for part in (embedding, head) if part is not None)]
    for unit in units:
        _same_on_all_ranks(unit, runtime)
        # The head's backward follows at once: gathering it twice would be one collective more for nothing.
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=unit is not head)
    _same_on_all_ranks(model, runtime)
    wrapped: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    setattr(wrapped, SHARDED_GRADIENTS, accumulate == "sharded")
    return wrapped


def shard_mesh(runtime: Runtime, shard_ranks: int | None = None) -> DeviceMesh | None:
    """Return the mesh ``("shard",)``, or ``("replicate", "shard")`` with the ranks of a shard group next to each
    other; None for one rank.

    Raises:
        DistributedError: ``shard_ranks`` does not divide the ranks.
    """
    world_size = runtime.world_size
    if world_size == 1:
        return None
    if shard_ranks is None or shard_ranks == world_size:
        shape, names = (world_size,), ("shard",)
    elif shard_ranks < 1 or world_size % shard_ranks:
        raise DistributedError(
            f"{world_size} ranks can't be divided into groups of {shard_ranks}",
            why="each group holds one whole model",
            fix="give shard_ranks as a divisor of the number of ranks",
        )
    else:
        shape, names = (world_size // shard_ranks, shard_ranks), ("replicate", "shard")
    ranks = torch.tensor(dist.get_process_group_ranks(runtime.group or dist.group.WORLD))
    return DeviceMesh(runtime.device.type, ranks.reshape(shape), mesh_dim_names=names)


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the entries of the outermost ``nn.ModuleList``s that hold parameters: a transformer's blocks."""

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                yield from (block for block in child if any(True for _ in block.parameters()))
            else:
                yield from visit(child)

    return list(dict.fromkeys(visit(model)))


def is_sharded(model: nn.Module) -> bool:
    """True for an FSDP2 model: each forward is a collective, so every rank has to run as many."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered, so that ``parameters()`` are the split ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _ends(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Embedding and head, as transformers' models tell them; None for both when they share a weight."""
    found: list[Any] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        method = getattr(model, getter, None)
        part = method() if callable(method) else None
        found.append(part if isinstance(part, nn.Module) else None)
    embedding, head = found
    if embedding is not None and head is not None and _weights(embedding) & _weights(head):
        return None, None
    return embedding, head


def _weights(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _reduce_dtype(model: nn.Module, param_dtype: torch.dtype | None) -> torch.dtype | None:
    """float32 where gradients come in something narrower; None leaves them (float32, float64) as they are."""
    dtypes = {param_dtype} if param_dtype else {p.dtype for p in model.parameters() if p.requires_grad}
    return torch.float32 if any(dtype.itemsize < 4 for dtype in dtypes) else None


@torch.no_grad()
def _same_on_all_ranks(unit: nn.Module, runtime: Runtime) -> None:
    """Move a unit to the device and give every rank rank 0's values: a rank keeps only its part of them."""
    nn.Module.to(unit, runtime.device)
    group = runtime.group or dist.group.WORLD
    for value in (*unit.parameters(), *unit.buffers()):
        if type(value) in (Tensor, nn.Parameter):
            dist.broadcast(value.detach(), group=group, group_src=0)


def _shard_ranks(config: DistributedConfig, runtime: Runtime) -> int | None:
    if config.strategy == "fsdp" or runtime.world_size == 1:
        return None
    shard_ranks = config.shard_ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not 1 <= shard_ranks <= runtime.world_size or runtime.world_size % shard_ranks:
        raise ConfigError(
            f"distributed.shard_ranks is {config.shard_ranks} for {runtime.world_size} ranks",
            why="each group of so many ranks holds one whole model",
            fix="give a divisor of the number of ranks, such as the GPUs of a machine",
        )
    return shard_ranks
