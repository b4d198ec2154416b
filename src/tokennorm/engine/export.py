"""Export: a folder that ``AutoModelForCausalLM.from_pretrained`` loads, without a trace of tokennorm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from tokennorm.engine.distributed import Runtime, all_ranks_or_none, unwrap_model
from tokennorm.errors import CheckpointError

__all__ = ["SavesPretrained", "export_pretrained"]


class SavesPretrained(Protocol):
    """A tokenizer, processor or the like."""

    def save_pretrained(self, save_directory: str, /) -> Any:
        """Write itself into a folder."""
        ...


def export_pretrained(
    model: nn.Module,
    folder: Path | str,
    *,
    tokenizer: SavesPretrained | None = None,
    runtime: Runtime | None = None,
) -> Path:
    """Write model, configuration and tokenizer as a Hugging Face folder, on rank 0.

    The folder appears complete or not at all; one that exists is replaced. A patched model saves itself under
    its family's name, so the patch may stay on.

    Raises:
        CheckpointError: it could not be written.
    """
    target, runtime = Path(folder), runtime or Runtime()

    def write() -> None:
        if runtime.is_main:
            _write(unwrap_model(model), target, tokenizer)

    all_ranks_or_none(write, runtime)
    return target


def _write(model: nn.Module, target: Path, tokenizer: SavesPretrained | None) -> None:
    temporary = target.with_name(f".partial-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(str(temporary))  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be exported to {target}: {error}",
            fix="free some space; the weights are also in the run's last checkpoint",
        ) from error
