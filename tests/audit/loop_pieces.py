"""Models, and what loops are made of: token losses, counts over ranks, accumulation, the plain right loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from tokennorm.audit import TinyCausalLM
from tokennorm.audit.tiny import TinyOutput

Batches = list[dict[str, Tensor]]


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
