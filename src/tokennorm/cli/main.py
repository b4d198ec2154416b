"""Find the command, run it, and tell errors the way a user can act on."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tokennorm
from tokennorm.cli.go_on import go_on
from tokennorm.cli.pipes import READER_GONE, leave_closed_pipes
from tokennorm.errors import ConfigError, TokenNormError

__all__ = ["main"]

HELP = f"""\
tokennorm {tokennorm.__version__}: every supervised token counts exactly once in every optimizer step.

usage: tokennorm COMMAND ...

commands:
  train RECIPE   train a model; recipes: sft (fine-tune a causal LM on chats), dspark (train a drafter)
                   tokennorm train sft --help                 every option
                   tokennorm train sft --config demo          SmolLM2-135M on Python's docstrings
                   tokennorm train sft --data.path my.jsonl --model.path my/model
                 several ranks: torchrun --nproc_per_node 2 -m tokennorm train sft ...
  draft STAGE    the stages around a drafter: generate, cache, evaluate, export, or run: all of them
                   tokennorm draft run --config demo          a drafter for SmolLM2-135M, from prompts to export
                   tokennorm draft STAGE --help               every option
  audit WHAT     prove a training loop right, or name its mistake: sft or dspark (our recipes), or trainer
                   tokennorm audit sft                        34 layouts of ranks, micro-batches and packs
                   tokennorm audit trainer transformers:Trainer --model mixtral
  report RUN     one HTML page of a run's curves and configuration, or a comparison of several; also while they run
  new-recipe NAME  write a small recipe of your own, with tests that pass
  fetch MODEL    bring an embedded model to this machine: smollm2-135m

options:
  -h, --help     this text
  --version      the version
"""

# Where each command is; imported when it is called.
COMMANDS = {
    "train": "tokennorm.cli.train",
    "draft": "tokennorm.cli.draft",
    "audit": "tokennorm.cli.audit",
    "report": "tokennorm.cli.report",
    "new-recipe": "tokennorm.cli.new_recipe",
    "fetch": "tokennorm.cli.fetch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 141 when whoever reads its output has left.

    Args:
        argv: the arguments after the program's name; by default those of the process.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Here and not when the interpreter ends, where it can't be caught; help leaves by SystemExit.
            print(end="", flush=True)
    except BrokenPipeError:
        # Another pipe, to a worker process perhaps, is no business of the reader's.
        if not leave_closed_pipes():
            raise
        return READER_GONE


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
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
            checkpoint: Path | None = getattr(interrupt, "checkpoint", None)
            if checkpoint is not None:
                command = go_on(arguments, getattr(interrupt, "folder", None), checkpoint)
                print(f"go on with: {command}", file=sys.stderr)
        # A run that ended on request says how: 143 for SIGTERM, 130 for SIGINT.
        return getattr(interrupt, "exit_code", 130)
    except Exception as error:
        _tell_torchrun(error)
        raise


def _command(name: str) -> Callable[[list[str]], int]:
    if name not in COMMANDS:
        raise ConfigError(
            f"there is no command {name!r}", fix=f"use one of: {', '.join(COMMANDS)} (tokennorm --help)"
        )
    return importlib.import_module(COMMANDS[name]).run


def _rank_prefix() -> str:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return f"[rank {os.environ.get('RANK', '0')}/{world_size}] " if world_size > 1 else ""


def _tell_torchrun(error: Exception) -> None:
    """Leave the error where torchrun looks for it, so that its summary names the first one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
