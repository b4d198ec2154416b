"""Progress of long data work: a bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tokennorm.data.encoding import Progress

__all__ = ["terminal_progress"]


@contextmanager
def terminal_progress(description: str, *, enabled: bool = True) -> Iterator[Progress | None]:
    """A callback for ``progress=`` that draws a bar on standard error; None where there is no terminal or no rich.

    Args:
        description: text in front of the bar.
        enabled: False for all ranks but one.
    """
    if not enabled or not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bars
    except ImportError:
        yield None
        return
    with Bars(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        yield update
