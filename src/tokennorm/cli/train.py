"""``tokennorm train RECIPE``."""

from __future__ import annotations

from tokennorm.cli.extras import import_extra
from tokennorm.cli.options import parse_config
from tokennorm.errors import ConfigError

__all__ = ["RECIPES", "run"]

# Module of each recipe, and the extra that it needs.
RECIPES = {
    "sft": ("tokennorm.recipes.sft", "train"),
    "dspark": ("tokennorm.recipes.dspark", "draft"),
}

USAGE = f"""\
usage: tokennorm train RECIPE [--config NAME] [options]

recipes: {", ".join(RECIPES)}
tokennorm train RECIPE --help shows every option of a recipe.
"""


def run(arguments: list[str]) -> int:
    """Train as the arguments say."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, rest = arguments[0], arguments[1:]
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}", fix=f"use one of: {', '.join(RECIPES)}")
    module, extra = RECIPES[name]
    recipe = import_extra(module, extra=extra)
    recipe.run(
        parse_config(
            recipe.Config,
            recipe.CONFIGS,
            rest,
            prog=f"tokennorm train {name}",
            description=recipe.DESCRIPTION,
            extra=extra,
        )
    )
    return 0
