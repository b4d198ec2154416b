"""``tokennorm fetch MODEL``."""

from __future__ import annotations

from tokennorm.cli.extras import import_extra

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Bring an embedded model to this machine and print its folder."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: tokennorm fetch MODEL\n\nmodels:\n  smollm2-135m")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    print(import_extra("tokennorm.recipes.common.fetch").fetch(arguments[0]))
    return 0
