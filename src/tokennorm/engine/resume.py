"""Going on with a run that was stopped: first all that can be refused, then what the folder has to forget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tokennorm.engine.checkpoint import CheckpointStore
from tokennorm.engine.distributed import all_ranks_or_none
from tokennorm.engine.engine import Engine
from tokennorm.engine.run_folder import RunFolder

if TYPE_CHECKING:
    from tokennorm.engine.loop import WindowSource

__all__ = ["resume_run"]


def resume_run(
    engine: Engine,
    windows: WindowSource,
    store: CheckpointStore,
    run: RunFolder,
    *,
    checkpoint: Path | str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path | None:
    """Bring a run to where it goes on; every rank calls it, before ``run.describe``.

    What the run did after that place is forgotten: its lines in ``metrics.jsonl`` are dropped and its checkpoints
    moved aside, as they would be taken for those of the run that goes on. Nothing on the disk changes before the
    checkpoint is accepted.

    Args:
        engine: built as for the run that was saved.
        windows: brought to their place.
        store: of the run.
        run: its folder.
        checkpoint: one of the run's, or of another run that is the same up to there; the newest by default.
            Damaged ones are passed over, but not this.
        say: told in a line each what is noteworthy.

    Returns:
        The checkpoint; None when the run has none yet and starts from the beginning.

    Raises:
        CheckpointError: damaged, or of another run.
        ConfigError: a run in another process is using the folder.
    """
    # The folder may have come into being, by another run, since ``run`` was made.
    run.hold()
    path = store.choose(checkpoint, say=say)
    if path is None:
        say("no checkpoint yet: starting from the beginning")
        # Everything comes again, the evaluation before the first step included.
        run.forget_after(-1)
        return None
    windows.load_state_dict(store.load(engine, path, say=say))
    aside = all_ranks_or_none(lambda: store.set_aside_after(engine.step), store.runtime)
    if aside is not None:
        say(f"note: the checkpoints of later steps are now in {aside}; nothing reads them any more")
    run.forget_after(engine.step, records=store.records(path))
    say(f"resumed from {path}")
    return path
