"""How the samples of a window are split: into ranks, micro-batches and packs.

Mistakes are told apart because layouts differ in what they must not depend on: the number of ranks and of
micro-batches, how uneven they are, whether one is empty, whether the last window is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokennorm.audit.samples import LONG_SAMPLE, UNSUPERVISED_SAMPLES
from tokennorm.errors import ConfigError

__all__ = ["Layout", "default_layouts"]

# window -> rank -> micro-batch -> sample numbers
MicroBatch = tuple[int, ...]
Window = tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One or more consecutive windows (optimizer steps) of the loop under test.

    Args:
        name: shown in the report.
        windows: ``windows[w][r][m]`` are the numbers of the samples in micro-batch m of rank r in window w. All
            ranks of a window have the same number of micro-batches.
        packed: the samples of a micro-batch share one row; otherwise each has a padded row of its own.
    """

    name: str
    windows: tuple[Window, ...]
    packed: bool = False

    def __post_init__(self) -> None:
        ranks = {len(window) for window in self.windows}
        if len(ranks) != 1 or 0 in ranks:
            raise ConfigError(
                f"layout {self.name!r} has windows of {sorted(ranks)} ranks",
                fix="give every window of a layout the same number of ranks, at least one.",
            )
        for window in self.windows:
            if len({len(micro_batches) for micro_batches in window}) != 1 or not window[0]:
                raise ConfigError(
                    f"layout {self.name!r} gives its ranks {[len(m) for m in window]} micro-batches",
                    why="ranks with different numbers of micro-batches do not meet in their collectives.",
                    fix="give a rank that runs out of data micro-batches of unsupervised samples.",
                )
            if any(not micro_batch for micro_batches in window for micro_batch in micro_batches):
                raise ConfigError(
                    f"layout {self.name!r} has a micro-batch without samples",
                    fix="an empty micro-batch is one whose samples have no supervised token.",
                )

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return len(self.windows[0])

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a full window on one rank: what a loop would be configured with."""
        return len(self.windows[0][0])

    @property
    def micro_batches(self) -> str:
        """Micro-batches of each window, such as ``3`` or ``3+1``."""
        return "+".join(str(len(window[0])) for window in self.windows)


_EMPTY, _ALSO_EMPTY = ((place,) for place in UNSUPERVISED_SAMPLES)
_LONG = LONG_SAMPLE

_DEFAULTS = (
    Layout(name="one micro-batch", windows=((((0, 1, 2),),),)),
    Layout(name="uneven micro-batches", windows=((((0,), (1, 2, 3), (4, 7)),),)),
    Layout(name="one very long sample", windows=((((5,), (_LONG,), (8, 2), (9,)),),)),
    Layout(name="an empty micro-batch", windows=((((3,), _EMPTY, (6, 1)),),)),
    Layout(name="packed", windows=((((0, 1), (2, 3, 4), (7,)),),), packed=True),
    Layout(name="a short last window", windows=((((0,), (1, 9), (5,)),), (((7,), (2, 3)),))),
    Layout(name="uneven ranks", windows=((((0, 2),), ((7, 3),)),)),
    Layout(name="uneven ranks and micro-batches", windows=((((0,), (1, 5), (2,)), ((3, 7), (4,), (9, 8))),)),
    Layout(name="the same samples in another order", windows=((((7,), (4, 3), (8, 0)), ((5,), (9, 2), (1,))),)),
    Layout(name="packed", windows=((((0, 1, 4), (9,)), ((2, 8), (7, 6, 5))),), packed=True),
    Layout(name="an empty rank", windows=((((1, 4), (6,)), (_EMPTY, _ALSO_EMPTY)),)),
    Layout(
        name="a short last window",
        windows=((((0,), (3, 2), (9,)), ((5,), (4,), (1, 8))), (((7,),), ((6, 0),))),
    ),
    Layout(name="uneven ranks", windows=((((0,),), ((1, 3),), ((2, 9),)),)),
    Layout(name="one very long sample", windows=((((2,), (5,)), ((_LONG,), (4, 8)), ((6, 1), (3,))),)),
    Layout(name="packed, an empty rank", windows=((((0, 9), (2,)), (_EMPTY, _ALSO_EMPTY), ((7, 4, 1), (8,))),),
           packed=True),
)  # fmt: skip


def default_layouts(*, ranks: Sequence[int] = (1, 2, 3), packed: bool = True) -> tuple[Layout, ...]:
    """The layouts that an audit runs when it is given none.

    Args:
        ranks: keep the layouts of these numbers of ranks (there are some for 1, 2 and 3).
        packed: keep the packed ones too.
    """
    chosen = tuple(one for one in _DEFAULTS if one.ranks in ranks and (packed or not one.packed))
    if not chosen:
        raise ConfigError(
            f"no default layout has {list(ranks)} ranks",
            fix="choose from 1, 2 and 3, or pass layouts= of your own.",
        )
    return chosen
