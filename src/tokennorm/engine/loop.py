"""The run around the step: windows in order, evaluations, checkpoints, and a line for each."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from tokennorm.engine.checkpoint import CheckpointStore
from tokennorm.engine.checkpoint_room import check_room
from tokennorm.engine.emptied import EmptiedWindows
from tokennorm.engine.engine import Engine
from tokennorm.engine.evaluate import EvalReport
from tokennorm.engine.garbage import GarbageCollection
from tokennorm.engine.objective import Batch
from tokennorm.engine.progress import ProgressPrinter
from tokennorm.engine.records import HeldOut, Waiting, log_step, metrics_to_sinks
from tokennorm.engine.run_folder import RunFolder
from tokennorm.engine.signals import RunStopped, StopRequest
from tokennorm.engine.sinks import check_sinks
from tokennorm.engine.throughput import StepCost, WindowWork
from tokennorm.errors import ConfigError, DataError

__all__ = ["LoopConfig", "TrainReport", "WindowSource", "train"]

# Steps: a collection takes milliseconds, and what piles up in a hundred steps is small.
_COLLECT_EVERY = 100


class WindowSource(Protocol):
    """Gives this rank's windows in order and knows its place among them.

    Every rank gets the same number of windows and, in each, of micro-batches (dummies where its data ran out).
    Iterating continues at the place that ``load_state_dict`` set.
    """

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        """Yield the windows that are left."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last window that was yielded (tensors and plain values)."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """How often a run reports, evaluates and saves."""

    eval_every: int = 0
    """Evaluate every so many steps; 0: only before the first and after the last."""
    save_every: int = 0
    """Save a checkpoint every so many steps; 0: only after the last."""
    keep_last: int = 2
    """Checkpoints to keep; older ones are deleted."""
    keep_best: bool = False
    """Save when an evaluation gives the lowest held-out loss so far, and keep that checkpoint besides the last."""
    log_every: int = 1
    """Print a line every so many steps (metrics.jsonl has every step)."""
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl; each needs its package."""
    project: str = "tokennorm"
    """The name that trackio and wandb gather runs under."""
    peak_tflops: float | None = None
    """Peak of one device in TFLOP/s, for MFU; by default the dense bf16 peak of a known GPU."""
    max_refused_windows: int = 16
    """End the run when the loss guard has emptied so many windows in a row because of NaN or infinity."""

    def __post_init__(self) -> None:
        check_sinks(self.sinks)
        if self.peak_tflops is not None and self.peak_tflops <= 0:
            raise ConfigError(f"loop.peak_tflops is {self.peak_tflops}", fix="give a positive number, or none")
        positive = ("keep_last", "log_every", "max_refused_windows")
        for name, least in (("eval_every", 0), ("save_every", 0), *((name, 1) for name in positive)):
            if getattr(self, name) < least:
                raise ConfigError(f"loop.{name} is {getattr(self, name)}", fix=f"give {least} or more")

    def saves(self, steps: int) -> int:
        """Return how many checkpoints so many steps save at most."""
        best = steps // self.eval_every if self.keep_best and self.eval_every else 0
        return (steps // self.save_every if self.save_every else 0) + best + 1


@dataclass(kw_only=True)
class TrainReport:
    """What a call of :func:`train` did.

    Attributes:
        before: evaluation before the first step; None without one, or when the run was resumed.
        after: evaluation after the last step.
        steps: optimizer steps of this call.
        effective_tokens: supervised tokens that it trained on, over all ranks.
        total_tokens: all tokens that the model read for that, without padding.
    """

    before: EvalReport | None = None
    after: EvalReport | None = None
    steps: int = 0
    effective_tokens: float = 0
    total_tokens: float = 0


def train(
    engine: Engine,
    windows: WindowSource,
    *,
    total_steps: int,
    config: LoopConfig | None = None,
    evaluate: Callable[[], EvalReport] | None = None,
    run: RunFolder | None = None,
    checkpoints: CheckpointStore | None = None,
    progress: ProgressPrinter | None = None,
    work: WindowWork | None = None,
) -> TrainReport:
    """Train until ``total_steps`` optimizer steps are done or the windows run out.

    SIGTERM or SIGINT on any rank ends the run on all of them, after the step that is being made and with a
    checkpoint, if there is a store for it.

    Args:
        engine: at step 0, or where a checkpoint left it.
        windows: this rank's windows.
        total_steps: optimizer steps of the whole run, those before a resume included.
        config: intervals.
        evaluate: one evaluation on all ranks; called before the first step and after the last.
        run: where ``metrics.jsonl`` is written.
        checkpoints: where states are saved.
        progress: prints the lines.
        work: counts a window of a model that is no causal LM, for MFU.

    Raises:
        DataError: the windows ran out before any optimizer step of a run that had not begun.
        NonFiniteError: the loss guard empties one window after the other.
        RunStopped: a signal asked for the end; it says where the run goes on.
    """
    config = config or LoopConfig()
    progress = progress or ProgressPrinter(total_steps, enabled=False)
    held_out = HeldOut(engine, evaluate, run, progress)
    if checkpoints is not None:
        checkpoints.keep_best = checkpoints.keep_best or config.keep_best
    start = engine.step
    summary = TrainReport()

    # A run that was stopped by a signal saved itself before the evaluation that was due.
    unmeasured = (
        start > 0 and evaluate is not None and checkpoints is not None and not checkpoints.was_evaluated(start)
    )

    def save() -> Path | None:
        if checkpoints is None:
            return None
        measured = held_out.measured(engine.step)
        if engine.step == start and not (unmeasured and measured):
            return checkpoints.current
        return checkpoints.save(
            engine,
            loader_state=windows.state_dict(),
            held_out_loss=held_out.loss_after(engine.step),
            evaluated=measured,
            records=None if run is None else run.records,
        )

    def end_if_asked(number: int) -> None:
        if number:
            saved = save()
            raise RunStopped(
                f"stopped by {signal.Signals(number).name} after step {engine.step}/{total_steps}; "
                + (f"the checkpoint is {saved}" if saved else "nothing was saved"),
                signal=number,
                checkpoint=saved,
                folder=None if run is None else run.path,
            )

    def evaluate_and_save(*, again: bool = False) -> None:
        """Do what is due after a step."""
        if config.eval_every and engine.step % config.eval_every == 0:
            held_out()
            end_if_asked(stop.agreed())
        due = again or (config.save_every and engine.step % config.save_every == 0)
        if checkpoints is not None and (due or checkpoints.improves(held_out.loss_after(engine.step))):
            save()
        garbage.after(engine.step)
        progress.pause()

    cost = StepCost(
        engine.model, engine.device, peak_tflops=config.peak_tflops, ranks=engine.dp_world_size, work=work
    )
    with (
        metrics_to_sinks(run, config, start),
        GarbageCollection(_COLLECT_EVERY) as garbage,
        _signals(engine, total_steps, checkpoints, progress) as stop,
    ):
        if start == 0:
            summary.before = held_out()
            end_if_asked(stop.agreed())
        elif unmeasured and start < total_steps and config.eval_every and start % config.eval_every == 0:
            evaluate_and_save(again=True)
        progress.pause()
        reason: str | None = None
        emptied = EmptiedWindows(engine, config.max_refused_windows)
        waiting = Waiting(windows if start < total_steps else ())
        for window in waiting:
            report = engine.train_step(window)
            asked, memory = stop.agree(cost.memory_bytes())
            log_step(report, window, cost, run, progress, config, total_steps, waiting.seconds, memory)
            reason = report.skipped or reason
            if report.skipped is None:
                summary.steps += 1
                summary.effective_tokens += report.effective_tokens
                summary.total_tokens += report.total_tokens
            end_if_asked(asked)
            emptied.add(report)
            if report.skipped is not None:
                continue
            if engine.step == total_steps:
                break
            if checkpoints is not None and engine.step == start + 1:
                check_room(checkpoints, engine, saves=config.saves(total_steps - start), say=progress.say)
            evaluate_and_save()
        if engine.step == 0:
            raise _nothing_trained(reason)
        summary.after = held_out(again=checkpoints is not None and 0 < start == engine.step and not unmeasured)
        save()
    return summary


def _nothing_trained(reason: str | None) -> DataError:
    """What to say of a run whose windows were all skipped, the last for this reason."""
    if reason in (None, "empty window"):
        return DataError(
            "no window of the data had a supervised token",
            why="nothing was trained",
            fix="check that the chats have assistant turns, and that they survive truncation",
        )
    return DataError(
        f"every window was skipped, the last because of: {reason}",
        why="nothing was trained",
        fix="look at metrics.jsonl and, with a loss guard, at the refused micro-batches in the run folder",
    )


@contextmanager
def _signals(
    engine: Engine, total_steps: int, checkpoints: CheckpointStore | None, progress: ProgressPrinter
) -> Iterator[StopRequest]:
    """Yield what knows of a signal; an interrupt that ends the run at once says what was saved."""
    with StopRequest(device=engine.device, group=engine.dp_group, announce=progress.enabled) as stop:
        try:
            yield stop
        except RunStopped:
            raise
        except KeyboardInterrupt:
            latest = None if checkpoints is None else checkpoints.current
            saved = f"the last checkpoint is {latest}" if latest else "nothing was saved"
            raise KeyboardInterrupt(f"interrupted at step {engine.step}/{total_steps}; {saved}") from None
