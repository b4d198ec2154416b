"""The loops that the audit is tested on: right ones, and one or more for every mistake in the catalogue.

They are plain PyTorch under gloo, with any number of ranks, and know nothing of the audit but its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tests.audit import loop_pieces as pieces
from tests.audit import mistaken_loops as mistaken
from tests.audit import right_loops as right


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop, and what an audit should say of it (nothing, if it is right)."""

    name: str
    step: Callable[..., Any]
    build: Callable[..., Any] = pieces.build
    expected: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Power:
    ranks: int
    micro_batches: int

    def __call__(self, ranks: int, micro_batches: int) -> float:
        return float(ranks) ** self.ranks * float(micro_batches) ** self.micro_batches


@dataclass(frozen=True)
class _Constant:
    factor: float

    def __call__(self, ranks: int, micro_batches: int) -> float:
        return self.factor


def _scaled(ranks: int, micro_batches: int) -> Callable[..., Any]:
    return partial(pieces.counted, factor=_Power(ranks, micro_batches))


def multiplied_router(tokens: float, total: float, splits: int) -> float:
    """What a sum over micro-batches and ranks of the router loss comes to."""
    return 1.0


def divided_router(tokens: float, total: float, splits: int) -> float:
    return 1.0 / total


def mean_router(tokens: float, total: float, splits: int) -> float:
    return 1.0 / splits


MISTAKES = (
    Loop(
        name="mean of micro-batch means", step=mistaken.micro_batch_means, expected=("mean_of_micro_batch_means",)
    ),
    Loop(name="mean of rank means", step=mistaken.rank_means, expected=("mean_of_rank_means",)),
    Loop(name="mean of both", step=mistaken.all_means, expected=("mean_of_rank_and_micro_batch_means",)),
    Loop(name="mean of both, 0/0", step=mistaken.model_means, expected=("mean_of_rank_and_micro_batch_means",)),
    Loop(
        name="mean of sample means",
        step=mistaken.sample_means,
        expected=("mean_of_sample_means",),
        options={"packed": False},
    ),
    Loop(
        name="counted before the shift",
        step=partial(pieces.counted, count=mistaken.before_shift),
        expected=("counted_before_shift",),
    ),
    Loop(
        name="padding counted",
        step=partial(pieces.counted, count=mistaken.positions),
        expected=("padding_counted",),
    ),
    Loop(
        name="padding in the loss",
        step=partial(mistaken.relabelled, labels=mistaken.padding_labels),
        expected=("padding_counted",),
    ),
    Loop(
        name="prompt counted",
        step=partial(pieces.counted, count=mistaken.not_padding),
        expected=("prompt_counted",),
    ),
    Loop(
        name="prompt supervised",
        step=partial(mistaken.relabelled, labels=mistaken.prompt_labels),
        expected=("prompt_supervised",),
    ),
    Loop(
        name="prompt supervised, not counted",
        step=partial(mistaken.relabelled, labels=mistaken.prompt_labels, own_count=False),
        expected=("prompt_supervised",),
    ),
    Loop(name="x ranks", step=_scaled(1, 0), expected=("factor_ranks_too_much",)),
    Loop(name="/ ranks", step=_scaled(-1, 0), expected=("factor_ranks_too_little",)),
    Loop(name="x accumulation", step=_scaled(0, 1), expected=("factor_accumulation_too_much",)),
    Loop(name="/ accumulation", step=_scaled(0, -1), expected=("factor_accumulation_too_little",)),
    Loop(name="x both", step=_scaled(1, 1), expected=("factor_ranks_and_accumulation_too_much",)),
    Loop(name="/ both", step=_scaled(-1, -1), expected=("factor_ranks_and_accumulation_too_little",)),
    Loop(
        name="a loss scale never undone",
        step=partial(pieces.counted, factor=_Constant(1024.0)),
        expected=("constant_factor",),
    ),
    Loop(name="rescaled twice", step=mistaken.rescaled_twice, expected=("rescaled_twice",)),
    Loop(name="not rescaled", step=mistaken.not_rescaled, expected=("not_rescaled",)),
    Loop(
        name="fixed division, short last window",
        step=mistaken.fixed_accumulation,
        build=mistaken.build_configured,
        expected=("fixed_division",),
    ),
    Loop(
        name="router loss x ranks x accumulation",
        step=partial(right.with_router, extra_weight=multiplied_router),
        build=partial(pieces.build, pieces.TinyMoE),
        expected=("auxiliary_loss_multiplied",),
    ),
    Loop(
        name="router loss / tokens",
        step=partial(right.with_router, extra_weight=divided_router),
        build=partial(pieces.build, pieces.TinyMoE),
        expected=("auxiliary_loss_divided_by_tokens",),
    ),
    Loop(
        name="router loss unweighted",
        step=partial(right.with_router, extra_weight=mean_router),
        build=partial(pieces.build, pieces.TinyMoE),
        expected=("auxiliary_loss_unweighted",),
    ),
    Loop(
        name="router loss forgotten",
        step=pieces.counted,
        build=partial(pieces.build, pieces.TinyMoE, find_unused_parameters=True),
        expected=("auxiliary_loss_missing",),
    ),
    Loop(
        name="label smoothing summed",
        step=mistaken.smoothing_apart,
        expected=("label_smoothing_not_normalised",),
        options={"label_smoothing": 0.1},
    ),
    Loop(
        name="label smoothing averaged per micro-batch",
        step=partial(mistaken.smoothing_apart, mean=True),
        expected=("label_smoothing_not_normalised",),
        options={"label_smoothing": 0.1},
    ),
    Loop(
        name="targets cross documents",
        step=pieces.counted,
        expected=("targets_cross_documents",),
        options={"make_batch": mistaken.naive_packing},
    ),
    Loop(
        name="attention crosses documents",
        step=mistaken.without_positions,
        expected=("attention_crosses_documents",),
    ),
    Loop(
        name="attention mask on packed rows", step=mistaken.masked_packs, expected=("attention_crosses_documents",)
    ),
    Loop(
        name="shifted twice",
        step=partial(mistaken.relabelled, labels=mistaken.shifted_labels),
        expected=("shifted_twice",),
    ),
    Loop(name="not shifted", step=mistaken.unshifted, expected=("not_shifted",)),
    Loop(name="bfloat16 loss", step=mistaken.half_loss, expected=("half_precision_loss",)),
    Loop(
        name="float16 loss",
        step=partial(mistaken.half_loss, dtype=torch.float16),
        expected=("half_precision_loss",),
    ),
    Loop(name="bfloat16 autocast", step=mistaken.autocast_loop, expected=("half_precision_arithmetic",)),
    Loop(name="clipped before rescaling", step=mistaken.clipped_first, expected=("clipped_before_rescaling",)),
    Loop(
        name="clipped before rescaling, by hand",
        step=partial(mistaken.clipped_first, own=True),
        expected=("clipped_before_rescaling",),
    ),
    Loop(name="skipped micro-batch counted", step=mistaken.skipping, expected=("skipped_micro_batch_counted",)),
    Loop(
        name="skipped micro-batch uncounted",
        step=partial(mistaken.skipping, counts=False),
        expected=("micro_batch_skipped",),
    ),
    Loop(name="one rank missing", step=mistaken.last_rank_missing, expected=("rank_gradient_missing",)),
    Loop(name="ranks never meet", step=mistaken.never_synchronised, expected=("ranks_not_synchronised",)),
    Loop(name="not cleared", step=mistaken.not_cleared, expected=("gradients_not_cleared",)),
    Loop(name="a step per micro-batch", step=mistaken.stepping_every_time, expected=("several_steps_per_window",)),
    Loop(name="a gradient thrown away", step=mistaken.step_without_mix, expected=("parameters_without_gradient",)),
)

EXACT = (
    Loop(name="DDP, counted", step=pieces.counted),
    Loop(name="DDP, counted, double", step=pieces.counted, build=partial(pieces.build, dtype=torch.float64)),
    Loop(name="DDP, counted, clipped", step=partial(pieces.counted, clip=0.1)),
    Loop(name="DDP, counted, clipped in some windows", step=partial(pieces.counted, clip=0.5)),
    Loop(name="DDP, counted, clipping never bites", step=partial(pieces.counted, clip=1e6)),
    Loop(name="DDP, syncing every micro-batch", step=right.syncing_every_time),
    Loop(name="DDP, deferred", step=right.deferred),
    Loop(name="DDP, deferred, divisor 1", step=partial(right.deferred, divisor=1.0)),
    Loop(name="DDP, deferred, odd divisor", step=partial(right.deferred, divisor=37.0)),
    Loop(name="DDP, deferred, huge divisor", step=partial(right.deferred, divisor=1e9)),
    Loop(name="DDP, deferred, clipped", step=partial(right.deferred, clip=0.1)),
    Loop(
        name="DDP, gradients as bucket views",
        step=pieces.counted,
        build=partial(pieces.build, gradient_as_bucket_view=True),
    ),
    Loop(name="DDP, AdamW", step=pieces.counted, build=partial(pieces.build, optimizer=torch.optim.AdamW)),
    Loop(name="DDP, a hook that sums", step=right.summing_hook),
    Loop(name="summed by hand after", step=right.by_hand, build=pieces.build_plain),
    Loop(name="summed by hand, counted", step=partial(right.by_hand, after=False), build=pieces.build_plain),
    Loop(name="FSDP2", step=right.sharded, build=pieces.build_sharded),
    Loop(name="FSDP2, clipped", step=partial(right.sharded, clip=0.1), build=pieces.build_sharded),
    Loop(
        name="FSDP2, one unit, no division",
        step=right.undivided,
        build=partial(pieces.build_sharded, layers=False),
    ),
    Loop(name="own clipping", step=right.own_clipping),
    Loop(name="all positions, masked", step=right.masked_sum),
    Loop(name="one backward", step=right.one_forward),
    Loop(name="the model's mean times the count", step=right.model_loss_times_count),
    Loop(name="labels popped", step=right.popping_labels),
    Loop(name="loss scaler", step=right.scaler_loop),
    Loop(name="label smoothing", step=right.smoothed, options={"label_smoothing": 0.1}),
    Loop(name="router loss", step=right.with_router, build=partial(pieces.build, pieces.TinyMoE)),
    Loop(name="weighted tokens", step=right.weighted, options={"token_loss": right.weighted_token_loss}),
    Loop(
        name="one process",
        step=partial(right.by_hand, after=False),
        build=pieces.build_plain,
        options={"ranks": (1,)},
    ),
)
