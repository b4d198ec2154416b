"""Where metrics go besides ``metrics.jsonl``: TensorBoard, trackio and wandb, each imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokennorm.errors import ConfigError, MissingDependencyError

__all__ = ["SINKS", "GuardedSinks", "MetricSink", "check_sinks", "open_sinks", "scalars"]

# The package that each needs.
SINKS = {"tensorboard": "tensorboard", "trackio": "trackio", "wandb": "wandb"}

# The name that a resumed run is continued under.
_RUN_ID = "sink-run-id"


class MetricSink(Protocol):
    """Takes the records of a run, in order; on the main rank only."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record: ``step``, and what was measured there."""
        ...

    def close(self) -> None:
        """Write what is left. Called once, also when the run failed."""
        ...


def check_sinks(names: Sequence[str]) -> None:
    """Refuse sinks that can't work, before anything is started.

    Raises:
        ConfigError: an unknown name, or one that is given twice.
        MissingDependencyError: its package is not installed.
    """
    for name in names:
        if name not in SINKS or list(names).count(name) > 1:
            raise ConfigError(f"loop.sinks holds {name!r}", fix=f"give each of {', '.join(SINKS)} at most once")
        package = SINKS[name]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"loop.sinks holds {name!r}, but the library {package!r} is not installed",
                why="metrics.jsonl is written in any case; other places for metrics are optional",
                fix=f"pip install {package}",
            )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record without its step; of ``refused``, how many there are."""
    values = {
        name: float(value)
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }
    if record.get("refused"):
        values["refused"] = float(len(record["refused"]))
    return values


class GuardedSinks:
    """Several sinks as one: whichever raises is switched off with one warning, and the training goes on.

    Args:
        sinks: by name.
        say: prints the warning.
    """

    def __init__(self, sinks: Mapping[str, MetricSink], say: Callable[[str], None]) -> None:
        self._sinks, self._say = dict(sinks), say

    def log(self, record: Mapping[str, Any]) -> None:
        """Give one record to each sink that still works."""
        for name, sink in list(self._sinks.items()):
            try:
                sink.log(record)
            except Exception as error:
                del self._sinks[name]
                self._say(
                    f"warning: no more metrics go to {name} after step {record.get('step')}: "
                    f"{type(error).__name__}: {error} (metrics.jsonl has all of them)"
                )

    def close(self) -> None:
        """Close each sink that still works."""
        for name, sink in self._sinks.items():
            try:
                sink.close()
            except Exception as error:
                self._say(f"warning: closing {name} failed: {type(error).__name__}: {error}")
        self._sinks = {}


def open_sinks(
    names: Sequence[str],
    *,
    folder: Path,
    project: str = "tokennorm",
    say: Callable[[str], None] = print,
    first_step: int = 0,
) -> GuardedSinks:
    """Open the sinks of one run, on the main rank.

    One that can't be started is an error of a run that begins, and a warning to one that goes on.

    Args:
        names: of :data:`SINKS`.
        folder: the run folder. A run that goes on in it is continued in the sinks too.
        project: the name that trackio and wandb gather runs under.
        say: prints warnings.
        first_step: steps above it were not made yet: TensorBoard drops them if it has any.

    Raises:
        ConfigError, MissingDependencyError: see :func:`check_sinks`; or it could not be started.
    """
    check_sinks(names)
    openers: dict[str, Callable[[], MetricSink]] = {
        "tensorboard": lambda: _TensorBoard(folder, first_step),
        "trackio": lambda: _Service("trackio", folder, project),
        "wandb": lambda: _Service("wandb", folder, project),
    }
    sinks: dict[str, MetricSink] = {}
    for name in names:
        try:
            sinks[name] = openers[name]()
        except Exception as error:
            problem = f"could not be started: {type(error).__name__}: {error}"
            if first_step == 0:
                GuardedSinks(sinks, say).close()
                raise ConfigError(
                    f"{name} {problem}",
                    why="loop.sinks asks for it; nothing is lost yet",
                    fix=f"repair it, or leave {name} out of loop.sinks: metrics.jsonl is written in any case",
                ) from error
            # Somebody may have left this run alone: it is to go on when a server is down.
            say(f"warning: no metrics go to {name}, which {problem} (metrics.jsonl has all of them)")
    return GuardedSinks(sinks, say)


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, int(record.get("step", 0)))

    def close(self) -> None:
        self._writer.close()


class _Service:
    """trackio and wandb, which share the calls that are used here."""

    def __init__(self, name: str, folder: Path, project: str) -> None:
        self._module = importlib.import_module(name)
        config = folder / "config.json"
        options: dict[str, Any] = {
            "project": project,
            "config": json.loads(config.read_text()) if config.exists() else {},
            "resume": "allow",
        }
        run_id = _run_id(folder)
        # trackio continues the run of that name, wandb that of that id.
        if name == "wandb":
            options.update(name=folder.resolve().name, id=run_id, dir=str(folder))
        else:
            options.update(name=f"{folder.resolve().name}-{run_id}")
        self._module.init(**options)

    def log(self, record: Mapping[str, Any]) -> None:
        self._module.log(scalars(record), step=int(record.get("step", 0)))

    def close(self) -> None:
        self._module.finish()


def _run_id(folder: Path) -> str:
    path = folder / _RUN_ID
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text()
