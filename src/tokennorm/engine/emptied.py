"""The end of a run in which the loss guard refuses everything: it would skip the rest of its data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tokennorm.engine.engine import Engine, StepReport
from tokennorm.errors import NonFiniteError

__all__ = ["EmptiedWindows"]


class EmptiedWindows:
    """Counts windows in a row that the guard emptied because of NaN or infinity.

    Windows emptied by spikes alone neither count nor break the row: the guard's limit follows those by itself.

    Args:
        engine: of the run.
        limit: windows in a row with which the run ends.
    """

    def __init__(self, engine: Engine, limit: int) -> None:
        self._engine, self._limit, self._count = engine, limit, 0

    def add(self, report: StepReport) -> None:
        """Take what a window came to, the same on every rank.

        Raises:
            NonFiniteError: on all ranks; the row is as long as the limit.
        """
        if report.skipped is None:
            self._count = 0
        if report.skipped == "all refused":
            self._count += any(one.verdict.reason == "non-finite" for one in report.refused)
        if self._count < self._limit:
            return
        broken = _weights_are_broken(self._engine)
        raise NonFiniteError(
            f"the loss guard refused all of {self._count} windows in a row, the last because its loss was NaN or "
            f"infinite; the weights after step {report.step} "
            + ("hold NaN or infinity themselves" if broken else "are all finite"),
            why="every window to come would be skipped as well; nothing was saved since the last checkpoint"
            if broken
            else "the rest of the data may be skipped as well; nothing was saved since the last checkpoint",
            fix="go on from an earlier checkpoint (run.resume_from), and lower the learning rate"
            if broken
            else "look at the refused micro-batches in the run folder, and repair the data; "
            "loop.max_refused_windows allows more of them",
        )


def _weights_are_broken(engine: Engine) -> bool:
    broken = torch.zeros((), device=engine.device)
    for parameter in _own_parts(engine.model):
        if parameter.is_floating_point():
            broken += (~torch.isfinite(parameter)).any()
    if engine.dp_world_size > 1:
        dist.all_reduce(broken, op=dist.ReduceOp.MAX, group=engine.dp_group)
    return bool(broken > 0)


def _own_parts(model: nn.Module) -> list[torch.Tensor]:
    tensors = [parameter.detach() for parameter in model.parameters()]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
