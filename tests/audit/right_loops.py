"""Loops whose every token counts once, in many different ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.audit.loop_pieces import (
    Batches,
    accumulate,
    counted,
    losses_of,
    ranks_sum,
    scale_gradients,
    supervised,
    token_losses,
    window_count,
    world,
)
from tokennorm.audit import TokenLoss


def deferred(model, optimizer, batches: Batches, *, divisor: float = 64.0, clip: float | None = None) -> None:
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / divisor)
    scale_gradients(model, divisor * world() / window_count(batches))
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def syncing_every_time(model, optimizer, batches: Batches) -> None:
    total = window_count(batches)
    optimizer.zero_grad()
    for batch in batches:
        (token_losses(model, batch).sum() * world() / total).backward()
    optimizer.step()


def sharded(model, optimizer, batches: Batches, *, clip: float | None = None) -> None:
    total = window_count(batches)
    optimizer.zero_grad()
    for place, batch in enumerate(batches):
        model.set_requires_gradient_sync(place == len(batches) - 1)
        (token_losses(model, batch).sum() * world() / total).backward()
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def undivided(model, optimizer, batches: Batches) -> None:
    """FSDP2 told not to divide by the ranks."""
    model.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    model.set_gradient_divide_factor(1.0)
    total = window_count(batches)
    optimizer.zero_grad()
    for batch in batches:
        (token_losses(model, batch).sum() / total).backward()
    optimizer.step()


def by_hand(model, optimizer, batches: Batches, *, after: bool = True) -> float:
    """No wrapper: gradients are summed over the ranks by the loop itself."""
    total = window_count(batches)
    optimizer.zero_grad(set_to_none=False)
    for batch in batches:
        (token_losses(model, batch).sum() / (1 if after else total)).backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        if after:
            parameter.grad.div_(total)
    optimizer.step()
    return 0.0 * total


def own_clipping(model, optimizer, batches: Batches, *, limit: float = 0.05) -> None:
    optimizer.zero_grad()
    total = window_count(batches)
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() * world() / total)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    scale_gradients(model, min(1.0, limit / norm.item()))
    optimizer.step()


def masked_sum(model, optimizer, batches: Batches) -> None:
    """All positions, masked afterwards: the loss of a position without label is multiplied by zero."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), targets.clamp_min(0), reduction="none")
        return (losses * (targets != -100)).sum()

    counted(model, optimizer, batches, loss)


def one_forward(model, optimizer, batches: Batches) -> None:
    """All micro-batches in one backward."""
    total = window_count(batches)
    optimizer.zero_grad()
    losses = [token_losses(model, batch).sum() for batch in batches]
    (torch.stack(losses).sum() * world() / total).backward()
    optimizer.step()


def summing_hook(model, optimizer, batches: Batches) -> None:
    """A communication hook that sums, so that nothing has to be undone."""
    if isinstance(model, DistributedDataParallel) and not getattr(model, "hooked", False):
        model.register_comm_hook(None, _sum_bucket)
        model.hooked = True
    total = window_count(batches)
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / total)
    optimizer.step()


def _sum_bucket(_state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def model_loss_times_count(model, optimizer, batches: Batches) -> None:
    """From the mean that the model returns, back to the sum."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        if not supervised(batch):
            return model(**batch).logits.sum() * 0.0
        return model(**batch).loss * supervised(batch)

    counted(model, optimizer, batches, loss)


def popping_labels(model, optimizer, batches: Batches) -> None:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        labels = batch.pop("labels")
        return losses_of(model(**batch).logits, labels).sum()

    counted(model, optimizer, batches, loss)


def scaler_loop(model, optimizer, batches: Batches) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    total = window_count(batches)
    optimizer.zero_grad()
    accumulate(model, batches, lambda b: scaler.scale(token_losses(model, b).sum() * world() / total))
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.2)
    scaler.step(optimizer)
    scaler.update()


def smoothed(model, optimizer, batches: Batches, *, smoothing: float = 0.1) -> None:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        return F.cross_entropy(
            logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum", label_smoothing=smoothing
        )

    counted(model, optimizer, batches, loss)


def with_router(model, optimizer, batches: Batches, *, extra_weight: Callable[..., float] | None = None) -> None:
    """Cross-entropy and router loss; by default each micro-batch's router loss counts by its tokens."""
    total = window_count(batches)
    splits = world() * len(batches)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        outputs = model(**{key: value for key, value in batch.items() if key != "labels"})
        tokens = supervised(batch)
        weight = tokens / total if extra_weight is None else extra_weight(tokens, total, splits)
        return (
            losses_of(outputs.logits, batch["labels"]).sum() * world() / total
            + weight * world() * outputs.aux_loss
        )

    optimizer.zero_grad()
    accumulate(model, batches, loss)
    optimizer.step()


def weighted_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> TokenLoss:
    """Later tokens count more: the weight of a target grows with its position in the sample."""
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    keep = (batch["labels"][:, 1:] != -100).flatten()
    return TokenLoss(loss=losses_of(logits, batch["labels"]), weight=_position_weight(batch).flatten()[keep])


def _position_weight(batch: Mapping[str, Tensor]) -> Tensor:
    length = batch["labels"].shape[1]
    positions = batch.get("position_ids", torch.arange(length).expand_as(batch["labels"]))
    return 1.0 + 0.25 * positions[:, 1:]


def weighted(model, optimizer, batches: Batches, *, plain_count: bool = False) -> None:
    def weights(batch: Mapping[str, Tensor]) -> Tensor:
        return _position_weight(batch)[batch["labels"][:, 1:] != -100]

    total = ranks_sum(sum(float(weights(b).sum()) for b in batches))
    if plain_count:
        total = window_count(batches)
    optimizer.zero_grad()
    accumulate(model, batches, lambda b: (token_losses(model, b) * weights(b)).sum() * world() / total)
    optimizer.step()
