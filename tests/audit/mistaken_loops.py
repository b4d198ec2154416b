"""Loops that make one mistake each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tests.audit.loop_pieces import (
    Batches,
    accumulate,
    build,
    counted,
    losses_of,
    mean_or_zero,
    ranks_sum,
    scale_gradients,
    supervised,
    token_losses,
    window_count,
    world,
)
from tokennorm.audit import Sample, collate


def micro_batch_means(model, optimizer, batches: Batches) -> None:
    """Tokens are pooled over the ranks of each micro-batch, and the micro-batches averaged."""
    totals = {id(batch): max(ranks_sum(supervised(batch)), 1.0) for batch in batches}
    optimizer.zero_grad()
    accumulate(
        model,
        batches,
        lambda batch: token_losses(model, batch).sum() * world() / totals[id(batch)] / len(batches),
    )
    optimizer.step()


def rank_means(model, optimizer, batches: Batches) -> None:
    mine = max(sum(supervised(batch) for batch in batches), 1)
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / mine)
    optimizer.step()


def all_means(model, optimizer, batches: Batches) -> dict[str, float]:
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: mean_or_zero(token_losses(model, batch)) / len(batches))
    optimizer.step()
    return {"loss": token_losses(model, batches[-1]).detach().mean().item()}


def model_means(model, optimizer, batches: Batches) -> None:
    """What most loops do: the model's own mean, which is 0/0 where nothing is supervised."""
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: model(**batch).loss / len(batches))
    optimizer.step()


def sample_means(model, optimizer, batches: Batches) -> None:
    rows = {
        id(b): [row for row in range(len(b["labels"])) if (b["labels"][row, 1:] != -100).any()] for b in batches
    }
    total = ranks_sum(sum(map(len, rows.values())))
    optimizer.zero_grad()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        means = [losses_of(logits[r : r + 1], batch["labels"][r : r + 1]).mean() for r in rows[id(batch)]]
        return (sum(means) + logits.sum() * 0.0) * world() / total

    accumulate(model, batches, loss)
    optimizer.step()


def fixed_accumulation(model, optimizer, batches: Batches, *, count_of: Mapping[str, int] | None = None) -> None:
    """Undoes the division of an accumulation wrapper that always divides by the configured number."""
    configured = optimizer.accumulation_steps
    counted(model, optimizer, batches, factor=lambda ranks, micro_batches: micro_batches / configured)


def build_configured(layout: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    optimizer.accumulation_steps = layout.accumulation_steps
    return model, optimizer


def not_rescaled(model, optimizer, batches: Batches) -> None:
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / 64.0)
    optimizer.step()


def rescaled_twice(model, optimizer, batches: Batches) -> None:
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / 64.0)
    for _ in range(2):
        scale_gradients(model, 64.0 * world() / window_count(batches))
    optimizer.step()


def clipped_first(model, optimizer, batches: Batches, *, own: bool = False) -> None:
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() / 8.0)
    if own:
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        scale_gradients(model, min(1.0, 0.3 / norm.item()))
    else:
        clip_grad_norm_(model.parameters(), 0.3)
    scale_gradients(model, 8.0 * world() / window_count(batches))
    optimizer.step()


def relabelled(
    model, optimizer, batches: Batches, *, labels: Callable[..., Tensor], own_count: bool = True
) -> None:
    """A right loop on wrong labels."""
    changed = [{**batch, "labels": labels(batch)} for batch in batches]
    if own_count:
        counted(model, optimizer, changed)
    else:
        total = window_count(batches)
        optimizer.zero_grad()
        accumulate(model, changed, lambda batch: token_losses(model, batch).sum() * world() / total)
        optimizer.step()


def real_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(batch["labels"]).bool()


def prompt_labels(batch: Mapping[str, Tensor]) -> Tensor:
    labels = torch.where(real_tokens(batch), batch["input_ids"], -100)
    if "position_ids" in batch:
        labels[batch["position_ids"] == 0] = -100
    return labels


def padding_labels(batch: Mapping[str, Tensor]) -> Tensor:
    return torch.where(real_tokens(batch), batch["labels"], batch["input_ids"])


def shifted_labels(batch: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], dim=1)


def before_shift(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"] != -100).sum())


def positions(batch: Mapping[str, Tensor]) -> int:
    return batch["labels"].numel()


def not_padding(batch: Mapping[str, Tensor]) -> int:
    return int(real_tokens(batch).sum())


def naive_packing(samples: Sequence[Sample], packed: bool) -> dict[str, Tensor]:
    """Concatenates labels as they come: the first label of a document is the target of the one before."""
    batch = collate(samples, packed)
    if packed:
        batch["labels"] = torch.tensor([[label for sample in samples for label in sample.labels]])
    return batch


def without_positions(model, optimizer, batches: Batches) -> None:
    for batch in batches:
        batch.pop("position_ids", None)
    counted(model, optimizer, batches)


def masked_packs(model, optimizer, batches: Batches) -> None:
    counted(model, optimizer, [{**b, "attention_mask": torch.ones_like(b["input_ids"])} for b in batches])


def unshifted(model, optimizer, batches: Batches) -> None:
    """Every position learns the token that it reads."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    counted(model, optimizer, batches, loss, count=before_shift)


def half_loss(model, optimizer, batches: Batches, *, dtype: torch.dtype = torch.bfloat16) -> None:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits.to(dtype)
        targets = batch["labels"][:, 1:].flatten()
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="none", ignore_index=-100)
        return losses.float().sum()

    counted(model, optimizer, batches, loss)


def autocast_loop(model, optimizer, batches: Batches) -> None:
    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return token_losses(model, batch).sum()

    counted(model, optimizer, batches, loss)


def skipping(model, optimizer, batches: Batches, *, counts: bool = True) -> None:
    """Drops the second micro-batch of rank 0, as a guard that saw a spike would; its tokens stay counted."""
    dropped = batches[1] if dist.get_rank() == 0 and len(batches) > 2 else None
    total = ranks_sum(sum(supervised(b) for b in batches if counts or b is not dropped))
    optimizer.zero_grad()
    accumulate(
        model,
        batches,
        lambda b: token_losses(model, b).sum() * (0.0 if b is dropped else world() / total),
    )
    optimizer.step()


def last_rank_missing(model, optimizer, batches: Batches) -> None:
    missing = world() > 1 and dist.get_rank() == world() - 1
    counted(model, optimizer, batches, lambda b: token_losses(model, b).sum() * (0.0 if missing else 1.0))


def never_synchronised(model, optimizer, batches: Batches) -> None:
    total = window_count(batches)
    optimizer.zero_grad()
    with model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
        for batch in batches:
            (token_losses(model, batch).sum() * world() / total).backward()
    optimizer.step()


def not_cleared(model, optimizer, batches: Batches) -> None:
    total = window_count(batches)
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() * world() / total)
    optimizer.step()


def stepping_every_time(model, optimizer, batches: Batches) -> None:
    for batch in batches:
        counted(model, optimizer, [batch])


def smoothing_apart(model, optimizer, batches: Batches, *, mean: bool = False, smoothing: float = 0.1) -> None:
    """The smoothing part is a plain sum (or a mean of micro-batches), the rest is right."""
    total = window_count(batches)
    splits = world() * len(batches)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        keep = batch["labels"][:, 1:] != -100
        logs = logits[keep].log_softmax(-1)
        nll = -logs.gather(1, batch["labels"][:, 1:][keep][:, None]).sum()
        uniform = -logs.mean(-1)
        share = mean_or_zero(uniform) / splits if mean else uniform.sum()
        return ((1 - smoothing) * nll / total + smoothing * share) * world()

    optimizer.zero_grad()
    accumulate(model, batches, loss)
    optimizer.step()


def step_without_mix(model, optimizer, batches: Batches) -> None:
    """A parameter's gradient is thrown away before the step."""
    total = window_count(batches)
    optimizer.zero_grad()
    accumulate(model, batches, lambda batch: token_losses(model, batch).sum() * world() / total)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.mix.weight.grad = None
    optimizer.step()


def means_of_all_tokens(model, optimizer, batches: Batches) -> None:
    """Two mistakes: labels rebuilt from the inputs, and a mean of means."""
    all_means(model, optimizer, [{**batch, "labels": prompt_labels(batch)} for batch in batches])


def with_weight_decay_in_the_loss(model, optimizer, batches: Batches) -> None:
    """Nothing that the catalogue knows."""
    total = window_count(batches)
    optimizer.zero_grad()
    accumulate(model, batches, lambda b: token_losses(model, b).sum() * world() / total)
    for parameter in model.parameters():
        parameter.grad.add_(parameter.detach(), alpha=0.01)
    optimizer.step()


def nan_when_empty(model, optimizer, batches: Batches) -> None:
    """A masked mean, times the size of the mask: right, but for 0/0 where nothing is supervised."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        mask = (targets != -100).float()
        losses = F.cross_entropy(logits.transpose(1, 2), targets.clamp_min(0), reduction="none")
        return (losses * mask).sum() / mask.sum() * mask.sum()

    counted(model, optimizer, batches, loss)
