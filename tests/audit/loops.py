"""Training loops in plain PyTorch: right ones of many kinds, and one for every mistake in the catalogue.

All of them run under gloo with any number of ranks. They know nothing of the audit but the batches it makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tokennorm.audit import Sample, TinyCausalLM, TokenLoss, collate
from tokennorm.audit.tiny import TinyOutput

Batches = list[dict[str, Tensor]]


# ---- models -------------------------------------------------------------------------------------------------------


class TinyMoE(TinyCausalLM):
    """With a router loss that is nonlinear in its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 3)

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        outputs = super().forward(input_ids, **inputs)
        share = self.router(self.embed(input_ids)).softmax(-1)
        logits = outputs.logits + share[..., :1] * outputs.logits.detach()[..., :1]
        return outputs._replace(logits=logits, aux_loss=3.0 * share.mean((0, 1)).square().sum())


def build(
    model: Callable[[], nn.Module] = TinyCausalLM,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    **ddp: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """DDP if there is more than one rank."""
    network = model().to(dtype)
    if dist.get_world_size() > 1:
        network = DistributedDataParallel(network, **ddp)
    return network, optimizer(network.parameters(), lr=0.1)


def build_sharded(layers: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, the head a unit of its own."""
    network = TinyCausalLM()
    if layers:
        fully_shard(network.head)
    fully_shard(network)
    return network, torch.optim.AdamW(network.parameters(), lr=0.1)


def build_plain(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    network = TinyCausalLM().to(dtype)
    return network, torch.optim.SGD(network.parameters(), lr=0.1)


# ---- pieces of loops ----------------------------------------------------------------------------------------------


def token_losses(model: nn.Module, batch: Mapping[str, Tensor], labels: Tensor | None = None) -> Tensor:
    """Losses of the supervised tokens [T]."""
    labels = batch["labels"] if labels is None else labels
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    return losses_of(logits, labels)


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    targets = labels[:, 1:].flatten()
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets, reduction="none", ignore_index=-100)
    return losses[targets != -100]


def supervised(batch: Mapping[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def ranks_sum(value: float) -> float:
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def window_count(batches: Batches, count: Callable[[Mapping[str, Tensor]], int] = supervised) -> float:
    return ranks_sum(sum(count(batch) for batch in batches))


def accumulate(model: nn.Module, batches: Batches, loss: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Backward of every micro-batch; ranks meet in the last one."""
    for place, batch in enumerate(batches):
        last = place == len(batches) - 1
        waiting = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if waiting else contextlib.nullcontext():
            loss(batch).backward()


def world() -> int:
    return dist.get_world_size()


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    loss: Callable[[dict[str, Tensor]], Tensor] | None = None,
    *,
    count: Callable[[Mapping[str, Tensor]], int] = supervised,
    factor: Callable[[int, int], float] = lambda ranks, micro_batches: 1.0,
    clip: float | None = None,
) -> dict[str, float]:
    """The right loop: sums of token losses over the tokens of the whole window; each mistake changes one thing."""
    loss = loss or (lambda batch: token_losses(model, batch).sum())
    total = window_count(batches, count)
    optimizer.zero_grad()
    seen = 0.0

    def scaled(batch: dict[str, Tensor]) -> Tensor:
        nonlocal seen
        value = loss(batch)
        seen += value.item()
        return value * (world() * factor(world(), len(batches)) / total)

    accumulate(model, batches, scaled)
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return {"loss": ranks_sum(seen) / total, "tokens": total}


def mean_or_zero(losses: Tensor) -> Tensor:
    return losses.sum() / max(len(losses), 1)


# ---- right loops --------------------------------------------------------------------------------------------------


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


# ---- mistakes -----------------------------------------------------------------------------------------------------


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


class Bigram(nn.Module):
    """No attention, no positions, logits as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 12)
        self.head = nn.Linear(12, 29)
        self.dropout = nn.Dropout(0.2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> TinyOutput:
        return TinyOutput(self.head(self.dropout(torch.tanh(self.embed(input_ids)))))


def build_bigram() -> tuple[nn.Module, torch.optim.Optimizer]:
    return build(Bigram)


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


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, and what an audit should say of it (nothing, if it is right)."""

    name: str
    step: Callable[..., Any]
    build: Callable[..., Any] = build
    expected: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


def _factor(ranks: int, micro_batches: int) -> Callable[[int, int], float]:
    return _Power(ranks, micro_batches)


@dataclass(frozen=True)
class _Power:
    ranks: int
    micro_batches: int

    def __call__(self, ranks: int, micro_batches: int) -> float:
        return float(ranks) ** self.ranks * float(micro_batches) ** self.micro_batches


def _scaled(ranks: int, micro_batches: int) -> Callable[..., Any]:
    return partial(counted, factor=_factor(ranks, micro_batches))


def multiplied_router(tokens: float, total: float, splits: int) -> float:
    """What a sum over micro-batches and ranks of the router loss comes to."""
    return 1.0


def divided_router(tokens: float, total: float, splits: int) -> float:
    return 1.0 / total


def mean_router(tokens: float, total: float, splits: int) -> float:
    return 1.0 / splits


MISTAKES = (
    Loop(name="mean of micro-batch means", step=micro_batch_means, expected=("mean_of_micro_batch_means",)),
    Loop(name="mean of rank means", step=rank_means, expected=("mean_of_rank_means",)),
    Loop(name="mean of both", step=all_means, expected=("mean_of_rank_and_micro_batch_means",)),
    Loop(name="mean of both, 0/0", step=model_means, expected=("mean_of_rank_and_micro_batch_means",)),
    Loop(
        name="mean of sample means",
        step=sample_means,
        expected=("mean_of_sample_means",),
        options={"packed": False},
    ),
    Loop(
        name="counted before the shift",
        step=partial(counted, count=before_shift),
        expected=("counted_before_shift",),
    ),
    Loop(name="padding counted", step=partial(counted, count=positions), expected=("padding_counted",)),
    Loop(
        name="padding in the loss",
        step=partial(relabelled, labels=padding_labels),
        expected=("padding_counted",),
    ),
    Loop(name="prompt counted", step=partial(counted, count=not_padding), expected=("prompt_counted",)),
    Loop(
        name="prompt supervised",
        step=partial(relabelled, labels=prompt_labels),
        expected=("prompt_supervised",),
    ),
    Loop(
        name="prompt supervised, not counted",
        step=partial(relabelled, labels=prompt_labels, own_count=False),
        expected=("prompt_supervised",),
    ),
    Loop(name="x ranks", step=_scaled(1, 0), expected=("factor_ranks_too_much",)),
    Loop(name="/ ranks", step=_scaled(-1, 0), expected=("factor_ranks_too_little",)),
    Loop(name="x accumulation", step=_scaled(0, 1), expected=("factor_accumulation_too_much",)),
    Loop(name="/ accumulation", step=_scaled(0, -1), expected=("factor_accumulation_too_little",)),
    Loop(name="x both", step=_scaled(1, 1), expected=("factor_ranks_and_accumulation_too_much",)),
    Loop(name="/ both", step=_scaled(-1, -1), expected=("factor_ranks_and_accumulation_too_little",)),
    Loop(name="rescaled twice", step=rescaled_twice, expected=("rescaled_twice",)),
    Loop(name="not rescaled", step=not_rescaled, expected=("not_rescaled",)),
    Loop(
        name="fixed division, short last window",
        step=fixed_accumulation,
        build=build_configured,
        expected=("fixed_division",),
    ),
    Loop(
        name="router loss x ranks x accumulation",
        step=partial(with_router, extra_weight=multiplied_router),
        build=partial(build, TinyMoE),
        expected=("auxiliary_loss_multiplied",),
    ),
    Loop(
        name="router loss / tokens",
        step=partial(with_router, extra_weight=divided_router),
        build=partial(build, TinyMoE),
        expected=("auxiliary_loss_divided_by_tokens",),
    ),
    Loop(
        name="router loss unweighted",
        step=partial(with_router, extra_weight=mean_router),
        build=partial(build, TinyMoE),
        expected=("auxiliary_loss_unweighted",),
    ),
    Loop(
        name="router loss forgotten",
        step=counted,
        build=partial(build, TinyMoE, find_unused_parameters=True),
        expected=("auxiliary_loss_missing",),
    ),
    Loop(
        name="label smoothing summed",
        step=smoothing_apart,
        expected=("label_smoothing_not_normalised",),
        options={"label_smoothing": 0.1},
    ),
    Loop(
        name="label smoothing averaged per micro-batch",
        step=partial(smoothing_apart, mean=True),
        expected=("label_smoothing_not_normalised",),
        options={"label_smoothing": 0.1},
    ),
    Loop(
        name="targets cross documents",
        step=counted,
        expected=("targets_cross_documents",),
        options={"make_batch": naive_packing},
    ),
    Loop(name="attention crosses documents", step=without_positions, expected=("attention_crosses_documents",)),
    Loop(name="attention mask on packed rows", step=masked_packs, expected=("attention_crosses_documents",)),
    Loop(name="shifted twice", step=partial(relabelled, labels=shifted_labels), expected=("shifted_twice",)),
    Loop(name="bfloat16 loss", step=half_loss, expected=("half_precision_loss",)),
    Loop(name="float16 loss", step=partial(half_loss, dtype=torch.float16), expected=("half_precision_loss",)),
    Loop(name="bfloat16 autocast", step=autocast_loop, expected=("half_precision_arithmetic",)),
    Loop(name="clipped before rescaling", step=clipped_first, expected=("clipped_before_rescaling",)),
    Loop(
        name="clipped before rescaling, by hand",
        step=partial(clipped_first, own=True),
        expected=("clipped_before_rescaling",),
    ),
    Loop(name="skipped micro-batch counted", step=skipping, expected=("skipped_micro_batch_counted",)),
    Loop(
        name="skipped micro-batch uncounted",
        step=partial(skipping, counts=False),
        expected=("micro_batch_skipped",),
    ),
    Loop(name="one rank missing", step=last_rank_missing, expected=("rank_gradient_missing",)),
    Loop(name="ranks never meet", step=never_synchronised, expected=("ranks_not_synchronised",)),
    Loop(name="not cleared", step=not_cleared, expected=("gradients_not_cleared",)),
    Loop(name="a step per micro-batch", step=stepping_every_time, expected=("several_steps_per_window",)),
    Loop(name="a gradient thrown away", step=step_without_mix, expected=("parameters_without_gradient",)),
)

EXACT = (
    Loop(name="DDP, counted", step=counted),
    Loop(name="DDP, counted, double", step=counted, build=partial(build, dtype=torch.float64)),
    Loop(name="DDP, counted, clipped", step=partial(counted, clip=0.1)),
    Loop(name="DDP, counted, clipped in some windows", step=partial(counted, clip=0.5)),
    Loop(name="DDP, counted, clipping never bites", step=partial(counted, clip=1e6)),
    Loop(name="DDP, syncing every micro-batch", step=syncing_every_time),
    Loop(name="DDP, deferred", step=deferred),
    Loop(name="DDP, deferred, divisor 1", step=partial(deferred, divisor=1.0)),
    Loop(name="DDP, deferred, odd divisor", step=partial(deferred, divisor=37.0)),
    Loop(name="DDP, deferred, huge divisor", step=partial(deferred, divisor=1e9)),
    Loop(name="DDP, deferred, clipped", step=partial(deferred, clip=0.1)),
    Loop(name="DDP, gradients as bucket views", step=counted, build=partial(build, gradient_as_bucket_view=True)),
    Loop(name="DDP, AdamW", step=counted, build=partial(build, optimizer=torch.optim.AdamW)),
    Loop(name="DDP, a hook that sums", step=summing_hook),
    Loop(name="summed by hand after", step=by_hand, build=build_plain),
    Loop(name="summed by hand, counted", step=partial(by_hand, after=False), build=build_plain),
    Loop(name="FSDP2", step=sharded, build=build_sharded),
    Loop(name="FSDP2, clipped", step=partial(sharded, clip=0.1), build=build_sharded),
    Loop(name="FSDP2, one unit, no division", step=undivided, build=partial(build_sharded, layers=False)),
    Loop(name="own clipping", step=own_clipping),
    Loop(name="all positions, masked", step=masked_sum),
    Loop(name="one backward", step=one_forward),
    Loop(name="the model's mean times the count", step=model_loss_times_count),
    Loop(name="labels popped", step=popping_labels),
    Loop(name="loss scaler", step=scaler_loop),
    Loop(name="label smoothing", step=smoothed, options={"label_smoothing": 0.1}),
    Loop(name="router loss", step=with_router, build=partial(build, TinyMoE)),
    Loop(name="weighted tokens", step=weighted, options={"token_loss": weighted_token_loss}),
    Loop(name="one process", step=partial(by_hand, after=False), build=build_plain, options={"ranks": (1,)}),
)
