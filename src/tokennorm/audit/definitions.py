"""Mistakes that change the loss itself: the same batches under a wrong definition.

Each is a change of the batch (other labels, other positions) or of the arithmetic, after which the right
``token_loss`` is computed. The gradients are exact, so a loop that makes one of these mistakes is recognised to
rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.audit.jobs import LoopUnderTest
from tokennorm.audit.layouts import Layout
from tokennorm.audit.reference import WindowKey, gradient_of, load
from tokennorm.audit.samples import IGNORED, PADDING, Sample, collate, is_token_batch
from tokennorm.audit.token_loss import CausalTokenLoss, as_token_loss

__all__ = ["DEFINITIONS", "Counts", "Definition", "DefinitionsJob", "WrongGradients"]

Batch = dict[str, Any]


def _real(batch: Batch) -> Tensor:
    """Positions that are not padding ``[B, S]``."""
    mask = batch.get("attention_mask")
    return torch.ones_like(batch["labels"], dtype=torch.bool) if mask is None else mask.bool()


def _starts(batch: Batch) -> Tensor:
    """First positions of packed documents ``[B, S]``; of an unpacked row, its first."""
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(batch["labels"].shape[1]).expand_as(batch["labels"])
    return positions == 0


def _all_tokens(batch: Batch, _samples: Any) -> Batch:
    labels = torch.where(_real(batch) & ~_starts(batch), batch["input_ids"], IGNORED)
    return {**batch, "labels": labels}


def _all_tokens_and_starts(batch: Batch, _samples: Any) -> Batch:
    return {**batch, "labels": torch.where(_real(batch), batch["input_ids"], IGNORED)}


def _padding(batch: Batch, _samples: Any) -> Batch:
    return {**batch, "labels": torch.where(_real(batch), batch["labels"], batch["input_ids"])}


def _everything(batch: Batch, _samples: Any) -> Batch:
    return {**batch, "labels": batch["input_ids"]}


def _shifted_left(batch: Batch, _samples: Any) -> Batch:
    last = torch.full_like(batch["labels"][:, :1], IGNORED)
    return {**batch, "labels": torch.cat([batch["labels"][:, 1:], last], dim=1)}


def _shifted_right(batch: Batch, _samples: Any) -> Batch:
    """One more column, so that the last label is still predicted (by its own position)."""
    fill = {"input_ids": PADDING, "attention_mask": 0, "position_ids": 0}
    wider = {
        key: torch.cat([batch[key], torch.full_like(batch[key][:, :1], value)], dim=1)
        for key, value in fill.items()
        if key in batch
    }
    first = torch.full_like(batch["labels"][:, :1], IGNORED)
    return {**batch, **wider, "labels": torch.cat([first, batch["labels"]], dim=1)}


def _own_starts(batch: Batch, samples: Sequence[Any]) -> Batch:
    """Documents concatenated with all the labels that they came with."""
    if "position_ids" not in batch or not all(isinstance(sample, Sample) for sample in samples):
        return batch
    labels = batch["labels"].clone()
    labels[_starts(batch)] = torch.tensor([sample.labels[0] for sample in samples])
    return {**batch, "labels": labels}


def _every_start(batch: Batch, _samples: Any) -> Batch:
    if "position_ids" not in batch:
        return batch
    return {**batch, "labels": torch.where(_starts(batch), batch["input_ids"], batch["labels"])}


def _one_document(batch: Batch, _samples: Any) -> Batch:
    if "position_ids" not in batch:
        return batch
    length = batch["labels"].shape[1]
    return {**batch, "position_ids": torch.arange(length).expand_as(batch["labels"])}


def _one_document_masked(batch: Batch, samples: Any) -> Batch:
    return _masked(_one_document(batch, samples), samples)


def _masked(batch: Batch, _samples: Any) -> Batch:
    """An attention mask next to packed positions: Hugging Face models no longer isolate the documents then."""
    return batch if "position_ids" not in batch else {**batch, "attention_mask": torch.ones_like(batch["labels"])}


def _chain(*changes: Callable[[Batch, Any], Batch]) -> Callable[[Batch, Any], Batch]:
    def apply(batch: Batch, samples: Any) -> Batch:
        for change in changes:
            batch = change(batch, samples)
        return batch

    return apply


@dataclass(frozen=True, kw_only=True)
class Definition:
    """A wrong definition of the loss.

    Args:
        key: its variant, unique.
        names: the mistakes that it makes, from the catalogue.
        change: what it makes of a batch and the samples in it.
        logits_dtype: half precision from the logits on (needs the default token loss).
        autocast: half precision in the model.
        upstream: what the sum of token losses is multiplied by before backward, which decides how half precision
            rounds: ``sum`` (1), ``window`` (R / D) or ``mean`` (1 / (M n)). It is divided out again.
    """

    key: str
    names: tuple[str, ...]
    change: Callable[[Batch, Any], Batch] | None = None
    logits_dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None
    upstream: str = "sum"

    @property
    def rounds(self) -> bool:
        """Half precision: explains an error by its size and direction, not to the last digit."""
        return self.logits_dtype is not None or self.autocast is not None


_TARGETS, _ATTENTION = ("targets_cross_documents",), ("attention_crosses_documents",)
DEFINITIONS = (
    Definition(key="all tokens", names=("prompt_supervised",), change=_all_tokens),
    Definition(
        key="all tokens, starts too", names=("prompt_supervised", *_TARGETS), change=_all_tokens_and_starts
    ),
    Definition(key="padding", names=("padding_counted",), change=_padding),
    Definition(key="everything", names=("padding_counted", "prompt_supervised"), change=_everything),
    Definition(key="shifted twice", names=("shifted_twice",), change=_shifted_left),
    Definition(key="not shifted", names=("not_shifted",), change=_shifted_right),
    Definition(key="own starts", names=_TARGETS, change=_own_starts),
    Definition(key="every start", names=_TARGETS, change=_every_start),
    Definition(key="one document", names=_ATTENTION, change=_one_document),
    Definition(key="masked", names=_ATTENTION, change=_masked),
    Definition(key="one document, masked", names=_ATTENTION, change=_one_document_masked),
    *(
        Definition(key=f"{name}, own starts", names=(*_TARGETS, *_ATTENTION), change=_chain(_own_starts, change))
        for name, change in (
            ("one document", _one_document),
            ("masked", _masked),
            ("one document, masked", _one_document_masked),
        )
    ),
    *(
        Definition(
            key=f"{name}, {upstream}", names=(f"half_precision_{kind}",), upstream=upstream, **{option: dtype}
        )
        for upstream in ("window", "mean", "sum")
        for name, kind, option, dtype in (
            ("bfloat16 loss", "loss", "logits_dtype", torch.bfloat16),
            ("float16 loss", "loss", "logits_dtype", torch.float16),
            ("bfloat16 autocast", "arithmetic", "autocast", torch.bfloat16),
        )
    ),
)


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
                loop.token_loss(exact, batch)
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
            if type(token_loss) is not CausalTokenLoss:
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
            outcome = as_token_loss(token_loss(network, batch))
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
    tokens = float(_real(batch).sum())
    return Counts(
        before_shift=float((batch["labels"] != IGNORED).sum()),
        positions=float(rows * length),
        shifted_positions=float(rows * (length - 1)),
        tokens=tokens,
        shifted_tokens=tokens - rows,
    )
