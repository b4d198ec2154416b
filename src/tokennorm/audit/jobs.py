"""What a rank, or the one process of the reference, does for the audit. Runs in child processes."""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.audit.layouts import Layout, Window
from tokennorm.audit.observe import Observer, WindowRecord, as_logged, changed_keys, torch_optimizers
from tokennorm.audit.unwrap import bare_model, parameters_by_name, silence_dropout
from tokennorm.errors import AuditError

__all__ = ["Describe", "Description", "LoopUnderTest", "Observe"]


@dataclass(frozen=True, kw_only=True)
class LoopUnderTest:
    """The functions of the person, and how to make batches for them."""

    build: Callable[..., Any]
    step: Callable[..., Any]
    token_loss: Callable[..., Any]
    make_batch: Callable[..., Any]
    reference_model: Callable[..., Any] | None
    seed: int

    def built(self, layout: Layout) -> tuple[nn.Module, Any, bool]:
        """Call ``build`` with fixed seeds, the same on every rank: model, optimizer, was there dropout to silence.

        A ``build`` with a parameter is given the layout: a loop configured with its number of accumulation steps
        needs to know it.
        """
        _seed_everything(self.seed)
        returned = self.build(layout) if _takes_an_argument(self.build) else self.build()
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)):
            raise AuditError(
                f"build returned a {type(returned).__name__}", fix="return (model, optimizer) from build."
            )
        model, optimizer = returned
        torch_optimizers(optimizer)
        return model, optimizer, silence_dropout(model)

    def reference(self, layout: Layout) -> nn.Module:
        """The plain module, in the dtype of the loop."""
        if self.reference_model is None:
            model = bare_model(self.built(layout)[0])
        else:
            _seed_everything(self.seed)
            model = bare_model(self.reference_model())
            silence_dropout(model)
        return model.train()

    def micro_batches(self, samples: Sequence[Any], layout: Layout, window: Window, rank: int) -> list[Any]:
        """The batches of one rank."""
        return [self.batch(samples, numbers, packed=layout.packed) for numbers in window[rank]]

    def batch(self, samples: Sequence[Any], numbers: Sequence[int], *, packed: bool) -> Any:
        """One micro-batch of the samples with these numbers."""
        return self.make_batch([samples[number % len(samples)] for number in numbers], packed)


def _takes_an_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the audit has to know of the model before it makes data."""

    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    vocabulary_size: int | None
    takes_positions: bool
    wrapper: str
    dropout: bool


@dataclass(frozen=True, kw_only=True)
class Describe:
    """Job: build the model once, in one process, and describe it."""

    layout: Layout

    def __call__(self, loop: LoopUnderTest, _rank: int) -> Description:
        """Run in a process of its own."""
        wrapped, _, dropout = loop.built(self.layout)
        name = type(wrapped).__name__
        model = loop.reference(self.layout)
        parameters = parameters_by_name(model)
        if not parameters:
            raise AuditError("the model has no trainable parameter", fix="leave some parameters trainable.")
        embeddings = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        configured = getattr(getattr(model, "config", None), "vocab_size", None)
        signature = inspect.signature(model.forward).parameters
        return Description(
            shapes={name: tuple(p.shape) for name, p in parameters.items()},
            dtype=next(iter(parameters.values())).dtype,
            vocabulary_size=configured or (min(embeddings) if embeddings else None),
            takes_positions="position_ids" in signature
            or any(p.kind is p.VAR_KEYWORD for p in signature.values()),
            wrapper=name,
            dropout=dropout,
        )


@dataclass(frozen=True, kw_only=True)
class Observe:
    """Job: run the loop over the windows of one layout, on every rank."""

    layout: Layout
    samples: Sequence[Any]

    def __call__(self, loop: LoopUnderTest, rank: int) -> list[WindowRecord]:
        """Run on one of ``layout.ranks`` ranks; the process group is there already."""
        model, optimizer, _ = loop.built(self.layout)
        observer = Observer(model, optimizer)
        records = []
        for window in self.layout.windows:
            micro_batches = loop.micro_batches(self.samples, self.layout, window, rank)
            kept = copy.deepcopy(micro_batches)
            with observer.window() as record:
                record.logged = as_logged(loop.step(model, optimizer, micro_batches))
            record.changed_keys = changed_keys(kept, micro_batches)
            if rank:
                record.parameters = {}  # rank 0 speaks for all
            records.append(record)
        return records


def flatten(values: dict[str, Tensor | None], shapes: dict[str, tuple[int, ...]]) -> Tensor:
    """All parameters as one float64 vector, in the order of ``shapes``; what is missing is zero."""
    pieces = []
    for name, shape in shapes.items():
        value = values.get(name)
        piece = torch.zeros(shape, dtype=torch.float64) if value is None else value.to(torch.float64)
        pieces.append(piece.flatten())
    return torch.cat(pieces)
