"""``tokennorm new-recipe NAME``."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from tokennorm.errors import ConfigError

__all__ = ["run", "write_recipe"]

USAGE = """\
usage: tokennorm new-recipe NAME

Write a small recipe into the folder NAME: a model, windows and the engine, with a README and tests that pass.
"""


def run(arguments: list[str]) -> int:
    """Write the recipe and say how to start it."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    folder = write_recipe(arguments[0], Path.cwd())
    print(f"{folder}\n  python -m {folder.name}.train\n  python -m pytest {folder.name}")
    return 0


def write_recipe(name: str, parent: Path) -> Path:
    """Write the recipe ``name`` below ``parent`` and return its folder.

    Raises:
        ConfigError: the name is no name of a package, or taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in sys.stdlib_module_names:
        raise ConfigError(
            f"{name!r} can't be the name of a recipe",
            why="it becomes the name of a Python package",
            fix="give lower-case letters, digits and underscores, such as my_recipe, and no module of Python's",
        )
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already", fix="give another name, or remove it")
    if name == "tests" or find_spec(name) is not None:
        raise ConfigError(
            f"the name {name!r} is taken by a package that is installed",
            why="one of the two would hide the other",
            fix="give another",
        )
    try:
        _copy(resources.files("tokennorm.cli") / "recipe_template", folder, name)
    except OSError as error:
        raise ConfigError(f"the recipe can't be written: {error}", fix="start from another folder") from error
    return folder


def _copy(template: Traversable, folder: Path, name: str) -> None:
    folder.mkdir()
    for entry in template.iterdir():
        if entry.is_dir():
            _copy(entry, folder / entry.name, name)
        elif entry.name.endswith(".txt"):
            text = entry.read_text(encoding="utf-8").replace("NAME", name)
            (folder / entry.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
