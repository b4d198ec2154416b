"""The reference: the objective of a window by its definition, in one process, in float64, one sample at a time.

    L = sum over supervised tokens of weight x loss / sum of weights  (+ weighted means of non-additive extras)

No ranks, no micro-batches, no padding and no packing take part in it, so nothing of these can be wrong in it. The
one exception is declared: an extra (a router loss) is a function of a whole micro-batch, so it is computed on the
micro-batches that the loop got.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.audit.jobs import LoopUnderTest, flatten
from tokennorm.audit.layouts import Layout
from tokennorm.audit.token_loss import TokenLoss, as_token_loss
from tokennorm.audit.unwrap import check_deterministic, parameters_by_name

__all__ = ["ExtraGradient", "ReferenceJob", "ReferenceResult", "SampleGradient", "WindowKey"]

# (number of the layout, number of the window in it)
WindowKey = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SampleGradient:
    """The tokens of one sample at one set of parameters, by segment.

    Args:
        counts: ``[g]``, sum of the token weights of each segment; an unsupervised sample has no segment.
        losses: ``[g]``, sums of weight x loss.
        gradients: ``[g, P]``, gradients of these sums.
        parts: by name, ``[g, P]``.
        gradient_in_dtype: ``[P]``, the gradient of the whole sample as the loop's dtype gives it.
    """

    counts: Tensor
    losses: Tensor
    gradients: Tensor
    parts: dict[str, Tensor]
    gradient_in_dtype: Tensor


@dataclass(frozen=True, kw_only=True)
class ExtraGradient:
    """A non-additive loss of one micro-batch: its value, its declared weight (None: tokens), its gradient [P]."""

    value: float
    weight: float | None
    gradient: Tensor


@dataclass(frozen=True, kw_only=True)
class ReferenceResult:
    """Everything the reference knows about the windows it was asked for."""

    samples: dict[tuple[int, int], SampleGradient]  # (state, sample number)
    # by window: by name: [rank][micro-batch]
    extras: dict[WindowKey, dict[str, list[list[ExtraGradient]]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReferenceJob:
    """Job: gradients of single samples, at the parameters that the loop had before each window.

    Args:
        layouts: all layouts of the audit.
        samples: the pool.
        states: distinct sets of parameters.
        windows: which windows, and the number of the state each began with.
        shapes: names and shapes of the parameters, which fix the order in a flat gradient.
    """

    layouts: Sequence[Layout]
    samples: Sequence[Any]
    states: Sequence[dict[str, Tensor]]
    windows: dict[WindowKey, int]
    shapes: dict[str, tuple[int, ...]]

    def __call__(self, loop: LoopUnderTest, _rank: int) -> ReferenceResult:
        """Run in a process of its own."""
        model = loop.reference(self.layouts[0])
        exact = copy.deepcopy(model).double()
        first = in_float64(loop.batch(self.samples, [0], packed=False))
        outcome = as_token_loss(loop.token_loss(exact, first))
        check_deterministic(outcome.loss, as_token_loss(loop.token_loss(exact, first)).loss)
        samples: dict[tuple[int, int], SampleGradient] = {}
        extras = {}
        for key, state in self.windows.items():
            load(model, self.states[state])
            load(exact, self.states[state])
            layout = self.layouts[key[0]]
            for numbers in (micro_batch for rank in layout.windows[key[1]] for micro_batch in rank):
                for number in numbers:
                    if (state, number) not in samples:
                        batch = loop.batch(self.samples, [number], packed=False)
                        samples[state, number] = self._sample(loop, exact, model, batch)
            if outcome.extras:
                extras[key] = self._extras(loop, exact, layout, key[1])
        return ReferenceResult(samples=samples, extras=extras)

    def _sample(self, loop: LoopUnderTest, exact: nn.Module, model: nn.Module, batch: Any) -> SampleGradient:
        outcome = as_token_loss(loop.token_loss(exact, in_float64(batch)))
        weighted = outcome.weight_or_ones() * outcome.loss
        counts, losses, gradients = [], [], []
        parts: dict[str, list[Tensor]] = {name: [] for name in outcome.parts}
        for segment in outcome.segments():
            counts.append(outcome.weight_or_ones()[segment].sum())
            losses.append(weighted[segment].sum().detach())
            gradients.append(gradient_of(weighted[segment].sum(), exact, self.shapes))
            for name, part in outcome.parts.items():
                value = (outcome.weight_or_ones() * part)[segment].sum()
                parts[name].append(gradient_of(value, exact, self.shapes))
        same = as_token_loss(loop.token_loss(model, batch))
        size = sum(torch.Size(shape).numel() for shape in self.shapes.values())
        return SampleGradient(
            counts=torch.tensor(counts, dtype=torch.float64),
            losses=torch.tensor(losses, dtype=torch.float64),
            gradients=torch.stack(gradients) if gradients else torch.zeros(0, size, dtype=torch.float64),
            parts={
                name: torch.stack(p) if p else torch.zeros(0, size, dtype=torch.float64)
                for name, p in parts.items()
            },
            gradient_in_dtype=sum_gradient(same, model, self.shapes),
        )

    def _extras(
        self, loop: LoopUnderTest, exact: nn.Module, layout: Layout, window: int
    ) -> dict[str, list[list[ExtraGradient]]]:
        found: dict[str, list[list[ExtraGradient]]] = {}
        for rank in range(layout.ranks):
            for batch in loop.micro_batches(self.samples, layout, layout.windows[window], rank):
                for name, (value, weight) in extras_of(loop, exact, batch):
                    rows = found.setdefault(name, [[] for _ in range(layout.ranks)])
                    gradient = gradient_of(value, exact, self.shapes)
                    weight = None if weight is None else float(weight)
                    rows[rank].append(ExtraGradient(value=value.item(), weight=weight, gradient=gradient))
        return found


def extras_of(loop: LoopUnderTest, exact: nn.Module, batch: Any) -> list[tuple[str, tuple[Tensor, float | None]]]:
    """The extras of one micro-batch, by name."""
    return list(as_token_loss(loop.token_loss(exact, in_float64(batch))).extras.items())


def in_float64(batch: Any) -> Any:
    """A batch (tensors in mappings, lists and tuples) with its floating-point tensors in float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: in_float64(value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map(in_float64, batch))
    return batch


def load(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Set the trainable parameters."""
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            parameter.copy_(state[name])


def gradient_of(value: Tensor, model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """The gradient of a scalar as one float64 vector ``[P]``; zero for what doesn't depend on the model."""
    parameters = parameters_by_name(model)
    if not value.requires_grad:
        return flatten({}, shapes)
    gradients = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
    return flatten(dict(zip(parameters, gradients, strict=True)), shapes)


def sum_gradient(outcome: TokenLoss, model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """The gradient of the weighted sum of all token losses of a batch, ``[P]``."""
    return gradient_of((outcome.weight_or_ones() * outcome.loss).sum(), model, shapes)
