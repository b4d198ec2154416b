"""What the stages leave in the run folder, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tokennorm.errors import ConfigError

__all__ = ["StageFolder"]


@dataclass(frozen=True)
class StageFolder:
    """The files of one drafter, from prompts to export."""

    root: Path

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> StageFolder:
        """The folder at ``path``; nothing is made yet."""
        root = Path(path).expanduser()
        if root.exists() and not root.is_dir():
            raise ConfigError(f"run.dir is {root}, a file", fix="give a folder, or a name that is free")
        return cls(root)

    @property
    def answers(self) -> Path:
        """The target's answers to the training prompts."""
        return self.root / "answers.jsonl"

    @property
    def held_out(self) -> Path:
        """Its answers to held-out prompts."""
        return self.root / "held_out.jsonl"

    @property
    def cache(self) -> Path:
        """Hidden states of the answers."""
        return self.root / "cache"

    @property
    def held_out_cache(self) -> Path:
        """Hidden states of the held-out answers."""
        return self.root / "cache-held-out"

    @property
    def train(self) -> Path:
        """The training: configuration, metrics, checkpoints."""
        return self.root / "train"

    @property
    def drafter(self) -> Path:
        """The trained drafter in full precision, as the other stages read it."""
        return self.root / "drafter"

    @property
    def evaluation(self) -> Path:
        """Reports and plots."""
        return self.root / "evaluation"

    @property
    def export(self) -> Path:
        """The folder for a server."""
        return self.root / "export"

    def require(self, path: Path, *, made_by: str) -> Path:
        """``path``, if an earlier stage has made it.

        Raises:
            ConfigError: it has not.
        """
        if not path.exists():
            raise ConfigError(f"{path} is not there", fix=f"run the stage that makes it first: {made_by}")
        return path
