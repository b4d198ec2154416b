"""One window on one rank, as a user's loop runs it, and the float64 definition that it is held against.

The model is a small Phi, patched; the samples are chats of very uneven length. The definition knows nothing of
micro-batches: it takes the samples of the window one by one, unpadded, and divides their summed loss once.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tokennorm.data import IGNORE_INDEX, Batch, Sample, collate_packed, collate_padded, dummy_batch
from tokennorm.kit import TokenNormedLossKit

VOCABULARY = 61


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the window's samples are spread, and how the window is normalised."""

    micro_batches: int  # per rank
    unsupervised_rank: bool
    packed: bool
    chunk_size: int | None
    counted: bool
    dtype: torch.dtype

    @property
    def label(self) -> str:
        return " ".join(
            [
                f"{self.micro_batches} micro-batches",
                "packed" if self.packed else "padded",
                f"chunk {self.chunk_size or 'default'}",
                "counted" if self.counted else "deferred",
                "one rank unsupervised" if self.unsupervised_rank else "",
            ]
        )


def layouts(world_size: int, *, few: bool = False) -> list[Layout]:
    """Every combination; a rank without supervised tokens needs another one that has some."""
    axes = itertools.product(
        (1, 3, 8),
        (False, True) if world_size > 1 else (False,),
        (False, True),
        (None, 3),
        (False, True),
        (torch.float32, torch.float64),
    )
    combinations = [
        Layout(micro_batches=m, unsupervised_rank=u, packed=p, chunk_size=c, counted=n, dtype=d)
        for m, u, p, c, n, d in axes
    ]
    return [one for one in combinations if not few or (one.micro_batches == 3 and one.chunk_size is None)]


def make_model() -> nn.Module:
    """A 2-layer Phi in float64, the same on every rank; its head has a bias.

    Not a Llama: its RMSNorm computes in float32 whatever the dtype of the model, so two ways of batching the same
    float64 samples agree to 1e-7 only.
    """
    from transformers import PhiConfig, PhiForCausalLM

    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        resid_pdrop=0.0,
        attn_implementation="sdpa",
    )
    return PhiForCausalLM(config).double()


def with_learned_adapters(model: Any) -> Any:
    """The model with LoRA adapters that have learned something, the same on every rank; they begin as zeros."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3, generator=generator)
    return model


def make_sample(seed: int, *, supervised: bool) -> Sample:
    """Between 2 and 60 tokens, of which between none and nearly all are supervised."""
    generator = torch.Generator().manual_seed(seed)
    length = int(2 + 58 * torch.rand((), generator=generator) ** 3)
    tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
    share = torch.rand((), generator=generator)
    mask = torch.rand(length, generator=generator) < share
    mask[0] = False
    mask[-1] = True
    return Sample(
        input_ids=tokens, supervised=mask if supervised else torch.zeros_like(mask), source=f"sample {seed}"
    )


def window_samples(layout: Layout, world_size: int, *, short: bool) -> list[list[list[list[Sample]]]]:
    """Samples by rank, micro-batch and row. A short window has one micro-batch in all: other ranks have none."""
    seeds = itertools.count(1000 * layout.micro_batches + 100 * world_size + short)
    ranks: list[list[list[list[Sample]]]] = [[] for _ in range(world_size)]
    for rank, micro_batch in itertools.product(range(world_size), range(layout.micro_batches)):
        if short and (rank, micro_batch) != (0, 0):
            continue
        empty = layout.unsupervised_rank and rank == world_size - 1
        rows = [
            [make_sample(next(seeds), supervised=not empty) for _ in range(1 + (rank + micro_batch + row) % 3)]
            for row in range(1 + micro_batch % 2)
        ]
        ranks[rank].append(rows)
    # Ranks that ran out get dummies, so that all run the same number of micro-batches.
    return ranks


def collate_rows(rows: list[list[Sample]], *, packed: bool) -> Batch:
    if packed:
        return collate_packed(rows, pad_token_id=0)
    return collate_padded([sample for row in rows for sample in row], pad_token_id=0)


collate = collate_rows


def batches_of(layout: Layout, world_size: int, rank: int, *, short: bool) -> tuple[list[Batch], list[Sample]]:
    """This rank's micro-batches, and all samples of the window."""
    ranks = window_samples(layout, world_size, short=short)
    steps = max(len(mine) for mine in ranks)
    batches = [collate(rows, packed=layout.packed) for rows in ranks[rank]]
    batches += [dummy_batch(0, packed=layout.packed)] * (steps - len(batches))
    everything = [sample for mine in ranks for rows in mine for row in rows for sample in row]
    return batches, everything


def by_definition(model: nn.Module, samples: Sequence[Sample], dtype: torch.dtype) -> list[Tensor]:
    """Gradient of (sum of losses) / (number of supervised tokens) in one process, one sample at a time."""
    model = copy.deepcopy(model).to(dtype)
    count = sum(int((sample.shift_labels() != IGNORE_INDEX).sum()) for sample in samples)
    for sample in samples:
        logits = model(input_ids=sample.input_ids.unsqueeze(0)).logits[0]
        labels = sample.shift_labels()
        (F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum") / count).backward()
    return [parameter.grad.double() for parameter in model.parameters() if parameter.requires_grad]


def run_window(
    model: nn.Module, wrapped: nn.Module, kit: TokenNormedLossKit, batches: list[Batch], *, counted: bool
) -> Any:
    """The loop under test: what a user writes."""
    if counted:
        kit.begin_window({"loss": sum(batch["effective_tokens"] for batch in batches)})
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        no_sync = getattr(wrapped, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last else no_sync():
            inputs = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
            outputs = wrapped(**inputs)
            loss = kit.accumulate_microbatch(
                loss_sum=outputs["loss"].sum(),
                effective_tokens=batch["effective_tokens"],
                total_tokens=batch["total_tokens"],
            )
            loss.backward()
    stats = kit.reduce_window()
    kit.rescale_gradients(model.parameters(), stats)
    kit.reset()
    return stats


def relative_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Global relative L2 error of all gradients together."""
    difference = sum(float((a.double() - b).square().sum()) for a, b in zip(got, want, strict=True))
    return (difference / sum(float(b.square().sum()) for b in want)) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one layout came to on one rank."""

    layout: str
    dtype: str
    short: bool
    tokens: int
    error: float
    naive_error: float
    loss_error: float


def measure(rank: int, world_size: int, few: bool = False) -> list[Row]:
    """Every layout of this world size, a full window and then a short one, on one rank."""
    plain = make_model()
    models: dict[tuple[torch.dtype, int | None], tuple[nn.Module, nn.Module, TokenNormedLossKit]] = {}
    truths: dict[Any, list[Tensor]] = {}
    rows: list[Row] = []
    for layout in layouts(world_size, few=few):
        key = (layout.dtype, layout.chunk_size)
        if key not in models:
            kit = TokenNormedLossKit("cpu", world_size)
            model = copy.deepcopy(plain).to(layout.dtype)
            model = kit.apply_chunked_token_loss_patch(model, chunk_size=layout.chunk_size)
            models[key] = (model, DistributedDataParallel(model) if world_size > 1 else model, kit)
        model, wrapped, kit = models[key]
        for short in (False, True):
            batches, samples = batches_of(layout, world_size, rank, short=short)
            model.zero_grad()
            stats = run_window(model, wrapped, kit, batches, counted=layout.counted)
            which = (layout.micro_batches, layout.unsupervised_rank, short)
            for dtype in (torch.float64, layout.dtype):
                if (which, dtype) not in truths:
                    truths[which, dtype] = by_definition(plain, samples, dtype)
            truth = truths[which, torch.float64]
            mean = definition_loss(plain, samples)
            rows.append(
                Row(
                    layout=layout.label,
                    dtype=str(layout.dtype).removeprefix("torch."),
                    short=short,
                    tokens=stats.global_effective_tokens,
                    error=relative_error([parameter.grad for parameter in model.parameters()], truth),
                    naive_error=relative_error(truths[which, layout.dtype], truth),
                    loss_error=abs(stats.mean_loss - mean) / mean,
                )
            )
    return rows


@torch.no_grad()
def definition_loss(model: nn.Module, samples: Sequence[Sample]) -> float:
    """(sum of losses) / (number of supervised tokens), float64."""
    total, count = 0.0, 0
    for sample in samples:
        labels = sample.shift_labels()
        logits = model(input_ids=sample.input_ids.unsqueeze(0)).logits[0]
        total += float(F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum"))
        count += int((labels != IGNORE_INDEX).sum())
    return total / count
