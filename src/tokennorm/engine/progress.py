"""The terminal line of a training step; plain text, so that it reads the same in a log file."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from tokennorm.engine.terminal import print_line

__all__ = ["ProgressPrinter", "format_count", "format_duration", "format_step_line"]


def format_duration(seconds: float) -> str:
    """Return a short duration: ``45s``, ``6m``, ``2h05m``, ``3d04h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    # Rounded to the minute first: 59 m 59 s is an hour.
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes}m"
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(minutes / 60)
    return f"{hours // 24}d{hours % 24:02d}h"


def format_count(count: float) -> str:
    """Return a number with three digits or so: ``873``, ``41.2k``, ``1.3M``."""
    for limit, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if count < limit:
            return f"{count / divisor:.0f}" if not unit else f"{count / divisor:.1f}{unit}"
    return f"{count / 1e9:.1f}G"


def format_step_line(
    *,
    step: int,
    total_steps: int,
    loss: float,
    grad_norm: float | None,
    lr: float,
    effective_tokens: int,
    total_tokens: int,
    tokens_per_second: float | None = None,
    eta_seconds: float | None = None,
    extras: str = "",
    mfu: float | None = None,
) -> str:
    """Return one step's line; ``tok`` is supervised/total tokens of the window, ``tok/s`` counts the total."""
    parts = [f"step {step}/{total_steps}", f"loss {loss:.4f}{extras}"]
    if grad_norm is not None:
        small = 0 < grad_norm < 0.095
        parts.append(f"grad {grad_norm:.1e}" if small else f"grad {grad_norm:.2f}")
    parts.append(f"lr {lr:.1e}")
    parts.append(f"tok {effective_tokens:,}/{total_tokens:,}")
    if tokens_per_second is not None and math.isfinite(tokens_per_second):
        parts.append(f"{format_count(tokens_per_second)} tok/s")
    if mfu is not None:
        parts.append(f"mfu {100 * mfu:.0f}%")
    if eta_seconds is not None:
        parts.append(f"eta {format_duration(eta_seconds)}")
    return "  ".join(parts)


class ProgressPrinter:
    """Prints the lines of one run on the rank that prints, and keeps the time.

    Args:
        total_steps: optimizer steps of the whole run.
        enabled: False on every rank but the first.
        stream: where lines go; standard output by default.
        history: steps whose durations give the rate and the remaining time.
        shown: metrics of the objective that stand in the line, by name.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        history: int = 20,
        shown: Sequence[str] = (),
    ) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self.shown = tuple(shown)
        self._stream = stream
        self._recent: deque[tuple[float, int]] = deque(maxlen=history)
        self._last = time.monotonic()
        self._gone = False

    def pause(self) -> None:
        """Leave the time since the last step out of the rate: call after an evaluation or a checkpoint."""
        self._last = time.monotonic()

    def tick(self, total_tokens: int) -> float:
        """Count one finished window; return its duration in seconds."""
        now = time.monotonic()
        duration, self._last = now - self._last, now
        self._recent.append((duration, total_tokens))
        return duration

    @property
    def tokens_per_second(self) -> float | None:
        """Total tokens per second over the recent windows, or None before the first."""
        seconds = sum(duration for duration, _ in self._recent)
        return sum(tokens for _, tokens in self._recent) / seconds if seconds > 0 else None

    def extras(self, metrics: Mapping[str, float | None]) -> str:
        """The metrics that the line shows, two blanks before each; those without a value are left out."""
        values = {name: metrics.get(name) for name in self.shown}
        return "".join(f"  {name} {value:.3f}" for name, value in values.items() if value is not None)

    def step(
        self,
        *,
        step: int,
        loss: float,
        grad_norm: float | None,
        lr: float,
        effective_tokens: int,
        total_tokens: int,
        metrics: Mapping[str, float | None] | None = None,
        mfu: float | None = None,
    ) -> None:
        """Print the line of one step."""
        seconds = [duration for duration, _ in self._recent]
        mean = sum(seconds) / len(seconds) if seconds else None
        self.say(
            format_step_line(
                step=step,
                total_steps=self.total_steps,
                loss=loss,
                extras=self.extras(metrics or {}),
                grad_norm=grad_norm,
                lr=lr,
                effective_tokens=effective_tokens,
                total_tokens=total_tokens,
                tokens_per_second=self.tokens_per_second,
                mfu=mfu,
                eta_seconds=None if mean is None else mean * (self.total_steps - step),
            )
        )

    def say(self, text: str) -> None:
        """Print a line of any other kind. Where none can be printed any more, the run goes on without."""
        if self.enabled and not self._gone:
            # Looked up at each call, so that a test or a notebook that replaces sys.stdout sees the lines.
            self._gone = not print_line(text, self._stream or sys.stdout)
