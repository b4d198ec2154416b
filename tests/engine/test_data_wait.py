"""The time that a step waited for its data is measured and logged, on a clock that the test moves."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.toy import ToyWindows, build_engine
from tokennorm.engine import RunFolder, train

WAITS = [0.25, 2.0, 0.0, 0.5]
STEP_SECONDS = 8.0


@pytest.mark.parametrize("counts_the_step_too", [False, True])
def test_each_step_says_how_long_it_waited_for_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_the_step_too: bool
) -> None:
    now = 100.0

    class SlowWindows(ToyWindows):
        def __iter__(self):
            nonlocal now
            for wait, window in zip(WAITS, super().__iter__(), strict=True):
                now += wait
                yield window

    engine = build_engine()
    real = engine.train_step

    def long_step(window):
        nonlocal now
        now += STEP_SECONDS
        return real(window)

    monkeypatch.setattr(engine, "train_step", long_step)
    clock = SimpleNamespace(monotonic=lambda: now)
    if counts_the_step_too:
        # The planted mistake: a clock that is read once per step.
        readings: list[float] = []
        clock.monotonic = lambda: readings.append(now) or readings[max(0, len(readings) - 2)]
    monkeypatch.setattr("tokennorm.engine.records.time", clock)
    train(engine, SlowWindows(), total_steps=4, run=RunFolder(tmp_path / "run"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert ([line["data_wait"] for line in lines] == WAITS) != counts_the_step_too
