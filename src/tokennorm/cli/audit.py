"""``tokennorm audit WHAT``: is every supervised token counted exactly once, and if not, why?

Exit code 0: exact. 1: not exact, or an error. 2: wrong usage.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokennorm.cli.extras import import_extra
from tokennorm.errors import ConfigError

if TYPE_CHECKING:
    from tokennorm.audit import AuditReport

__all__ = ["run"]

USAGE = """\
usage: tokennorm audit WHAT [options]

what:
  sft        the fine-tuning recipe (tokennorm train sft), on a tiny model
  dspark     the drafter's recipe (tokennorm train dspark), on a tiny target
  trainer    a Hugging Face Trainer, TRL's SFTTrainer, or a subclass of one, by its import path

tokennorm audit WHAT --help shows its options. For a loop of your own: tokennorm.audit.audit_loop (docs/audit.md).
Exit code: 0 exact, 1 not exact, 2 wrong usage.
"""


def run(arguments: list[str]) -> int:
    """Audit, print the report, and return 0 if every layout is exact."""
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, end="")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, rest = arguments[0], arguments[1:]
    if name not in _AUDITS:
        raise ConfigError(f"there is nothing called {name!r} to audit", fix=f"use one of: {', '.join(_AUDITS)}")
    return _AUDITS[name](rest)


def _audit_recipe(name: str, extra: str, rest: list[str]) -> int:
    parser = _parser(name, f"Audit the recipe {name} on a tiny model, under 34 layouts.", ranks=(1, 2, 4))
    options = parser.parse_args(rest)
    audit = getattr(import_extra(f"tokennorm.recipes.audit.{name}", extra=extra), f"audit_{name}")
    splits = import_extra("tokennorm.recipes.audit.splits", extra=extra).default_splits(options.ranks)
    return _report(lambda **common: audit(splits=splits, **common), options)


def _audit_trainer(rest: list[str]) -> int:
    parser = _parser(
        "trainer",
        "Audit a Hugging Face Trainer, TRL's SFTTrainer or a subclass, with a tiny model. The exit code is the "
        "gradient's; losses that are logged or evaluated wrong are reported.",
        ranks=(1, 2),
    )
    parser.add_argument("target", help="import path: transformers:Trainer, trl:SFTTrainer, my.module:MyTrainer")
    parser.add_argument("--model", default="llama", help="architecture (model_type): llama, qwen3, mixtral, ...")
    parser.add_argument(
        "--kwargs",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="training arguments, such as label_smoothing_factor=0.1",
    )
    parser.add_argument(
        "--integration", action="store_true", help="make it exact first (tokennorm.integrations.hf)"
    )
    parser.add_argument("--no-packed", action="store_true", help="leave out the packed layouts")
    options = parser.parse_args(rest)
    arguments = dict(_key_and_value(one, parser) for one in options.kwargs)
    audit = import_extra("tokennorm.recipes.audit.trainer", extra="integrations").audit_trainer
    return _report(
        lambda **common: audit(
            options.target,
            model=options.model,
            arguments=arguments,
            integration=options.integration,
            ranks=options.ranks,
            packed=not options.no_packed,
            **common,
        ),
        options,
    )


def _key_and_value(text: str, parser: argparse.ArgumentParser) -> tuple[str, Any]:
    """``key=value``, the value as Python reads it, or else the text itself."""
    key, sign, value = text.partition("=")
    if not sign:
        parser.error(f"--kwargs {text}: give KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


_AUDITS: dict[str, Callable[[list[str]], int]] = {
    "sft": lambda rest: _audit_recipe("sft", "train", rest),
    "dspark": lambda rest: _audit_recipe("dspark", "draft", rest),
    "trainer": _audit_trainer,
}


def _parser(name: str, description: str, *, ranks: Sequence[int]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tokennorm audit {name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(ranks), metavar="N", help="run the layouts of so many ranks"
    )
    parser.add_argument("--json", metavar="PATH", help="write the whole report as JSON")
    parser.add_argument("--html", metavar="PATH", help="write one page with two plots")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="seconds without progress that count as hanging"
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="largest relative error that is exact; by default rounding"
    )
    return parser


def _report(audit: Callable[..., AuditReport], options: argparse.Namespace) -> int:
    """Run an audit with progress on stderr; its report goes to stdout and to files."""
    import torch

    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr, flush=True)

    # The ranks are forked from this process, which has imported everything already: that needs a single thread.
    torch.set_num_threads(1)
    report = audit(say=say, start_method="fork", timeout_s=options.timeout, tolerance=options.tolerance)
    print(report)
    ranks = sorted({layout.ranks for layout in report.layouts})
    windows = sum(len(layout.windows) for layout in report.layouts)
    print(
        f"{len(report.layouts)} layouts, {windows} windows; numbers of ranks: {', '.join(map(str, ranks))}; "
        + _versions()
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(report.to_json() + "\n")
        print(f"wrote {options.json}")
    if options.html:
        print(f"wrote {report.to_html(options.html)}")
    return 0 if report.exact else 1


def _versions(libraries: Sequence[str] = ("torch", "transformers")) -> str:
    known: list[Any] = []
    for library in libraries:
        try:
            known.append(f"{library} {importlib.metadata.version(library)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(known)
