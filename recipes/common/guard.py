"""The option ``guard`` of the recipes: broken and exploding micro-batches stay out of the training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokennorm.engine import Runtime, config_to_dict
from tokennorm.kit import TokenNormedLossKit
from tokennorm.recipes.common.require import require

__all__ = ["EmptyWindow", "GuardConfig", "build_kit", "guard_identity"]

EmptyWindow = Literal["raise", "skip"]


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Keep broken and exploding micro-batches out of the training; docs/exactness.md says how."""

    enabled: bool = False
    """Refuse, on all ranks together, micro-batches whose loss is NaN, infinite or a spike."""
    spike_multiplier: float = 5.0
    """A loss per token above this many times the recent median is a spike; inf: only NaN and infinity count."""
    window_size: int = 256
    """Micro-batches of a rank that the median is taken over."""
    min_history: int = 64
    """Micro-batches that must be there before any is called a spike."""
    files: int = 5
    """Refused micro-batches of a rank that are written to the run folder, with their text."""

    def __post_init__(self) -> None:
        multiplier = self.spike_multiplier
        require(multiplier > 1, "guard.spike_multiplier", multiplier, "a number above 1")
        least, most = self.min_history, self.window_size
        require(1 <= least <= most, "guard.min_history", least, f"1 to guard.window_size ({most})")
        require(self.files >= 0, "guard.files", self.files, "0 or more")


def build_kit(guard: GuardConfig, runtime: Runtime, *, empty_window: EmptyWindow) -> TokenNormedLossKit:
    """The accounting of a run, with the guard that it is configured for."""
    kit = TokenNormedLossKit(
        device=runtime.device,
        dp_world_size=runtime.world_size,
        dp_group=runtime.group,
        empty_window=empty_window,
    )
    if guard.enabled:
        kit.build_loss_guard(
            spike_multiplier=guard.spike_multiplier,
            window_size=guard.window_size,
            min_history=guard.min_history,
        )
    return kit


def guard_identity(guard: GuardConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint must have in common with a run because of its guard, and ``layout``: what may differ.

    The guard judges micro-batches: cut otherwise, it would judge other ones. So with one the cut is part of what
    must agree. Without one the guard is left out, and a checkpoint from before there was one still fits.
    """
    if not guard.enabled:
        return {"layout": dict(layout)}
    settings = {name: value for name, value in config_to_dict(guard).items() if name != "files"}
    return {"guard": {**settings, **layout}}
