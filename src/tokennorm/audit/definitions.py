"""Mistakes that change the loss itself: the same batches under a wrong definition.

Each is a change of the batch (other labels, other positions) or of the arithmetic, after which the right
``token_loss`` is computed. The gradients are exact, so a loop that makes one of these mistakes is recognised to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.audit.samples import IGNORED, PADDING, Sample

__all__ = ["DEFINITIONS", "Batch", "Definition", "real_positions"]

Batch = dict[str, Any]


def real_positions(batch: Batch) -> Tensor:
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
    labels = torch.where(real_positions(batch) & ~_starts(batch), batch["input_ids"], IGNORED)
    return {**batch, "labels": labels}


def _all_tokens_and_starts(batch: Batch, _samples: Any) -> Batch:
    return {**batch, "labels": torch.where(real_positions(batch), batch["input_ids"], IGNORED)}


def _padding(batch: Batch, _samples: Any) -> Batch:
    return {**batch, "labels": torch.where(real_positions(batch), batch["labels"], batch["input_ids"])}


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
            key=f"{name}, {upstream}",
            names=(f"half_precision_{kind}",),
            upstream=upstream,
            logits_dtype=logits_dtype,
            autocast=autocast,
        )
        for upstream in ("window", "mean", "sum")
        for name, kind, logits_dtype, autocast in (
            ("bfloat16 loss", "loss", torch.bfloat16, None),
            ("float16 loss", "loss", torch.float16, None),
            ("bfloat16 autocast", "arithmetic", None, torch.bfloat16),
        )
    ),
)
