"""``tokennorm draft STAGE``: what happens before and after the training of a drafter."""

from __future__ import annotations

from tokennorm.cli.extras import import_extra
from tokennorm.cli.options import parse_config
from tokennorm.errors import ConfigError

__all__ = ["run"]

# What each stage does, for the help.
STAGES = {
    "generate": "let the target answer the prompts: what the drafter learns from",
    "cache": "write the target's hidden states to disk (optional)",
    "evaluate": "decode held-out prompts plainly and with the drafter; calibrate its confidence",
    "export": "write the drafter for a server, and check it against the servers' schemas",
    "run": "generate, cache, train, evaluate and export, going on where an earlier call stopped",
}

USAGE = (
    "usage: tokennorm draft STAGE [--config NAME] [options]\n\nstages:\n"
    + "".join(f"  {name:<9} {text}\n" for name, text in STAGES.items())
    + "\nThe training itself is `tokennorm train dspark`. All stages take the same options and share --run.dir.\n"
)


def run(arguments: list[str]) -> int:
    """Run one stage."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, rest = arguments[0], arguments[1:]
    if name not in STAGES:
        fix = "the training is: tokennorm train dspark" if name == "train" else f"use one of: {', '.join(STAGES)}"
        raise ConfigError(f"there is no stage {name!r}", fix=fix)
    recipe = import_extra("tokennorm.recipes.dspark", extra="draft")
    config = parse_config(
        recipe.Config,
        recipe.CONFIGS,
        rest,
        prog=f"tokennorm draft {name}",
        description=f"{name}: {STAGES[name]}.",
        extra="draft",
    )
    recipe.STAGES[name](config)
    return 0
