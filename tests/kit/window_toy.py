"""A tiny language model, uneven windows for it, and the float64 gradient of a window's objective."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tokennorm.kit import TokenNormedLossKit
from tokennorm.loss import LossTerm

VOCABULARY, WIDTH = 11, 6
ROUTER_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One micro-batch: token ids and labels ``[T]`` (-100 is unsupervised), token weights ``[T]``."""

    ids: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def supervised(self) -> int:
        return int((self.labels != -100).sum())

    @property
    def weight_sum(self) -> float:
        return float(self.weights.double()[self.labels != -100].sum())

    @property
    def routed(self) -> int:
        """Another denominator: the tokens that a router would see."""
        return len(self.ids)


def micro(tokens: int, supervised: int, seed: int) -> Micro:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.full((tokens,), -100)
    rows = torch.randperm(tokens, generator=generator)[:supervised]
    labels[rows] = torch.randint(VOCABULARY, (supervised,), generator=generator)
    return Micro(
        ids=torch.randint(VOCABULARY, (tokens,), generator=generator),
        labels=labels,
        weights=torch.randint(1, 9, (tokens,), generator=generator) / 4,
    )


# Extremely uneven, one micro-batch without supervised tokens; the third window is short.
WINDOWS = (
    [micro(40, 33, 1), micro(9, 1, 2), micro(17, 0, 3), micro(25, 24, 4)],
    [micro(5, 2, 5), micro(60, 57, 6), micro(12, 3, 7), micro(30, 1, 8)],
    [micro(7, 5, 9)],
)
DUMMY = micro(2, 0, 10)


class ToyLM(nn.Module):
    """Per-token cross-entropy ``[T]`` (0 where unsupervised) and a router-like sum over all tokens."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.to(dtype)

    def forward(self, batch: Micro) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.mix(self.embed(batch.ids)))
        losses = nn.functional.cross_entropy(self.head(hidden), batch.labels, ignore_index=-100, reduction="none")
        return losses, hidden.pow(2).sum()


def reference_gradients(
    windows: Sequence[Sequence[Micro]], *, weighted: bool = False, router: str | None = None
) -> list[list[Tensor]]:
    """Float64 gradients of each window's objective, in one process, with the divisions written out.

    ``router``: None, "tokens" (counted in supervised tokens, as a deferred window needs) or "routed".
    """
    return [_reference_window(window, weighted, router) for window in windows]


def _reference_window(window: Sequence[Micro], weighted: bool, router: str | None) -> list[Tensor]:
    model = ToyLM(torch.float64)
    num, den = torch.zeros((), dtype=torch.float64), 0.0
    router_num, router_den = torch.zeros((), dtype=torch.float64), 0.0
    for batch in window:
        losses, routed = model(batch)
        num = num + (losses * batch.weights.double() if weighted else losses).sum()
        den += batch.weight_sum if weighted else batch.supervised
        # A mean over the micro-batch, weighted by the tokens it is counted in.
        count = batch.routed if router == "routed" else batch.weight_sum if weighted else batch.supervised
        router_num = router_num + routed / batch.routed * count
        router_den += count
    loss = num / den
    if router:
        loss = loss + ROUTER_WEIGHT * router_num / router_den
    return list(torch.autograd.grad(loss, list(model.parameters())))


def run_window(
    kit: TokenNormedLossKit,
    model: nn.Module,
    window: Sequence[Micro],
    *,
    weighted: bool = False,
    router: str | None = None,
    counted: bool = False,
    as_tensors: bool = False,
    backward_divisor: float | None = None,
) -> None:
    """The micro-batches of one window: (announce,) forward, accumulate, backward."""

    def effective(batch: Micro) -> int | float:
        return batch.weight_sum if weighted else batch.supervised

    if counted:
        counts: dict[str, int | float | Tensor] = {"loss": sum(effective(batch) for batch in window)}
        if router:
            counts["router"] = sum(b.routed if router == "routed" else effective(b) for b in window)
        kit.begin_window(counts)
    for batch in window:
        losses, routed = model(batch)
        count = batch.routed if router == "routed" else effective(batch)
        terms = {"router": _term(routed / batch.routed * count, count, as_tensors)} if router else None
        loss = kit.accumulate_microbatch(
            loss_sum=(losses * batch.weights.to(losses.dtype) if weighted else losses).sum(),
            effective_tokens=torch.tensor(effective(batch)) if as_tensors else effective(batch),
            total_tokens=torch.tensor(len(batch.ids)) if as_tensors else len(batch.ids),
            extra_terms=terms,
            backward_divisor=backward_divisor,
        )
        loss.backward()


def _term(numerator: Tensor, count: int | float, as_tensors: bool) -> LossTerm:
    denominator = torch.tensor(count) if as_tensors else count
    return LossTerm(numerator=numerator, denominator=denominator, weight=ROUTER_WEIGHT)


def gradients(model: nn.Module) -> list[Tensor]:
    """Copies, whole (DTensors gathered), in float64."""
    found = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradient = parameter.grad.detach()
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found.append(copy.deepcopy(full.to_dense() if full.is_sparse else full).double())
    return found


def relative_error(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Global relative L2 error over all gradients."""
    difference = sum(float((a - b).pow(2).sum()) for a, b in zip(found, reference, strict=True))
    return (difference / sum(float(b.pow(2).sum()) for b in reference)) ** 0.5
