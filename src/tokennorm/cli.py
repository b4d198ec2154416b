"""The command line: ``tokennorm train RECIPE ...``, ``tokennorm fetch MODEL``.

The base install needs torch only, so every command imports what it needs when it runs. A mistake of the user is
told in the three parts of its error, without a traceback; anything unexpected keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import tokennorm
from tokennorm.errors import ConfigError, MissingDependencyError, TokenNormError

__all__ = ["main"]

_HELP = f"""\
tokennorm {tokennorm.__version__}: every supervised token counts exactly once in every optimizer step.

usage: tokennorm COMMAND ...

commands:
  train RECIPE   train a model; recipes: sft (fine-tune a causal LM on chats)
                   tokennorm train sft --help                 every option
                   tokennorm train sft --config demo          SmolLM2-135M on Python's docstrings
                   tokennorm train sft --data.path my.jsonl --model.path my/model
                 several ranks: torchrun --nproc_per_node 2 -m tokennorm train sft ...
  fetch MODEL    bring an embedded model to this machine: smollm2-135m

options:
  -h, --help     this text
  --version      the version
"""

_RECIPES = {"sft": "tokennorm.recipes.sft"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the arguments after the program's name; by default those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if arguments[0] == "--version":
        print(tokennorm.__version__)
        return 0
    # Threads that spin while they wait for work burn the cores that other processes, or other ranks, need: on a
    # busy machine a step takes several times as long. It has to be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _command(arguments[0])(arguments[1:])
    except TokenNormError as error:
        print(f"{_rank_prefix()}error: {error}", file=sys.stderr, flush=True)
        _tell_torchrun(error)
        return 1
    except KeyboardInterrupt as interrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"\n{interrupt or 'interrupted'}", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        _tell_torchrun(error)
        raise


def _command(name: str) -> Callable[[list[str]], int]:
    commands = {"train": _train, "fetch": _fetch}
    if name not in commands:
        raise ConfigError(
            f"there is no command {name!r}", fix=f"use one of: {', '.join(commands)} (tokennorm --help)"
        )
    return commands[name]


def _train(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print(_HELP, end="")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, rest = arguments[0], arguments[1:]
    if name not in _RECIPES:
        raise ConfigError(f"there is no recipe {name!r}", fix=f"use one of: {', '.join(_RECIPES)}")
    tyro = _import_extra("tyro")
    recipe = _import_extra(_RECIPES[name])
    start, rest = _take_config_name(rest, list(recipe.CONFIGS))
    config = tyro.cli(
        recipe.Config,
        default=recipe.CONFIGS[start](),
        args=rest,
        prog=f"tokennorm train {name}",
        description=(
            f"{recipe.DESCRIPTION}\n\n--config {{{','.join(recipe.CONFIGS)}}} chooses the values to start from "
            f"(here: {start}); every option below changes one of them."
        ),
    )
    recipe.run(config)
    return 0


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


def _fetch(arguments: list[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: tokennorm fetch MODEL\n\nmodels:\n  smollm2-135m")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    print(_import_extra("tokennorm.recipes.common.fetch").fetch(arguments[0]))
    return 0


def _import_extra(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A missing module of our own is a bug, not a missing extra.
        if error.name is None or error.name.partition(".")[0] == "tokennorm":
            raise
        raise MissingDependencyError(
            f"the library {error.name!r} is not installed",
            why="the base install of tokennorm needs torch only; recipes need more",
            fix='pip install "tokennorm[train]"',
        ) from error


def _rank_prefix() -> str:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return f"[rank {os.environ.get('RANK', '0')}/{world_size}] " if world_size > 1 else ""


def _tell_torchrun(error: Exception) -> None:
    """Leave the error where torchrun looks for it, so that its summary names the first one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
