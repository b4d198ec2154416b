"""Cyclic garbage of a training is collected at chosen steps, and what was there before is not walked through."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from tests.engine.toy import ToyWindows, build_engine
from tokennorm.engine import train


class Cycle:
    """Holds itself, and a tensor."""

    def __init__(self) -> None:
        self.tensor, self.own = torch.zeros(4), self


def test_garbage_of_a_long_run_does_not_pile_up() -> None:
    engine = build_engine(total_steps=250)
    objective, alive, most, frozen = engine.objective, weakref.WeakSet(), 0, []

    def littering(model: Any, batch: Any) -> Any:
        nonlocal most
        alive.add(Cycle())
        most = max(most, len(alive))
        if not frozen:
            # Once: it walks through all of them.
            frozen.append(gc.get_freeze_count())
        return objective(model, batch)

    engine.objective = littering
    windows = ToyWindows(repeat=63)
    per_step = sum(map(len, windows.windows)) / len(windows.windows)
    # Python's own collections would hide whether ours do anything.
    gc.disable()
    try:
        train(engine, windows, total_steps=250)
    finally:
        gc.enable()
    assert 0 < most <= 100 * per_step + 10
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


def test_who_froze_objects_himself_keeps_them_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        train(build_engine(), ToyWindows(), total_steps=2)
        # Frozen objects still end when nobody refers to them.
        assert gc.get_freeze_count() > 0.9 * count
    finally:
        gc.unfreeze()
