"""Imports of what the base install does not bring."""

from __future__ import annotations

import importlib
from types import ModuleType

from tokennorm.errors import MissingDependencyError

__all__ = ["import_extra"]


def import_extra(module: str, *, extra: str = "train") -> ModuleType:
    """Import a module that needs an extra.

    Raises:
        MissingDependencyError: something that the extra brings is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug, not a missing extra.
        if error.name is None or error.name.partition(".")[0] == "tokennorm":
            raise
        raise MissingDependencyError(
            f"the library {error.name!r} is not installed",
            why="the base install of tokennorm needs torch only; recipes need more",
            fix=f'pip install "tokennorm[{extra}]"',
        ) from error
