"""``tokennorm report RUN``."""

from __future__ import annotations

from tokennorm.errors import ConfigError
from tokennorm.report import write_report

__all__ = ["run"]

USAGE = """\
usage: tokennorm report RUN [RUN ...] [--output FILE]

Write one HTML page about a run folder: curves, configuration, versions. It works while the run goes on.
Several run folders are compared: a colour for each, and the values that differ marked.
--output FILE   default: RUN/report.html, or comparison.html in the first of several
"""


def run(arguments: list[str]) -> int:
    """Write the page and print where it is."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    folders, output, queue = [], None, iter(arguments)
    for argument in queue:
        if argument == "--output":
            output = next(queue, None)
            if output is None:
                raise ConfigError("--output has no value", fix="give --output FILE")
        elif argument.startswith("--output="):
            output = argument.partition("=")[2]
        elif argument.startswith("-"):
            raise ConfigError(f"there is no option {argument}", fix="tokennorm report --help shows all of them")
        else:
            folders.append(argument)
    print(write_report(folders, output))
    return 0
