"""Windows prepared ahead in a thread, so that the step does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tokennorm.errors import ConfigError

__all__ = ["Prefetch", "WindowsWithPlace"]

_PATIENCE_SECONDS = 0.1


class WindowsWithPlace(Protocol):
    """Windows in order, and the place after the last one that was yielded."""

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """Yield the windows that are left."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""
        ...


class Prefetch:
    """The same windows as ``windows``, up to ``depth`` of them prepared ahead in a thread.

    ``state_dict`` is the place after the last window that was *taken*: windows that lie prepared are made again
    after a resume. An error of ``windows`` is raised where its window would have come. The thread ends with the
    iteration, also when that is given up half way.

    Args:
        windows: a source of windows with a place.
        depth: windows that lie ready at most, 1 or more.

    Raises:
        ConfigError: ``depth`` below 1.
    """

    def __init__(self, windows: WindowsWithPlace, depth: int = 2) -> None:
        if depth < 1:
            raise ConfigError(f"prefetch of {depth} windows", fix="give 1 or more, or leave it out")
        self.windows, self.depth = windows, depth
        self._state = windows.state_dict()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        ready: queue.Queue[tuple[str, Any, dict[str, Any]]] = queue.Queue(self.depth)
        stopped = threading.Event()
        self.windows.load_state_dict(self._state)
        thread = threading.Thread(target=self._prepare, args=(ready, stopped), name="prefetch", daemon=True)
        thread.start()
        try:
            while True:
                kind, value, state = ready.get()
                if kind == "error":
                    raise value
                if kind == "end":
                    return
                self._state = state
                yield value
        finally:
            stopped.set()
            thread.join()

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last window that was taken."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place; holds from the next iteration on."""
        self._state = dict(state)

    def _prepare(self, ready: queue.Queue[tuple[str, Any, dict[str, Any]]], stopped: threading.Event) -> None:
        try:
            for window in self.windows:
                if not _put(ready, ("window", window, self.windows.state_dict()), stopped):
                    return
            _put(ready, ("end", None, {}), stopped)
        except BaseException as error:  # whatever it is, the training has to see it
            _put(ready, ("error", error, {}), stopped)


def _put(ready: queue.Queue[Any], item: Any, stopped: threading.Event) -> bool:
    """Put the item, or give up when nobody takes any more."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=_PATIENCE_SECONDS)
        except queue.Full:
            continue
        return True
    return False
