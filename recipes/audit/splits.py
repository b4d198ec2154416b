"""How the audit of a recipe splits its data, and what the recipe's loader makes of it.

A recipe decides by itself which samples meet in a micro-batch. So a split here is a configuration of the recipe,
and its layout is read from the loader's plan; what each rank is due of a window is worked out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.audit import Layout
from tokennorm.data import ChatDataset, Position, WindowLoader
from tokennorm.errors import AuditError, ConfigError
from tokennorm.recipes.audit.chats import LONG, UNSUPERVISED

__all__ = ["RANKS", "Split", "check_plan", "default_splits", "layout_of", "plan_of"]

RANKS = (1, 2, 4)
# Tokens of a packed row: what the longest chats need.
_ROW, _LONG_ROW = 40, 64
_SEED_OF_ANOTHER_ORDER = 7

Plan = list[list[list[int]]]
"""For each window the samples (places in the data) of each micro-batch, of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """One way to configure the recipe's data.

    Attributes:
        name: shown in the report; unique among those of as many ranks.
        ranks: number of processes.
        chats: numbers of the chats that the data consist of.
        per_window: micro-batches of a window, of all ranks together.
        rows: of a micro-batch.
        packed: several chats in a row.
        shuffled: in another order than that of ``chats``.
    """

    name: str
    ranks: int
    chats: tuple[int, ...]
    per_window: int
    rows: int = 1
    packed: bool = False
    shuffled: bool = False

    @property
    def seed(self) -> int:
        """Of the order."""
        return _SEED_OF_ANOTHER_ORDER if self.shuffled else 0

    @property
    def pack_length(self) -> int:
        """Tokens of a row, and most tokens of a chat."""
        return _LONG_ROW if LONG in self.chats else _ROW

    @property
    def file_name(self) -> str:
        """Of the data; splits of the same chats share it."""
        return "-".join(map(str, self.chats))


def default_splits(ranks: Sequence[int] = RANKS) -> tuple[Split, ...]:
    """Ten splits for one rank and eleven for each other number of ranks.

    Args:
        ranks: numbers of processes to run.
    """
    unknown = sorted(set(ranks) - set(RANKS))
    if unknown or not ranks:
        raise ConfigError(f"there are no splits for {unknown} ranks", fix=f"choose from {list(RANKS)}")
    return tuple(split for number in sorted(set(ranks)) for split in _splits(number))


def _splits(R: int) -> list[Split]:
    def split(name: str, chats: Sequence[int], per_window: int, **options: Any) -> Split:
        return Split(name=name, ranks=R, chats=tuple(chats), per_window=per_window, **options)

    # Chats of very different length are neighbours, so every micro-batch and every rank has its own count.
    few, many = range(2 * R + 1), range(min(3 * R, 12))
    found = [
        split("one micro-batch per rank", range(2 * R), R, rows=2),
        split("uneven micro-batches", many, len(many)),
        split("uneven micro-batches, another order", many, len(many), shuffled=True),
        split("two rows, a single last one", few, R + 1, rows=2),
        split("one very long sample", (0, LONG, *range(1, 2 * R)), 2 * R + 1),
        split("a short last window", few, 2 * R),
        split("packed", range(12), 2 * R, packed=True),
        split("packed, another order", range(12), 2 * R, packed=True, shuffled=True),
        split("packed, two rows", range(12), 2 * R, rows=2, packed=True),
        split("packed, one very long sample", (LONG, *range(1, 8)), 3 * R, packed=True),
    ]
    if R > 1:
        found.append(split("an empty rank", range(R - 1), 3 * R))
        found.append(split("packed, an empty rank", range(2 * R - 1), 3 * R, packed=True))
    return found


def plan_of(split: Split, dataset: ChatDataset) -> Plan:
    """The windows of one epoch, as the recipe's loader plans them.

    Raises:
        AuditError: the plan leaves a sample out, or has one twice.
    """
    loader = WindowLoader(
        dataset,
        micro_batch_size=split.rows,
        micro_batches_per_window=split.per_window,
        pad_token_id=0,
        pack_length=split.pack_length if split.packed else None,
        shuffle=split.shuffled,
        seed=split.seed,
    )
    plan = [loader.window_samples(Position(0, window)) for window in range(loader.num_windows(0))]
    seen = sorted(i for window in plan for micro_batch in window for i in micro_batch)
    if seen != list(range(len(dataset))):
        raise AuditError(
            f"the loader's plan for {split.name!r} has samples {seen} of {len(dataset)}",
            why="every sample belongs to an epoch exactly once.",
        )
    return plan


def check_plan(split: Split, expected: Plan, loader: WindowLoader) -> None:
    """Does the recipe run what the audit believes it runs?

    Raises:
        AuditError: it does not.
    """
    found = [loader.window_samples(Position(0, window)) for window in range(loader.num_windows(0))]
    if found != expected:
        raise AuditError(
            f"the recipe plans {split.name!r} as {found}, where its configuration says {expected}",
            why="the reference of a window is computed from its samples.",
        )


def layout_of(split: Split, plan: Plan) -> Layout:
    """What each rank is due of each window: micro-batches in turn, and dummies for a rank that has run out."""
    windows = []
    for window in plan:
        micro_batches = [tuple(split.chats[i] for i in micro_batch) for micro_batch in window]
        while len(micro_batches) % split.ranks:
            micro_batches.append((UNSUPERVISED,))
        windows.append(tuple(tuple(micro_batches[rank :: split.ranks]) for rank in range(split.ranks)))
    return Layout(name=split.name, windows=tuple(windows), packed=split.packed)
