"""The ranks that a window is counted over, checked against what the user says about them."""

from __future__ import annotations

import torch.distributed as dist

from tokennorm.errors import KitUsageError

__all__ = ["counting_ranks"]


def counting_ranks(
    dp_world_size: int, dp_group: dist.ProcessGroup | None, count_group: dist.ProcessGroup | None
) -> int:
    """Number of ranks whose tokens are summed; 1 means that nothing is ever communicated.

    Raises:
        KitUsageError: ``dp_world_size`` contradicts the group, or this process is in none of them.
    """
    if not isinstance(dp_world_size, int) or dp_world_size < 1:
        raise KitUsageError(f"dp_world_size is {dp_world_size!r}, not a number of ranks")
    if not (dist.is_available() and dist.is_initialized()):
        if dp_world_size > 1 or dp_group is not None or count_group is not None:
            raise KitUsageError(
                f"dp_world_size is {dp_world_size}, but torch.distributed is not initialised",
                why="the counts of the other ranks could not be added.",
                fix="call torch.distributed.init_process_group before building the kit, or pass dp_world_size=1.",
            )
        return 1
    size = _size(dp_group, "dp_group")
    if size != dp_world_size:
        group = "the default group" if dp_group is None else "dp_group"
        raise KitUsageError(
            f"dp_world_size is {dp_world_size}, but {group} has {size} ranks",
            why="tokens would be counted over other ranks than the gradients are averaged over.",
            fix="pass dp_group= the group of this rank's data-parallel mesh axis and dp_world_size= its size.",
        )
    return size if count_group is None else _size(count_group, "count_group")


def _size(group: dist.ProcessGroup | None, name: str) -> int:
    size = dist.get_world_size(group)
    if size < 1:
        raise KitUsageError(f"this process (rank {dist.get_rank()}) is not a member of {name}")
    return size
