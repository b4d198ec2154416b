"""Mistakes that scale the whole gradient, by numbers that differ from layout to layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FACTORS", "Factor", "WindowSize"]

# Gradients of this relative difference in norm were clipped to the same norm.
_SAME_NORM = 1e-4


@dataclass(frozen=True, kw_only=True)
class WindowSize:
    """R, M, the configured M, and D of one window."""

    ranks: int
    micro_batches: int
    configured: int
    due: float


Base = Callable[[WindowSize], float]


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A family of scales.

    Args:
        names: the mistake, or nothing if it is none.
        base: the scale of one window, up to a constant.
        free: "" if the constant is 1; "constant" if one constant is fitted to all windows; "power of two" if each
            window may have its own power of two; "clip" if the scaled gradient is clipped to one fitted norm.
    """

    names: tuple[str, ...]
    base: Base
    free: str = ""

    @property
    def cost(self) -> float:
        """How much freedom it has: an explanation without any is preferred."""
        return {"": 0.0, "constant": 0.5, "clip": 0.6, "power of two": 0.75}[self.free]

    def scales(self, sizes: Sequence[WindowSize], pp: Tensor, po: Tensor, oo: Tensor) -> Tensor:
        """Scales ``[O, H]`` for O observations and H predictions.

        Args:
            sizes: of the O windows.
            pp: ``[O, H]``, squared norms of the predictions.
            po: ``[O, H]``, their products with the observed gradients.
            oo: ``[O, 1]``, squared norms of the observed gradients.
        """
        base = torch.tensor([[self.base(size)] for size in sizes], dtype=torch.float64)
        if self.free == "":
            return base.expand_as(pp)
        if self.free == "constant":
            # least squares of the relative residuals
            above, below = (base * po / oo).sum(0), (base**2 * pp / oo).sum(0)
            return base * (above / below.clamp_min(1e-300))
        if self.free == "power of two":
            wanted = (po / pp.clamp_min(1e-300) / base).clamp_min(1e-300)
            return base * torch.exp2(torch.round(torch.log2(wanted)))
        return self._clipped(base, pp, oo)

    def _clipped(self, base: Tensor, pp: Tensor, oo: Tensor) -> Tensor:
        """``min(1, c base / |p|)`` with the largest norm that occurs; of use if it occurs twice."""
        norms = oo.sqrt() / base
        largest = norms.max()
        if int((norms > (1 - _SAME_NORM) * largest).sum()) < 2:
            return torch.full_like(pp, math.nan)
        return (largest * base / pp.clamp_min(1e-300).sqrt()).clamp_max(1.0)


def _named(name: str, base: Base, inverse: Base) -> list[Factor]:
    return [
        Factor(names=(f"factor_{name}_too_much",), base=base),
        Factor(names=(f"factor_{name}_too_little",), base=inverse),
    ]


def _power(ranks: int, micro_batches: int, due: int) -> Base:
    return lambda size: size.ranks**ranks * size.micro_batches**micro_batches * size.due**due


FACTORS: tuple[Factor, ...] = (
    Factor(names=(), base=_power(0, 0, 0)),
    *_named("ranks", _power(1, 0, 0), _power(-1, 0, 0)),
    *_named("accumulation", _power(0, 1, 0), _power(0, -1, 0)),
    *_named("ranks_and_accumulation", _power(1, 1, 0), _power(-1, -1, 0)),
    Factor(names=("fixed_division",), base=lambda size: size.micro_batches / size.configured),
    Factor(names=("fixed_division",), base=_power(0, 1, 0), free="constant"),
    Factor(names=("constant_factor",), base=_power(0, 0, 0), free="constant"),
    *(
        Factor(names=("rescaled_twice",), base=_power(r, m, -1), free=free)
        for r, m in ((0, 0), (1, 0), (1, 1), (0, 1))
        for free in ("constant", "power of two")
    ),
    *(
        Factor(names=("not_rescaled",), base=_power(-r, -m, 1), free=free)
        for r, m in ((0, 0), (1, 0), (1, 1), (0, 1))
        for free in ("constant", "power of two")
    ),
    # A loop that clips with code of its own: no mistake.
    Factor(names=(), base=_power(0, 0, 0), free="clip"),
    *(
        Factor(names=("clipped_before_rescaling",), base=_power(r, 0, -1), free="clip") for r in (0, 1)
    ),
)  # fmt: skip
