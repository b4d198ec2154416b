"""Saving a run and resuming it: the same weights, bit for bit, as if it had never stopped.

Every rank writes its part of the model and the optimizer (``torch.distributed.checkpoint``) and its own random
state and place in the data; rank 0 writes what belongs to all, and makes the checkpoint visible when everything is
on the disk. "Bit for bit" holds on CPU with the same ranks, threads and versions; ``docs/checkpoints.md`` says
what holds otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokennorm.engine import checkpoint_files as files
from tokennorm.engine import checkpoint_state as states
from tokennorm.engine.checkpoint_changes import of_another_run, sort_out
from tokennorm.engine.checkpoint_choice import newest_sound, require_sound
from tokennorm.engine.checkpoint_losses import SavedLosses
from tokennorm.engine.checkpoint_ranks import continuation_notes, of_rank, own_state
from tokennorm.engine.checkpoint_tensors import (
    CheckpointException,
    load_tensors,
    own_files,
    read_index,
    save_tensors,
)
from tokennorm.engine.distributed import (
    Runtime,
    all_ranks_or_none,
    gather_objects,
)
from tokennorm.engine.rng import capture_rng_state, continue_rng_state, restore_rng_state
from tokennorm.errors import CheckpointError

if TYPE_CHECKING:
    from tokennorm.engine.engine import Engine

__all__ = ["CheckpointStore"]

_STATE = "state.pt"


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they live, e.g. ``runs/my-run/checkpoints``; made when something is saved. All ranks must see
            the same one.
        identity: what must be the same for a resumed run to continue this one: model, data, optimizer, window.
            Nested dicts of plain values; compared entry by entry. Entries under the name ``layout`` only say how
            the same windows are cut into micro-batches: they may differ, and the difference is said.
        runtime: this process's place among the ranks.
        keep_last: complete checkpoints to keep.
        keep_best: keep also the one with the lowest held-out loss.
        frozen: :func:`~tokennorm.engine.frozen_fingerprint` of the model. Given, frozen weights are left out of
            the checkpoints, which then go only with a model that has the same ones; None saves all weights.
        allow_changes: names of entries of ``identity`` that may differ all the same, see
            :func:`~tokennorm.engine.checkpoint_changes.sort_out`.

    Attributes:
        current: the checkpoint that this process saved or loaded last, the same on every rank.
        changes: what was changed on purpose in the course of the run: the steps, and entries in words.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        identity: Mapping[str, Any] | None = None,
        runtime: Runtime | None = None,
        keep_last: int = 2,
        keep_best: bool = False,
        frozen: str | None = None,
        allow_changes: Sequence[str] = (),
    ) -> None:
        self.folder = Path(folder)
        fixed = dict(identity or {})
        self.layout = states.flatten(fixed.pop("layout", {}))
        self.identity = states.flatten(fixed)
        self.runtime = runtime or Runtime()
        self.keep_last, self.keep_best, self.frozen = keep_last, keep_best, frozen
        self._saved_losses = SavedLosses(self.folder, self.runtime)
        self.allow_changes = tuple(allow_changes)
        self.changes: list[dict[str, Any]] = []
        self.current: Path | None = None

    def latest(self) -> Path | None:
        """Return the newest checkpoint that looks whole, or None; as this rank sees it, contents not compared."""
        whole = files.whole_checkpoints(self.folder)
        return whole[-1] if whole else None

    def best(self) -> Path | None:
        """Return the complete checkpoint with the lowest held-out loss, or None when no loss was saved."""
        return self._saved_losses.best()

    def was_evaluated(self, step: int) -> bool:
        """Whether the weights of ``step`` had been evaluated when they were saved; the same on every rank."""
        return self._saved_losses.was_evaluated(step)

    def improves(self, held_out_loss: float | None) -> bool:
        """True when a state with this held-out loss is the best so far and is to be kept, on all ranks alike."""
        return self.keep_best and self._saved_losses.lower_than_all(held_out_loss)

    def records(self, checkpoint: Path) -> int | None:
        """Return, on rank 0, how many lines the run's ``metrics.jsonl`` had when this was saved.

        None when that was not said, and for a checkpoint of another folder, whose lines are not this run's.
        """
        if not self.runtime.is_main or checkpoint.resolve().parent != self.folder.resolve():
            return None
        return files.read_manifest(checkpoint).get("records")

    def save(
        self,
        engine: Engine,
        *,
        loader_state: Mapping[str, Any] | None = None,
        held_out_loss: float | None = None,
        evaluated: bool | None = None,
        records: int | None = None,
    ) -> Path:
        """Write a checkpoint of ``engine`` on all ranks together and delete what is not to be kept.

        Args:
            engine: between two windows, never inside one.
            loader_state: this rank's place in the data (tensors and plain values). A place that is the same on
                every rank, such as the number of finished windows, can be resumed by another number of ranks.
            held_out_loss: of exactly these weights, if it was measured; the same on every rank.
            evaluated: whether they were, by default if there is a loss. (Held-out data may have no token.)
            records: lines of the run's ``metrics.jsonl``, of which a resume drops what comes after; on rank 0.

        Raises:
            CheckpointError: it could not be written; older checkpoints are untouched. A rank that had no part in
                the failure may raise DistributedError, which names the one that had.
        """
        step, runtime = engine.step, self.runtime
        hidden = self.folder / f".partial-{files.folder_name(step)}"
        whole = self.frozen is None
        tensors = {**states.model_tensors(engine, frozen=whole), **states.optimizer_tensors(engine)}
        facts = self._facts(held_out_loss, held_out_loss is not None if evaluated is None else evaluated, records)
        own = {"rng": capture_rng_state(engine.device), "loader": dict(loader_state or {})}

        def begin() -> None:
            if runtime.is_main:
                files.begin(self.folder, step, states.tensor_bytes(engine, frozen=whole))

        def write() -> dict[str, object]:
            written = [hidden / of_rank(runtime.rank)]
            files.write_archive(written[0], own)
            if runtime.is_main:
                files.write_archive(hidden / _STATE, states.plain_state(engine))
                written.append(hidden / _STATE)
            tensor_files = own_files(hidden, runtime)
            for path in tensor_files:
                files.sync_file(path)
            written += tensor_files
            return {path.name: files.file_entry(path) for path in written}

        def commit() -> None:
            if runtime.is_main:
                entries = {name: entry for one in everyone for name, entry in one.items()}
                files.commit(hidden, step, facts, entries)

        try:
            self._together(begin, step)
            self._write_tensors(tensors, hidden, step)
            everyone = gather_objects(self._together(write, step), runtime)
            self._together(commit, step)
        except Exception:
            if runtime.is_main:
                files.discard(self.folder, step)
            raise
        if self.keep_best:
            self._saved_losses.add(held_out_loss)
        if runtime.is_main:
            best = self.best() if self.keep_best else None
            files.prune(self.folder, self.keep_last, () if best is None else (best,))
        self.current = self.folder / files.folder_name(step)
        return self.current

    def choose(
        self, checkpoint: Path | str | None = None, *, say: Callable[[str], None] = lambda _: None
    ) -> Path | None:
        """Return the newest undamaged checkpoint, or the given one; the same on every rank, which all call it.

        None when the run has none at all. ``say`` is told of each that is passed over.

        Raises:
            DamagedCheckpointError: the given one is damaged, or all are.
        """
        if checkpoint is None:
            return newest_sound(self.folder, self.runtime, say)
        return require_sound(Path(checkpoint), self.runtime)

    def restore(
        self, engine: Engine, checkpoint: Path | str | None = None, *, say: Callable[[str], None] = lambda _: None
    ) -> dict[str, Any]:
        """Do :meth:`choose` and :meth:`load`.

        Raises:
            CheckpointError: there is none, or see there.
        """
        path = self.choose(checkpoint, say=say)
        if path is None:
            raise CheckpointError(f"there is no checkpoint in {self.folder}", fix="start the run without resuming")
        return self.load(engine, path, say=say)

    def load(
        self, engine: Engine, checkpoint: Path, *, say: Callable[[str], None] = lambda _: None
    ) -> dict[str, Any]:
        """Load an undamaged checkpoint into ``engine`` and return this rank's loader state.

        Everything is checked before anything is changed. The number of ranks may be another one, and so may what
        ``identity`` has under ``layout``: the same windows follow in the same order, but sums are rounded in
        another order and random numbers (dropout) fall differently. Where something was changed on purpose, the
        optimizer's settings and the schedule are the engine's, at the step that was saved.

        Args:
            engine: built as for the run that was saved.
            checkpoint: from :meth:`choose`.
            say: told in a line each what makes the continuation not bit for bit the same.

        Raises:
            CheckpointError: of another run: model, data or configuration differ. The differences are named.
        """
        manifest, shared, own, granted = all_ranks_or_none(lambda: self._read(checkpoint, engine), self.runtime)
        index = read_index(checkpoint)
        templates = states.optimizer_templates(engine, index)
        wanted = {**states.model_tensors(engine, frozen=not manifest.get("frozen")), **templates}
        try:
            load_tensors(wanted, checkpoint, self.runtime)
        except CheckpointException as error:
            raise CheckpointError(
                f"the tensors of {checkpoint} could not be read: {error}",
                why="the model in memory is now incomplete",
            ) from error
        states.restore_plain_state(engine, shared, templates, own_settings=bool(granted))
        engine.step = manifest["step"]
        self.changes = manifest.get("changes", [])
        if granted:
            self.changes = [*self.changes, {"step": engine.step, "changed": granted}]
        if self.runtime.rank < manifest["world_size"]:
            restore_rng_state(own["rng"], engine.device)
        else:
            continue_rng_state(own["rng"], self.runtime.rank)
        for change in granted:
            say(f"note: changed on purpose: {change}")
        for note in continuation_notes(manifest, self.layout, self.runtime):
            say(f"note: {note}")
        self.current = checkpoint
        return own["loader"]

    def set_aside_after(self, step: int) -> Path | None:
        """Move the checkpoints of later steps out of sight; the folder they are in now, on rank 0."""
        return files.set_aside(self.folder, step) if self.runtime.is_main else None

    def _read(
        self, path: Path, engine: Engine
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
        """Compare everything; return the manifest, what belongs to all ranks, this rank's own, and the changes."""
        manifest = files.read_manifest(path)
        differences, granted = sort_out(manifest["identity"], self.identity, self.allow_changes)
        if not differences:
            shared = files.read_archive(path, _STATE)
            frozen = manifest.get("frozen")
            if frozen not in (None, self.frozen):
                here = "none" if self.frozen is None else self.frozen[:12]
                differences = [f"frozen weights: SHA-256 {frozen[:12]} there, {here} here"]
            differences += states.compare_tensors(read_index(path), engine, frozen=not frozen)
            guard_may_differ = any(name.startswith("guard.") for name in granted)
            differences += states.compare_groups(shared, engine, guard=not guard_may_differ)
            if not differences:
                state = own_state(path, manifest["world_size"], self.runtime)
                return manifest, shared, state, list(granted.values())
        raise of_another_run(path, differences)

    def _facts(self, held_out_loss: float | None, evaluated: bool, records: int | None) -> dict[str, Any]:
        return {
            "world_size": self.runtime.world_size,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "held_out_loss": held_out_loss,
            "evaluated": evaluated,
            **({} if records is None else {"records": records}),
            "identity": self.identity,
            "layout": self.layout,
            **({"frozen": self.frozen} if self.frozen else {}),
            **({"changes": self.changes} if self.changes else {}),
        }

    def _together(self, action: Callable[[], Any], step: int) -> Any:
        """Run ``action`` on all ranks or fail on all of them; a failed write becomes an error that says so."""

        def told() -> Any:
            try:
                return action()
            # torch reports a failed write of its archive as RuntimeError; what lies behind it is the OSError.
            except (OSError, RuntimeError) as error:
                raise files.write_error([error], self.folder, step) from error

        return all_ranks_or_none(told, self.runtime)

    def _write_tensors(self, tensors: Mapping[str, torch.Tensor], hidden: Path, step: int) -> None:
        try:
            save_tensors(tensors, hidden, self.runtime)
        except CheckpointException as error:
            raise files.write_error([one for one, _ in error.failures.values()], self.folder, step) from error
