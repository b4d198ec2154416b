"""The window of one optimizer step, as the Trainer's hooks fill it, and the sums that are logged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokennorm.errors import ConfigError, EmptyWindowError
from tokennorm.integrations.hf.token_losses import TokenLosses, count_of, total_sum, weighted_losses
from tokennorm.kit import TokenNormedLossKit
from tokennorm.loss import LossTerm, RatioSum, reduce_ratios

__all__ = ["TrainingWindow", "WindowSums"]

_ROUTER = "router"


@dataclass(kw_only=True)
class WindowSums:
    """Sums over windows: what is logged is divided at the very end.

    Attributes:
        loss: token losses and supervised tokens, over all ranks.
        router: the model's own extra loss, weighted by supervised tokens, over all ranks; None if it has none.
        metrics: sums of this rank.
    """

    loss: RatioSum = field(default_factory=lambda: RatioSum(0.0, 0))
    router: RatioSum | None = None
    metrics: dict[str, RatioSum] = field(default_factory=dict)

    def add_metrics(self, part: TokenLosses, weights: Tensor, count: Tensor) -> None:
        """Add one micro-batch's metrics, over the tokens that count."""
        for name, values in part.metrics.items():
            ratio = RatioSum(total_sum(values.flatten() * weights.flatten()), count)
            self.metrics[name] = self.metrics[name] + ratio if name in self.metrics else ratio

    def means(self, device: torch.device) -> dict[str, Any]:
        """What to log; a collective call where there are metrics. ``loss`` is NaN when nothing was counted."""
        loss = self.loss.mean
        values = {"loss": math.nan if loss is None else loss, "supervised_tokens": self.loss.den}
        if self.router is not None and self.router.mean is not None:
            values["router_loss"] = self.router.mean
        for name, ratio in reduce_ratios(self.metrics, device=device).items():
            values[name] = math.nan if ratio.mean is None else ratio.mean
        return values


class TrainingWindow:
    """Begin, one add per micro-batch, close; over and over, from :meth:`start` on.

    The windows are *counted* ones of :class:`TokenNormedLossKit`: no gradient is touched after backward.
    """

    def __init__(self) -> None:
        self._kit: TokenNormedLossKit | None = None
        self._counts: list[int | float] | None = None
        self._added = 0
        self._step: list[tuple[Tensor, int]] | None = None
        self._has_router = False
        self.since_log = WindowSums()
        self.since_start = WindowSums()

    def start(self, device: torch.device, ranks: int) -> None:
        """A training run begins, on ``ranks`` processes that average their gradients (as DDP does)."""
        self._kit = TokenNormedLossKit(device, ranks, extra_terms=(_ROUTER,))
        self._counts, self._step = None, None
        self.since_log, self.since_start = WindowSums(), WindowSums()

    @property
    def is_open(self) -> bool:
        """Whether a window has begun and was not closed."""
        return self._counts is not None

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch of the open window was added."""
        return self._counts is not None and self._added == len(self._counts)

    @property
    def in_training_step(self) -> bool:
        """Whether a loss that is computed now is for backward."""
        return self._step is not None

    def begin(self, counts: Sequence[Tensor]) -> Tensor:
        """Count a window before its first backward: one all-reduce.

        Args:
            counts: 0-d, supervised tokens (or sums of token weights) of each of this rank's micro-batches.

        Returns:
            Their sum over all ranks, 0-d.

        Raises:
            EmptyWindowError: it is 0.
        """
        assert self._kit is not None
        self._counts = torch.stack(list(counts)).tolist()  # waits for the device, once per window
        self._added = 0
        total = sum(self._counts)
        try:
            return self._kit.begin_window({"loss": total, _ROUTER: total})["loss"]
        except EmptyWindowError as error:
            self.give_up()
            raise _no_tokens(error) from error

    def give_up(self) -> None:
        """Forget the open window: its gradients will not be used."""
        assert self._kit is not None
        self._kit.reset(discard=True)
        self._counts = None

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Around the computation of one micro-batch's loss and its backward."""
        self._step = []
        try:
            yield
        finally:
            self._step = None

    def add(self, part: TokenLosses, weights: Tensor, total_tokens: int | Tensor, *, plain_sum: bool) -> Tensor:
        """Add one micro-batch; the loss for backward.

        Args:
            part: its token losses.
            weights: ``[B, S]``, which tokens count (bool) or how much (float).
            total_tokens: tokens that are not padding.
            plain_sum: the losses are 0 where the weights are, and the weights are 1 elsewhere.
        """
        assert self._kit is not None
        assert self._step is not None
        if self._counts is None or self._added >= len(self._counts):
            raise ConfigError(
                "a loss was computed for backward outside of a window",
                why="its tokens are in no count.",
                fix="don't override get_batch_samples; call super().training_step once per micro-batch.",
            )
        # Directly on what the model returned: the operator can tell that its upstream gradient is one number.
        loss_sum = part.losses.sum() if plain_sum else weighted_losses(part, weights).sum()
        count = count_of(weights)
        router = self._router(part, loss_sum, count)
        loss = self._kit.accumulate_microbatch(
            loss_sum=loss_sum,
            effective_tokens=count,
            total_tokens=total_tokens,
            extra_terms={_ROUTER: router},
        )
        self._added += 1
        self._has_router = part.extra_loss is not None
        self.since_log.add_metrics(part, weights, count)
        self._step.append((loss, loss._version))
        return loss

    def _router(self, part: TokenLosses, loss_sum: Tensor, count: Tensor) -> LossTerm:
        assert self._counts is not None
        if part.extra_loss is None or self._counts[self._added] == 0:
            # A router loss over no token may be NaN, and 0 * NaN is NaN.
            return LossTerm(numerator=loss_sum * 0.0, denominator=count)
        extra = part.extra_loss
        # In half precision the product with a count would lose its last digits.
        extra = extra.to(torch.promote_types(extra.dtype, torch.float32))
        return LossTerm(numerator=extra * count, denominator=count)

    def check_step(self, returned: Tensor, names: tuple[str, str]) -> None:
        """After one micro-batch's backward: did it run on the loss that was handed out, and on nothing else?

        Args:
            returned: what ``Trainer.training_step`` returned, a view of the tensor it called backward on.
            names: who overrides ``compute_loss`` and ``training_step``, for messages.

        Raises:
            ConfigError: it did not.
        """
        assert self._step is not None
        compute_loss, training_step = names
        if len(self._step) != 1:
            raise ConfigError(
                f"{compute_loss} called super().compute_loss {len(self._step)} times in one training step",
                why="each call counts the micro-batch's tokens, and backward runs on one loss.",
                fix="call it once; for a loss of your own override token_losses instead of compute_loss (see "
                "token_normalised).",
            )
        ((loss, version),) = self._step
        if returned.data_ptr() != loss.data_ptr() or loss._version != version:
            raise ConfigError(
                f"backward ran on another loss than the exact one: {compute_loss} or {training_step} changed it",
                why="what it adds or multiplies is normalised by something else than the window's tokens.",
                fix="return the loss of super().compute_loss as it is; a loss of your own goes into token_losses, "
                "one of the whole micro-batch into TokenLosses(extra_loss=...).",
            )

    def close(self, *, keep_non_finite: bool) -> int:
        """All backwards of the window are done: reduce its sums over the ranks.

        Args:
            keep_non_finite: whether a window whose loss is NaN or infinite goes into what is logged.

        Returns:
            The window's tokens that are not padding, over all ranks.

        Raises:
            KitUsageError: a micro-batch is missing, or has other tokens than were counted.
            EmptyWindowError: an accelerator's window had no token (on the CPU :meth:`begin` has noticed).
        """
        assert self._kit is not None
        try:
            stats = self._kit.reduce_window()
            loss_sum, count = stats.global_loss_sum, stats.global_effective_tokens
        except EmptyWindowError as error:
            raise _no_tokens(error) from error
        self._counts = None
        self._kit.reset(discard=True)
        loss = RatioSum(loss_sum, count)
        if keep_non_finite or math.isfinite(loss_sum):
            for sums in (self.since_log, self.since_start):
                sums.loss = sums.loss + loss
                if self._has_router:
                    router = stats.extra[_ROUTER]
                    sums.router = router if sums.router is None else sums.router + router
        return int(stats.global_total_tokens)


def _no_tokens(error: EmptyWindowError) -> EmptyWindowError:
    return EmptyWindowError(
        error.what,
        why=error.why,
        fix="leave samples without a supervised token out of the dataset (labels all -100, often a prompt that "
        "fills max_length), or accumulate over more micro-batches.",
    )
