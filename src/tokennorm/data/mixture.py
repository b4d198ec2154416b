"""Several sources in one run: how often each comes, and in which order."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tokennorm.errors import ConfigError

__all__ = ["MixtureOrder", "MixtureSource", "parse_mixture"]

_SPEC = re.compile(r"(?P<name>[\w.-]+)=(?P<path>.+?)(@(?P<weight>[0-9.]+(/[0-9]+)?))?")


@dataclass(frozen=True, kw_only=True)
class MixtureSource:
    """One source of a mixture.

    Attributes:
        name: its loss is reported under this name.
        path: as for :func:`~tokennorm.data.read_source`.
        weight: how often each of its samples comes in an epoch: 1 once, 3 three times, 1/2 every second epoch.
    """

    name: str
    path: str
    weight: Fraction = Fraction(1)


def parse_mixture(specs: Sequence[str]) -> list[MixtureSource]:
    """Read ``NAME=PATH`` or ``NAME=PATH@WEIGHT``, one for each source; a weight is a number or a fraction (1/3).

    Raises:
        ConfigError: another form, a name given twice, or a weight that is not positive.
    """
    sources: list[MixtureSource] = []
    for spec in specs:
        found = _SPEC.fullmatch(spec)
        if found is None:
            raise ConfigError(
                f"a source of the mixture is {spec!r}",
                fix="write NAME=PATH or NAME=PATH@WEIGHT, as in code=data/code.jsonl@2; a name has letters, "
                "digits, '.', '_' and '-'",
            )
        try:
            weight = Fraction(found["weight"] or 1)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if weight <= 0:
            raise ConfigError(
                f"the weight of the source {found['name']} is {found['weight']}",
                why="it says how often each sample comes in an epoch",
                fix="give a number above 0, or leave the source out",
            )
        sources.append(MixtureSource(name=found["name"], path=found["path"], weight=weight))
    names = [source.name for source in sources]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"the mixture names {', '.join(twice)} more than once", fix="give each source its own name"
        )
    return sources


class MixtureOrder:
    """The samples of each epoch, in order: each source by its weight, spread evenly over the epoch.

    A source is an endless stream of passes over its samples, each pass in a new order (or the given one). Epoch
    ``e`` takes its samples ``floor(e * w * n)`` to ``floor((e + 1) * w * n)``, for weight ``w`` and ``n`` samples:
    over the epochs every sample comes as often as every other (once more at most), also for a weight of 1/3. The
    samples of all sources are then merged so that every part of the epoch has the same shares, up to one sample.

    It knows nothing of ranks, and depends on its arguments alone.

    Args:
        sizes: samples of each source, which lie one source after the other in the set.
        weights: how often each sample of a source comes in an epoch.
        seed: of the passes' orders.
        shuffle: a new order in each pass.
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[Fraction], *, seed: int, shuffle: bool = True
    ) -> None:
        if len(sizes) != len(weights):
            raise ConfigError(f"{len(sizes)} sources and {len(weights)} weights")
        self.sizes, self.weights, self.seed, self.shuffle = tuple(sizes), tuple(weights), seed, shuffle

    def __call__(self, epoch: int) -> list[int]:
        """Indices of the samples of one epoch, in order."""
        placed: list[tuple[float, int, int]] = []
        start = 0
        for source, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            chosen = [start + i for i in self._taken(source, size, weight, epoch)]
            # The middles of equal parts of the epoch; equal places go to the source that is named first.
            placed += [((2 * j + 1) / (2 * len(chosen)), source, i) for j, i in enumerate(chosen)]
            start += size
        placed.sort(key=lambda item: item[:2])
        return [i for _, _, i in placed]

    def count(self, source: int, epoch: int = 0) -> int:
        """Samples of a source in an epoch."""
        whole = self.weights[source] * self.sizes[source]
        return math.floor((epoch + 1) * whole) - math.floor(epoch * whole)

    def _taken(self, source: int, size: int, weight: Fraction, epoch: int) -> list[int]:
        first, last = math.floor(epoch * weight * size), math.floor((epoch + 1) * weight * size)
        taken: list[int] = []
        number = first
        while number < last:
            order = list(range(size))
            if self.shuffle:
                random.Random(f"tokennorm mixture {self.seed} {source} {number // size}").shuffle(order)
            end = min(last, (number // size + 1) * size)
            taken += order[number % size : number % size + end - number]
            number = end
        return taken
