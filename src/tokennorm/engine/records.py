"""What a run writes down of each window and each evaluation: on disk, in the sinks and on the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tokennorm.engine.distributed import all_ranks_or_none
from tokennorm.engine.engine import Engine, StepReport
from tokennorm.engine.evaluate import EvalReport
from tokennorm.engine.objective import Batch
from tokennorm.engine.progress import ProgressPrinter
from tokennorm.engine.run_folder import RunFolder
from tokennorm.engine.sinks import GuardedSinks, open_sinks
from tokennorm.engine.terminal import warn_line
from tokennorm.engine.throughput import StepCost

if TYPE_CHECKING:
    from tokennorm.engine.loop import LoopConfig

__all__ = ["HeldOut", "Waiting", "log_step", "metrics_to_sinks"]


@contextmanager
def metrics_to_sinks(run: RunFolder | None, config: LoopConfig, first_step: int) -> Iterator[None]:
    """Give the run's records to the sinks that were asked for, as long as this lasts; every rank enters it.

    Raises:
        ConfigError: on rank 0, DistributedError on the others: a sink of a run that begins can't be started.
    """
    if run is None or not config.sinks:
        yield
        return

    def opened() -> GuardedSinks | None:
        if not run.runtime.is_main:
            return None
        where = {"folder": run.path, "project": config.project}
        return open_sinks(config.sinks, **where, say=warn_line, first_step=first_step)

    run.sinks = all_ranks_or_none(opened, run.runtime)
    try:
        yield
    finally:
        if run.sinks is not None:
            run.sinks.close()
            run.sinks = None


class Waiting:
    """Hands windows on and measures how long the loop waited for the last one: ``seconds``."""

    def __init__(self, windows: Iterable[Sequence[Batch]]) -> None:
        self._windows, self.seconds = windows, 0.0

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        """Yield the windows."""
        windows = iter(self._windows)
        while True:
            start = time.monotonic()
            window = next(windows, None)
            self.seconds = time.monotonic() - start
            if window is None:
                return
            yield window


class HeldOut:
    """Evaluates, prints and logs; None without an evaluation."""

    def __init__(
        self,
        engine: Engine,
        evaluate: Callable[[], EvalReport] | None,
        run: RunFolder | None,
        progress: ProgressPrinter,
    ) -> None:
        self._engine, self._evaluate, self._run, self._progress = engine, evaluate, run, progress
        self._last: tuple[int, float | None] = (-1, None)

    def measured(self, step: int) -> bool:
        """Whether the weights after ``step`` were the last to be evaluated."""
        return self._last[0] == step

    def loss_after(self, step: int) -> float | None:
        """Return the loss of the weights after ``step``, if they were the last to be evaluated."""
        return self._last[1] if self.measured(step) else None

    def __call__(self, *, again: bool = False) -> EvalReport | None:
        """Evaluate on all ranks; ``again``: the records have it already."""
        if self._evaluate is None:
            return None
        report = self._evaluate()
        self._last = (self._engine.step, report.loss)
        loss = "no supervised token" if report.loss is None else f"loss {report.loss:.4f}"
        self._progress.say(
            f"held-out after step {self._engine.step}  {loss}  "
            f"tok {report.effective_tokens:,.0f}/{report.total_tokens:,}{self._progress.extras(report.metrics)}"
        )
        if self._run is not None and not again:
            self._run.log(
                {
                    "step": self._engine.step,
                    "eval_loss": report.loss,
                    "eval_effective_tokens": report.effective_tokens,
                    "eval_total_tokens": report.total_tokens,
                    **{f"eval_{name}": value for name, value in report.metrics.items()},
                }
            )
        return report


def log_step(
    report: StepReport,
    window: Sequence[Batch],
    cost: StepCost,
    run: RunFolder | None,
    progress: ProgressPrinter,
    config: LoopConfig,
    total_steps: int,
    data_wait: float,
    memory_bytes: int,
) -> None:
    """Write and print what a window came to; ``data_wait`` in seconds, ``memory_bytes`` of the fullest rank."""
    seconds = progress.tick(int(report.total_tokens))
    costs = cost.measure(
        window,
        total_tokens=report.total_tokens,
        effective_tokens=report.effective_tokens,
        seconds=seconds,
        memory_bytes=memory_bytes,
    )
    if run is not None:
        run.log(
            {
                "step": report.step,
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "lr": report.lr,
                "effective_tokens": report.effective_tokens,
                "total_tokens": report.total_tokens,
                "seconds": round(seconds, 4),
                "data_wait": round(data_wait, 6),
                **costs,
                **report.metrics,
                **({} if report.skipped is None else {"skipped": report.skipped}),
                **({} if not report.refused else {"refused": [one.record() for one in report.refused]}),
            }
        )
    for one in report.refused:
        progress.say(f"step {one.verdict.step}/{total_steps}  {one}")
    if report.skipped is not None:
        progress.say(f"step {report.step}/{total_steps}  nothing moved: {report.skipped}")
    elif report.step % config.log_every == 0 or report.step in (1, total_steps):
        assert report.loss is not None
        progress.step(
            step=report.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            effective_tokens=round(report.effective_tokens),
            total_tokens=int(report.total_tokens),
            metrics=report.metrics,
            mfu=costs.get("mfu"),
        )
