"""Held-out loss: the sum of all token losses over the number of those tokens, on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tokennorm.engine.distributed import unwrap_model
from tokennorm.engine.objective import Batch, Objective, ObjectiveOutput
from tokennorm.engine.sharding import is_sharded, reshard
from tokennorm.errors import KitUsageError
from tokennorm.loss import RatioSum, merge_ratios, reduce_ratios

__all__ = ["EvalReport", "evaluate", "move_to_device"]


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """One evaluation, the same on every rank.

    Attributes:
        loss: mean loss per supervised token in nats, or None when no token was supervised.
        effective_tokens: supervised tokens that it averages over, or the sum of their weights.
        total_tokens: tokens without padding that the model read.
        metrics: means of the objective's other pairs and terms; None where nothing was counted.
    """

    loss: float | None
    effective_tokens: int | float
    total_tokens: int
    metrics: dict[str, float | None] = field(default_factory=dict)


def move_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with its tensors on ``device``; counts stay host integers."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def evaluate(
    model: nn.Module,
    objective: Objective,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> EvalReport:
    """Evaluate ``model`` on this rank's ``batches`` and add up over the ranks of ``group``.

    Ranks may hold different numbers of batches, also none: the module inside DDP runs, which communicates
    nothing, and one reduction follows. Each forward of a sharded model is a collective: there, ranks that ran out
    run dummies. Training modes are restored afterwards, module by module.

    Raises:
        KitUsageError: ranks hold different numbers of batches of a sharded model, and the objective has no
            ``dummy``.
    """
    module = unwrap_model(model)
    modes = {part: part.training for part in module.modules()}
    device = torch.device(device)
    parts = [{"loss": RatioSum(0.0, 0)}]
    total_tokens = 0
    if is_sharded(module):
        batches = _as_many_on_all_ranks(list(batches), objective, group)
    module.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                parts.append(_pairs(objective(module, move_to_device(batch, device)), batch))
                total_tokens += batch["total_tokens"]
    finally:
        reshard(module)
        for part, training in modes.items():
            part.training = training
    sums = merge_ratios(parts)
    sums["total_tokens"] = RatioSum(float(total_tokens), 0)
    # A rank without batches has seen no names, and every rank has to send the same message.
    for name in _names_on_all_ranks(sums, group):
        sums.setdefault(name, RatioSum(0.0, 0))
    reduced = reduce_ratios(sums, group, device=device)
    loss = reduced.pop("loss")
    total = reduced.pop("total_tokens")
    return EvalReport(
        loss=loss.mean,
        effective_tokens=int(loss.den) if float(loss.den).is_integer() else float(loss.den),
        total_tokens=int(total.num),
        metrics={name: pair.mean for name, pair in reduced.items()},
    )


def _pairs(outputs: ObjectiveOutput, batch: Batch) -> dict[str, RatioSum]:
    terms = {
        name: RatioSum(term.numerator.detach(), term.denominator) for name, term in outputs.extra_terms.items()
    }
    loss = RatioSum(outputs.loss_sum.detach(), outputs.count(batch))
    return {**outputs.metrics, **terms, "loss": loss}


def _as_many_on_all_ranks(
    batches: list[Batch], objective: Objective, group: dist.ProcessGroup | None
) -> list[Batch]:
    """Add dummies; a rank that has no batch at all makes them from another rank's."""
    make = getattr(objective, "dummy", None)
    dummy = move_to_device(make(batches[0]), torch.device("cpu")) if make is not None and batches else None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (len(batches), dummy), group=group)
    most = max(number for number, _ in everyone)
    if most > min(number for number, _ in everyone) and make is None:
        raise KitUsageError(
            f"ranks hold {[number for number, _ in everyone]} batches to evaluate",
            why="each forward of a sharded model waits for all ranks",
            fix="give every rank as many, or the objective a method dummy(batch)",
        )
    dummies = [other for _, other in everyone if other is not None]
    return batches + dummies[:1] * (most - len(batches))


def _names_on_all_ranks(sums: dict[str, RatioSum], group: dist.ProcessGroup | None) -> list[str]:
    if not dist.is_initialized():
        return sorted(sums)
    everyone: list[list[str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, sorted(sums), group=group)
    return sorted({name for names in everyone if names for name in names})
