"""Saving a run and resuming it: the same weights, bit for bit, as if it had never stopped.

Rank 0 writes the model, the optimizer and what belongs to all; each rank's random state and place in the data
are stored per rank. "Bit for bit" holds on CPU with the same number of ranks and threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokennorm.engine.checkpoint_files import (
    checkpoint_folders,
    prune,
    read_manifest,
    read_payload,
    write_checkpoint,
)
from tokennorm.engine.distributed import Runtime, all_ranks_or_none, gather_objects, unwrap_model
from tokennorm.engine.rng import capture_rng_state, restore_rng_state
from tokennorm.errors import CheckpointError

if TYPE_CHECKING:
    from tokennorm.engine.engine import Engine

__all__ = ["CheckpointStore"]

_MODEL, _OPTIMIZER, _RANKS = "model.pt", "optimizer.pt", "ranks.pt"
# Enough to see what kind of difference it is; a foreign model would fill the screen.
_DIFFERENCES_SHOWN = 6


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: where they live, e.g. ``runs/my-run/checkpoints``; made when something is saved.
        identity: what must be the same for a resumed run to continue this one: model, data, optimizer, window.
            Nested dicts of plain values; compared entry by entry.
        runtime: this process's place among the ranks.
        keep_last: complete checkpoints to keep.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        identity: Mapping[str, Any] | None = None,
        runtime: Runtime | None = None,
        keep_last: int = 2,
    ) -> None:
        self.folder = Path(folder)
        self.identity = _flatten(identity or {})
        self.runtime = runtime or Runtime()
        self.keep_last = keep_last

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint, or None."""
        folders = checkpoint_folders(self.folder)
        return folders[-1] if folders else None

    def save(self, engine: Engine, *, loader_state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of ``engine`` on all ranks together and delete the oldest beyond ``keep_last``.

        Args:
            engine: between two windows, never inside one.
            loader_state: this rank's place in the data (tensors and plain values).

        Raises:
            CheckpointError: it could not be written (on every rank); older checkpoints are untouched.
        """
        own = {"rng": capture_rng_state(engine.device), "loader": dict(loader_state or {})}
        everyone = gather_objects(own, self.runtime)

        def write() -> Path | None:
            if not self.runtime.is_main:
                return None
            payloads = {
                _MODEL: unwrap_model(engine.model).state_dict(),
                _OPTIMIZER: _optimizer_payload(engine),
                _RANKS: everyone,
            }
            facts = {
                "world_size": self.runtime.world_size,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "identity": self.identity,
            }
            path = write_checkpoint(self.folder, engine.step, payloads, facts)
            prune(self.folder, self.keep_last)
            return path

        all_ranks_or_none(write, self.runtime)
        return self.folder / f"step-{engine.step:08d}"

    def restore(self, engine: Engine, checkpoint: Path | str | None = None) -> dict[str, Any]:
        """Load a checkpoint into ``engine`` (the newest by default) and return this rank's loader state.

        Everything is checked before anything is changed.

        Raises:
            CheckpointError: none there, damaged, or of another run: model, data, configuration or number of
                ranks differ. The differences are named.
        """
        path = self.latest() if checkpoint is None else Path(checkpoint)
        if path is None:
            raise CheckpointError(
                f"there is no complete checkpoint in {self.folder}", fix="start the run without resuming"
            )
        manifest, payloads = all_ranks_or_none(lambda: self._read(path, engine), self.runtime)
        unwrap_model(engine.model).load_state_dict(payloads[_MODEL])
        state = payloads[_OPTIMIZER]
        engine.optimizer.load_state_dict(state["optimizer"])
        if engine.scheduler is not None:
            engine.scheduler.load_state_dict(state["scheduler"])
        engine.scaler.load_state_dict(state["scaler"])
        if engine.token_loss_kit.loss_guard is not None:
            engine.token_loss_kit.loss_guard.load_state_dict(state["guard"])
        engine.step = manifest["step"]
        own = payloads[_RANKS][self.runtime.rank]
        restore_rng_state(own["rng"], engine.device)
        return own["loader"]

    def _read(self, path: Path, engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
        manifest = read_manifest(path)
        differences = _compare(manifest["identity"], json.loads(json.dumps(self.identity)))
        if manifest["world_size"] != self.runtime.world_size:
            differences.insert(
                0, f"number of ranks: {manifest['world_size']} there, {self.runtime.world_size} here"
            )
        if not differences:
            payloads = {name: read_payload(path, name) for name in (_MODEL, _OPTIMIZER, _RANKS)}
            differences = _compare_models(payloads[_MODEL], unwrap_model(engine.model).state_dict())
            differences += _compare_optimizers(payloads[_OPTIMIZER], engine)
            if not differences:
                return manifest, payloads
        shown = differences[:_DIFFERENCES_SHOWN]
        if len(differences) > len(shown):
            shown.append(f"and {len(differences) - len(shown)} more")
        raise CheckpointError(
            f"the checkpoint {path} belongs to another run: " + "; ".join(shown),
            why="resuming continues exactly the run that was saved; with other settings it would be neither run",
            fix="resume with the settings in the run folder's config.json, or start a new run from its export",
        )


def _optimizer_payload(engine: Engine) -> dict[str, Any]:
    guard = engine.token_loss_kit.loss_guard
    return {
        "optimizer": engine.optimizer.state_dict(),
        "scheduler": None if engine.scheduler is None else engine.scheduler.state_dict(),
        "scaler": engine.scaler.state_dict(),
        "guard": None if guard is None else guard.state_dict(),
    }


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _compare(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    absent = "nothing"
    return [
        f"{name}: {saved.get(name, absent)!r} there, {own.get(name, absent)!r} here"
        for name in sorted(saved.keys() | own.keys())
        if saved.get(name, absent) != own.get(name, absent)
    ]


def _compare_models(saved: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> list[str]:
    def describe(state: Mapping[str, torch.Tensor], name: str) -> str:
        return f"{list(state[name].shape)} {state[name].dtype}" if name in state else "no such tensor"

    return [
        f"{name}: {describe(saved, name)} there, {describe(own, name)} here"
        for name in sorted(saved.keys() | own.keys())
        if describe(saved, name) != describe(own, name)
    ]


def _compare_optimizers(saved: Mapping[str, Any], engine: Engine) -> list[str]:
    def sizes(state: Mapping[str, Any]) -> list[int]:
        return [len(group["params"]) for group in state["param_groups"]]

    there, here = sizes(saved["optimizer"]), sizes(engine.optimizer.state_dict())
    differences = []
    if there != here:
        differences.append(f"parameters of the optimizer's groups: {there} there, {here} here")
    if (saved["scheduler"] is None) != (engine.scheduler is None):
        differences.append("only one of the two has a learning-rate schedule")
    if (saved.get("guard") is None) != (engine.token_loss_kit.loss_guard is None):
        differences.append("only one of the two has a loss guard")
    return differences
