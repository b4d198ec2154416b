"""What a window came to, over all ranks: :class:`TokenLossStats`, and the faults that only the sums show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tokennorm.errors import EmptyWindowError, KitUsageError, TokenNormError
from tokennorm.kit.counts import LARGEST_EXACT_COUNT
from tokennorm.kit.window import TERM_WIDTH, Slot, TermSlot, agreed
from tokennorm.loss.label_checks import raise_pending_label_errors
from tokennorm.loss.terms import RatioSum

__all__ = ["EmptyWindow", "TokenLossStats", "WindowFacts"]

EmptyWindow = Literal["raise", "skip"]

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class WindowFacts:
    """What a rank knows on the host about a window that it has reduced.

    Attributes:
        ranks: size of the group over which counts were summed.
        mode: how the window is normalised ("deferred" or "counted"; "announced" for begin_window's message).
        empty_window: what to do when no rank had a supervised token.
        weighted: the effective tokens are sums of token weights (floats), not a number of tokens.
        backward_divisor: what the user gave, or None for the kit's own.
        terms: names of the extra terms, in the order of their slots.
    """

    ranks: int
    mode: str
    empty_window: EmptyWindow
    weighted: bool
    backward_divisor: float | None
    terms: tuple[str, ...]


class TokenLossStats:
    """The reduced values of one window, the same on every rank. Made by ``TokenNormedLossKit.reduce_window``.

    The values stay on the device, in one float64 vector, until the first of them is read; that reading copies
    all of them at once (the only host synchronisation, cached), and raises what the sums show to be wrong. On
    the CPU the kit reads them in ``reduce_window``, so faults are raised there.
    """

    def __init__(self, message: Tensor, facts: WindowFacts) -> None:
        self._message = message
        self._facts = facts
        self._values: list[float] | None = None
        self._error: TokenNormError | None = None

    @property
    def gradient_scale_tensor(self) -> Tensor:
        """:attr:`gradient_scale` as a 0-d float64 tensor on the device, without a host synchronisation.

        0 where the window is empty, so nothing becomes NaN before somebody reads the values.
        """
        return self._message[Slot.GRADIENT_SCALE]

    @property
    def global_loss_sum(self) -> float:
        """Sum of the per-token losses of the window, over all ranks (extra terms not included)."""
        return self._read()[Slot.LOSS_SUM]

    @property
    def global_effective_tokens(self) -> int | float:
        """Supervised tokens of the window, over all ranks; a float for sums of token weights."""
        value = self._read()[Slot.EFFECTIVE]
        return int(value) if value.is_integer() and not self._facts.weighted else value

    @property
    def global_total_tokens(self) -> int | float:
        """Tokens that are not padding, over all ranks."""
        value = self._read()[Slot.TOTAL]
        return int(value) if value.is_integer() else value

    @property
    def backward_divisor(self) -> float:
        """What the losses were divided by before backward (deferred windows; 1 in counted ones)."""
        return self._read()[Slot.BACKWARD_DIVISOR]

    @property
    def gradient_scale(self) -> float:
        """What every gradient has to be multiplied by: ``backward_divisor * averaging_factor / tokens``.

        1 in counted windows (nothing is left to do), 0 in empty ones.
        """
        return self._read()[Slot.GRADIENT_SCALE]

    @property
    def mean_loss(self) -> float | None:
        """``global_loss_sum / global_effective_tokens``: the loss to log. None when the window is empty."""
        values = self._read()
        return None if self.is_empty else values[Slot.LOSS_SUM] / values[Slot.EFFECTIVE]

    @property
    def extra(self) -> dict[str, RatioSum]:
        """Extra term -> global (num, den) pair, without the term's weight; log its ``.mean``."""
        values = self._read()
        pairs: dict[str, RatioSum] = {}
        for index, name in enumerate(self._facts.terms):
            start = Slot.HEADER_END + TERM_WIDTH * index
            pairs[name] = RatioSum(values[start + TermSlot.NUM], values[start + TermSlot.DEN])
        return pairs

    @property
    def is_empty(self) -> bool:
        """No rank had a supervised token (only seen with ``empty_window="skip"``: otherwise it is an error)."""
        return self._read()[Slot.EFFECTIVE] == 0

    @property
    def skipped(self) -> bool:
        """Whether the optimizer step of this window must not be taken, on any rank."""
        return self.is_empty

    def __repr__(self) -> str:
        """The values if somebody has read them: a repr that synchronises would be a trap."""
        if self._values is None:
            return "TokenLossStats(<not read yet>)"
        return (
            f"TokenLossStats(global_loss_sum={self.global_loss_sum!r}, "
            f"global_effective_tokens={self.global_effective_tokens!r}, "
            f"global_total_tokens={self.global_total_tokens!r}, backward_divisor={self.backward_divisor!r}, "
            f"gradient_scale={self.gradient_scale!r}, extra={self.extra!r})"
        )

    def _read(self) -> list[float]:
        """The vector as Python numbers, once; every reading of a faulty window raises again.

        Raises:
            KitUsageError: ranks disagree, or counts contradict each other.
            EmptyWindowError: no supervised token, with ``empty_window="raise"``.
            LabelError: this rank's loss had a label outside the vocabulary.
        """
        if self._values is None and self._error is None:
            values = self._message.tolist()
            try:
                # Labels that an accelerator found to be outside the vocabulary wait for this moment.
                raise_pending_label_errors()
                _check(values, self._facts)
                self._values = values
            except TokenNormError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values


def _check(values: list[float], facts: WindowFacts) -> None:
    _check_ranks_agree(values, facts)
    _check_flags(values)
    effective, total = values[Slot.EFFECTIVE], values[Slot.TOTAL]
    for name, count in (("supervised", effective), ("total", total)):
        if not 0 <= count <= LARGEST_EXACT_COUNT:
            raise KitUsageError(
                f"the window holds {count:.17g} {name} tokens over {facts.ranks} ranks, outside 0 ... 2**53",
                why="beyond that a count is not exact in float64, and neither would the gradient be.",
            )
    if effective == 0:
        _check_empty(values, facts)
        return
    scale = values[Slot.GRADIENT_SCALE]
    if not math.isfinite(scale) or not 0 < scale <= _LARGEST_FLOAT32:
        raise KitUsageError(
            f"the gradient scale is {scale} (backward divisor {values[Slot.BACKWARD_DIVISOR]}, "
            f"{effective} supervised tokens over {facts.ranks} ranks)",
            why="no gradient survives this factor, and a GradScaler does not see what happens after unscale_.",
            fix="leave `backward_divisor` to the kit, and check the scale of the token weights.",
        )


def _check_ranks_agree(values: list[float], facts: WindowFacts) -> None:
    setups = values[Slot.SETUP_AGREEMENT]
    if setups != facts.ranks or not agreed(values, Slot.SETUP_AGREEMENT):
        raise KitUsageError(
            f"the {facts.ranks} ranks of this window disagree about its setup; this rank: mode {facts.mode}, "
            f"extra terms {list(facts.terms)}, empty_window={facts.empty_window!r}, plus its dp_world_size and "
            "averaging_factor",
            why="the sums of different things were added up.",
            fix="build the kit with the same arguments on every rank. Where a rank may see micro-batches without "
            'an extra term, declare the names: TokenNormedLossKit(..., extra_terms=("router",)).',
        )
    given = values[Slot.DIVISOR_AGREEMENT]
    if given not in (0, facts.ranks):
        raise KitUsageError(
            f"{given:.0f} of {facts.ranks} ranks gave a `backward_divisor` in this window, the others left it "
            "to the kit",
            why="gradients are averaged over ranks before they are rescaled, so all ranks divide by one number.",
            fix="give the same divisor on every rank (it may not depend on the rank's own tokens), or on none.",
        )
    if not agreed(values, Slot.DIVISOR_AGREEMENT):
        raise KitUsageError(
            f"the ranks divided by different numbers: this rank by {facts.backward_divisor}",
            why="gradients are averaged over ranks before they are rescaled, so all ranks divide by one number.",
            fix="derive `backward_divisor` from nothing that differs between ranks, or leave it out.",
        )
    for index, name in enumerate(facts.terms):
        if not agreed(values, Slot.HEADER_END + TERM_WIDTH * index + TermSlot.WEIGHT_AGREEMENT):
            raise KitUsageError(
                f"the ranks gave the extra term {name!r} different weights in this window",
                why="the weight is one factor of the objective, the same for every token.",
                fix="derive the weight from the step, never from a rank's own data.",
            )


# flag -> (what happened, what to do); the count of offending micro-batches (or ranks) goes in front.
_FLAGS: dict[Slot, tuple[str, str]] = {
    Slot.BAD_COUNT: (
        "counts given as tensors were negative, NaN or above 2**53",
        "count the supervised tokens from exactly the labels that the loss sees.",
    ),
    Slot.EFFECTIVE_ABOVE_TOTAL: (
        "micro-batches had more effective tokens than total tokens",
        "total_tokens counts what is not padding; a weighted window passes effective_tokens as a float.",
    ),
    Slot.DENOMINATOR_DIFFERS: (
        "extra terms of a deferred window were counted in something else than the micro-batch's effective tokens",
        "use a counted window: kit.begin_window({'loss': n, ...}) before the first micro-batch.",
    ),
    Slot.ANNOUNCED_DIFFERS: (
        "denominators accumulated on a rank differ from what it announced in begin_window",
        "announce the sums of exactly the micro-batches that follow, and skip none of them.",
    ),
    Slot.UNUSED_EXTRA_LOSS: (
        "micro-batches had a nonzero `outputs.extra_loss` (e.g. a router loss) that nobody accumulated",
        "pass extra_terms={'router': LossTerm(numerator=outputs.extra_loss * n, denominator=n)} with "
        "n = effective_tokens, or set the model's coefficient to 0.",
    ),
}


def _check_flags(values: list[float]) -> None:
    for slot, (what, fix) in _FLAGS.items():
        if values[slot] != 0:
            raise KitUsageError(
                f"in this window, {values[slot]:.0f} times over all ranks: {what}",
                why="the gradient of this window is not that of the objective.",
                fix=fix,
            )


def _check_empty(values: list[float], facts: WindowFacts) -> None:
    loss_sum, total = values[Slot.LOSS_SUM], values[Slot.TOTAL]
    if loss_sum != 0 and not math.isnan(loss_sum):
        raise KitUsageError(
            f"the window has no supervised token but a loss of {loss_sum}",
            why="the loss and the counts were taken from different labels.",
            fix="count effective_tokens from exactly the labels that the loss sees.",
        )
    if facts.empty_window == "raise":
        tokens = f" ({total:.0f} tokens in all)" if total else ""
        raise EmptyWindowError(
            f"no token of this window is supervised, on any of {facts.ranks} ranks" + tokens,
            why="the mean over no tokens does not exist, and a step on it would move weights by momentum alone.",
            fix="check the labels (all -100?); where such windows are expected, build the kit with "
            'empty_window="skip" and take no optimizer step when stats.skipped is true.',
        )
