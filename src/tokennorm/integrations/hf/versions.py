"""Are the libraries there, and are they those that the integration was tested with?"""

from __future__ import annotations

import importlib.metadata
import re

from tokennorm.errors import ConfigError, MissingDependencyError

__all__ = ["require"]

# library -> (first version that has what is needed, first version that is another world)
_RANGES = {"transformers": ((5, 19), 6), "accelerate": ((1, 10), 2), "trl": ((1, 16), 2)}


def require(*libraries: str) -> None:
    """Check that the libraries are installed, in a version within the range that is meant to work.

    Raises:
        MissingDependencyError: one is not installed.
        ConfigError: its version is outside the range.
    """
    for library in libraries:
        try:
            version = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError as error:
            raise MissingDependencyError(
                f"{library} is not installed",
                why="tokennorm.integrations.hf makes its trainer exact.",
                fix='pip install "tokennorm[integrations]"',
            ) from error
        lowest, next_major = _RANGES[library]
        if not lowest <= _numbers(version) < (next_major,):
            wanted = f">={'.'.join(map(str, lowest))},<{next_major}"
            raise ConfigError(
                f"{library} {version} is installed; the integration knows {library}{wanted}",
                why="it depends on the order in which the trainer counts, computes and clips.",
                fix=f'pip install "{library}{wanted}"',
            )


def _numbers(version: str) -> tuple[int, ...]:
    """``5.24.0.dev0`` -> (5, 24, 0)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
