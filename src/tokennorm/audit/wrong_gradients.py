"""The gradient of every micro-batch under wrong definitions of the loss, computed exactly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.audit.definitions import DEFINITIONS, Batch, Definition, real_positions
from tokennorm.audit.jobs import LoopUnderTest
from tokennorm.audit.layouts import Layout
from tokennorm.audit.reference import WindowKey, gradient_of, in_float64, load
from tokennorm.audit.samples import IGNORED, Sample, collate, is_token_batch
from tokennorm.audit.token_loss import CausalTokenLoss, as_token_loss

__all__ = ["Counts", "DefinitionsJob", "WrongGradients"]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Other things that a loop may count in a micro-batch, by name; ``mistake`` says which mistake each is."""

    before_shift: float
    positions: float
    shifted_positions: float
    tokens: float
    shifted_tokens: float


@dataclass(frozen=True, kw_only=True)
class WrongGradients:
    """Sums over one micro-batch by definition key: ``[P']`` gradient and own count; and the other counts."""

    gradients: dict[str, Tensor]
    counts: dict[str, float]
    other_counts: Counts | None


@dataclass(frozen=True, kw_only=True)
class DefinitionsJob:
    """Job: the gradient of every micro-batch under every wrong definition.

    Args:
        layouts: and ``samples``, ``states``, ``windows``, ``shapes``: as in the reference's job.
        coordinates: ``[P']``, which entries of a flat gradient to bring back; None for all.
        keys: of the definitions.
        due: D of each window.
    """

    layouts: Sequence[Layout]
    samples: Sequence[Any]
    states: Sequence[dict[str, Tensor]]
    windows: dict[WindowKey, int]
    shapes: dict[str, tuple[int, ...]]
    coordinates: Tensor | None
    keys: frozenset[str]
    due: dict[WindowKey, float]

    def __call__(self, loop: LoopUnderTest, _rank: int) -> dict[WindowKey, list[list[WrongGradients]]]:
        """Run in a process of its own; ``[rank][micro-batch]`` for each window."""
        model = loop.reference(self.layouts[0])
        exact = copy.deepcopy(model).double()
        found = {}
        for key, state in self.windows.items():
            load(model, self.states[state])
            load(exact, self.states[state])
            layout = self.layouts[key[0]]
            found[key] = [
                [self._micro_batch(loop, exact, model, key, numbers) for numbers in micro_batches]
                for micro_batches in layout.windows[key[1]]
            ]
        return found

    def _micro_batch(
        self, loop: LoopUnderTest, exact: nn.Module, model: nn.Module, key: WindowKey, numbers: Sequence[int]
    ) -> WrongGradients:
        layout = self.layouts[key[0]]
        samples = [self.samples[number % len(self.samples)] for number in numbers]
        batch = self._plain_batch(loop, exact, samples, layout.packed)
        gradients, counts = {}, {}
        for definition in (d for d in DEFINITIONS if d.key in self.keys):
            # A definition that this model or batch can't be put through is not the mistake that it made.
            with contextlib.suppress(Exception):
                outcome = self._gradient(loop, exact, model, definition, batch, samples, key)
                if outcome is not None:
                    gradients[definition.key], counts[definition.key] = outcome
        return WrongGradients(
            gradients=gradients, counts=counts, other_counts=_count(batch) if is_token_batch(batch) else None
        )

    def _plain_batch(self, loop: LoopUnderTest, exact: nn.Module, samples: Sequence[Any], packed: bool) -> Any:
        """The audit's own batch where the loss can read it: a person's ``make_batch`` may hold the mistake."""
        if all(isinstance(sample, Sample) for sample in samples):
            batch = collate(samples, packed)
            with contextlib.suppress(Exception):
                loop.token_loss(exact, in_float64(batch))
                return batch
        return loop.make_batch(samples, packed)

    def _gradient(
        self,
        loop: LoopUnderTest,
        exact: nn.Module,
        model: nn.Module,
        definition: Definition,
        batch: Any,
        samples: Sequence[Any],
        key: WindowKey,
    ) -> tuple[Tensor, float] | None:
        """Gradient and count of a changed micro-batch; None where the definition changes nothing."""
        token_loss, network, context = loop.token_loss, exact, contextlib.nullcontext()
        if definition.logits_dtype is not None:
            if not isinstance(token_loss, CausalTokenLoss):
                return None
            token_loss = CausalTokenLoss(
                label_smoothing=token_loss.label_smoothing, logits_dtype=definition.logits_dtype
            )
            network = model
        elif definition.autocast is not None:
            network, context = model, torch.autocast("cpu", dtype=definition.autocast)
        elif not is_token_batch(batch) or definition.change is None:
            return None
        else:
            changed = definition.change(batch, samples)
            if _same(batch, changed):
                return None
            batch = changed
        with context:
            outcome = as_token_loss(token_loss(network, in_float64(batch) if network is exact else batch))
        count = float(outcome.weight_or_ones().sum())
        layout = self.layouts[key[0]]
        scale = {
            "sum": 1.0,
            "window": layout.ranks / self.due[key],
            "mean": 1.0 / (max(count, 1.0) * len(layout.windows[key[1]][0])),
        }[definition.upstream]
        value = (outcome.weight_or_ones() * outcome.loss).to(
            torch.promote_types(outcome.loss.dtype, torch.float32)
        )
        gradient = gradient_of(value.sum() * scale, network, self.shapes) / scale
        return gradient if self.coordinates is None else gradient[self.coordinates], count


def _same(one: Batch, other: Batch) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _count(batch: Batch) -> Counts:
    rows, length = batch["labels"].shape
    tokens = float(real_positions(batch).sum())
    return Counts(
        before_shift=float((batch["labels"] != IGNORED).sum()),
        positions=float(rows * length),
        shifted_positions=float(rows * (length - 1)),
        tokens=tokens,
        shifted_tokens=tokens - rows,
    )
