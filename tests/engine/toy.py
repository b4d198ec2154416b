"""A causal model small enough to be differentiated in a blink, and uneven windows for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.engine import CausalLMObjective, Engine, OptimConfig, build_optimizer, build_scheduler
from tokennorm.kit import TokenNormedLossKit
from tokennorm.loss import linear_cross_entropy

VOCABULARY = 17


class ToyLM(nn.Module):
    """Answers like a patched model: one loss per position, and a nonlinear router loss if asked for."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float64, router: float = 0.0, dropout: float = 0.0, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.router = router
        self.embedding = nn.Embedding(VOCABULARY, 8, dtype=dtype)
        self.mix = nn.Linear(8, 8, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY, bias=False, dtype=dtype)

    def forward(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_supervised: int | None = None,
        use_cache: bool = False,
    ) -> dict[str, Tensor | None]:
        hidden = self.embedding(input_ids)
        hidden = self.norm(self.dropout(torch.tanh(self.mix(hidden.cumsum(1)))) + hidden)
        loss = linear_cross_entropy(
            hidden.flatten(0, 1), self.head.weight, shift_labels.flatten(), num_supervised=num_supervised
        )
        assert isinstance(loss, Tensor)
        extra = self.router * hidden.softmax(-1).mean((0, 1)).square().sum() if self.router else None
        return {"loss": loss, "extra_loss": extra}


def micro_batch(supervised: int, total: int, seed: int) -> dict[str, Any]:
    """One row of ``total`` tokens of which the last ``supervised`` are targets."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCABULARY, (1, total), generator=generator)
    labels = torch.randint(VOCABULARY, (1, total), generator=generator)
    labels[:, : total - supervised] = -100
    return {
        "input_ids": input_ids,
        "shift_labels": labels,
        "position_ids": torch.arange(total)[None],
        "effective_tokens": supervised,
        "total_tokens": total,
    }


def dummy() -> dict[str, Any]:
    return {**micro_batch(0, 2, 0), "total_tokens": 0}


# (supervised, total) of each micro-batch: uneven, one without a target, and a short last window.
WINDOWS = (
    ((1, 9), (30, 40), (0, 12), (7, 7)),
    ((25, 25), (2, 30), (3, 4), (16, 20)),
    ((1, 2), (0, 5), (40, 41), (5, 6)),
    ((11, 13),),
)


class ToyWindows:
    """The windows for one rank, repeated; knows its place."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, repeat: int = 1) -> None:
        plan = [
            [micro_batch(*sizes, seed=100 * number + index) for index, sizes in enumerate(window)]
            for number, window in enumerate(WINDOWS * repeat)
        ]
        self.windows = []
        for window in plan:
            mine = window[rank::world_size]
            mine += [dummy()] * (-(-len(window) // world_size) - len(mine))
            self.windows.append(mine)
        self.place = 0

    def __iter__(self) -> Iterator[Sequence[Mapping[str, Any]]]:
        while self.place < len(self.windows):
            self.place += 1
            yield self.windows[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = state["place"]


def build_engine(model: nn.Module | None = None, *, total_steps: int = 100, **options: Any) -> Engine:
    model = model or ToyLM()
    config = OptimConfig(lr=0.05, warmup=2, schedule="cosine")
    optimizer = options.pop("optimizer", None) or build_optimizer(model, config)
    return Engine(
        model=model,
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, config, total_steps),
        objective=CausalLMObjective(),
        **options,
    )


def reference_loss(model: ToyLM, window: Sequence[Mapping[str, Any]]) -> Tensor:
    """The objective of a whole window, written out: one sum over one count."""
    total = sum(batch["effective_tokens"] for batch in window)
    loss = torch.zeros((), dtype=torch.float64)
    for batch in window:
        hidden = model.embedding(batch["input_ids"])
        hidden = model.norm(torch.tanh(model.mix(hidden.cumsum(1))) + hidden)
        labels = batch["shift_labels"].flatten()
        logits = model.head(hidden).flatten(0, 1)
        loss = loss + nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / total
        if model.router:
            router = model.router * hidden.softmax(-1).mean((0, 1)).square().sum()
            loss = loss + router * batch["effective_tokens"] / total
    return loss


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def weights(model: nn.Module) -> Tensor:
    """A copy of all parameters."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def skipping_kit(**options: Any) -> TokenNormedLossKit:
    return TokenNormedLossKit(device="cpu", dp_world_size=1, empty_window="skip", **options)
