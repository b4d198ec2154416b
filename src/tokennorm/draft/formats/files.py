"""Files of tensors: whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tokennorm.errors import ConfigError, MissingDependencyError

__all__ = ["partial_path", "readable_size", "safetensors_module", "save_tensors"]


def readable_size(count: float) -> str:
    """``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def safetensors_module() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError(
            "files of tensors need safetensors", fix='install it: pip install "tokennorm[train]"'
        ) from error
    return safetensors


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it gets its name."""
    return path.with_name(f".partial-{os.getpid()}-{path.name}")


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under its name once it is complete.

    Raises:
        ConfigError: it can't be written.
    """
    library, partial = safetensors_module(), partial_path(path)
    contents: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, value in tensors.items():
        contents[name] = value.detach().to("cpu").contiguous()
        if contents[name].data_ptr() in places:
            # A tied head: the format stores no tensor under two names.
            contents[name] = contents[name].clone()
        places.add(contents[name].data_ptr())
    try:
        library.torch.save_file(contents, partial, metadata=None if metadata is None else dict(metadata))
        partial.replace(path)
    except (OSError, library.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} can't be written: {error}", fix="free some space and run it again.") from error
