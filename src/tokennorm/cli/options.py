"""Options of a command: a configuration to start from, and a flag for each of its fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokennorm.cli.extras import import_extra
from tokennorm.errors import ConfigError

__all__ = ["parse_config"]


def parse_config(
    config_type: type,
    starts: Mapping[str, Callable[[], Any]],
    arguments: list[str],
    *,
    prog: str,
    description: str,
    extra: str = "train",
) -> Any:
    """Read a configuration from the command line.

    Args:
        config_type: a dataclass.
        starts: by name, functions that return the values to start from; the first is the default.
        arguments: after the command's name.
        prog: how the command is called, for its help.
        description: for its help.
        extra: brings the library that reads options.

    Raises:
        ConfigError: an unknown name after ``--config``, or a value that a field refuses.
    """
    tyro = import_extra("tyro", extra=extra)
    start, rest = _take_config_name(arguments, list(starts))
    return tyro.cli(
        config_type,
        default=starts[start](),
        args=rest,
        prog=prog,
        description=(
            f"{description}\n\n--config {{{','.join(starts)}}} chooses the values to start from "
            f"(here: {start}); every option below changes one of them."
        ),
    )


def _take_config_name(arguments: list[str], names: list[str]) -> tuple[str, list[str]]:
    """Take ``--config NAME`` out of the arguments: it decides the defaults of all others."""
    chosen, rest = names[0], []
    queue = iter(arguments)
    for argument in queue:
        if argument == "--config":
            chosen = next(queue, "")
        elif argument.startswith("--config="):
            chosen = argument.partition("=")[2]
        else:
            rest.append(argument)
    if chosen not in names:
        raise ConfigError(f"--config is {chosen!r}", fix=f"use one of: {', '.join(names)}")
    return chosen, rest
