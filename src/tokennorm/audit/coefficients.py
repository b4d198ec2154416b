"""Mistakes that change how much each micro-batch counts: a grid of rules, and the coefficients of each.

A loop's gradient is ``sum c[r, m] S[r, m]`` over the micro-batches' own gradients (sums over tokens). The right
coefficient is ``1 / D`` everywhere; every rule of the grid is another choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["COUNT_MISTAKES", "GROUPING_MISTAKES", "Rule", "Split", "rules"]

Table = list[list[float]]  # [rank][micro-batch]

COUNT_MISTAKES: dict[str, tuple[str, ...]] = {
    "own": (),
    "true": (),
    "before_shift": ("counted_before_shift",),
    "positions": ("padding_counted",),
    "shifted_positions": ("padding_counted",),
    "tokens": ("prompt_counted",),
    "shifted_tokens": ("prompt_counted",),
}
GROUPING_MISTAKES: dict[str, tuple[str, ...]] = {
    "window": (),
    "micro_batch": ("mean_of_micro_batch_means",),
    "rank": ("mean_of_rank_means",),
    "rank_and_micro_batch": ("mean_of_rank_and_micro_batch_means",),
    "sample": ("mean_of_sample_means",),
    "sample_in_micro_batch": ("mean_of_sample_means",),
}
MASK_MISTAKES: dict[str, tuple[str, ...]] = {
    "all": (),
    # With the division by the number of ranks undone though nothing was averaged, or not.
    "own rank x R": ("ranks_not_synchronised",),
    "own rank": ("ranks_not_synchronised",),
    "without rank 0": ("rank_gradient_missing",),
    "without rank 1": ("rank_gradient_missing",),
    "without the last rank": ("rank_gradient_missing",),
    "without the skipped": ("skipped_micro_batch_counted",),
    "without the skipped, uncounted": ("micro_batch_skipped",),
}
EXTRA_MISTAKES: dict[str, tuple[str, ...]] = {
    "right": (),
    "mean": ("auxiliary_loss_unweighted",),
    "none": ("auxiliary_loss_missing",),
    **{f"mean x {f}": ("auxiliary_loss_multiplied",) for f in ("R", "M", "RM")},
    **{f"right x {f}": ("auxiliary_loss_multiplied",) for f in ("R", "M", "RM")},
    **{f"sum / D{f}": ("auxiliary_loss_divided_by_tokens",) for f in ("", "R", "M", "RM")},
    "right / D": ("auxiliary_loss_divided_by_tokens",),
    "mean / n": ("auxiliary_loss_divided_by_tokens",),
}
PART_RULES = ("right", "sum", "sum / R", "sum / M", "sum / RM", "mean / n", "sum / positions", "mean / positions")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cell of the grid: what is counted, over what is averaged, what takes part; extras and parts apart."""

    count: str = "own"
    grouping: str = "window"
    mask: str = "all"
    extra: str = "right"
    part: str = "right"

    def names(self, part_names: Sequence[str]) -> tuple[str, ...]:
        """The mistakes in it."""
        found = COUNT_MISTAKES[self.count] + GROUPING_MISTAKES[self.grouping] + MASK_MISTAKES[self.mask]
        found += EXTRA_MISTAKES[self.extra]
        if self.part != "right":
            found += tuple(f"{name}_not_normalised" for name in part_names)
        return found


def rules(
    *, counts: Sequence[str], groupings: Sequence[str], masks: Sequence[str], extras: bool, parts: bool
) -> Iterator[Rule]:
    """The grid, up to two deviations besides what is counted."""
    for count, grouping, mask, extra, part in itertools.product(
        counts,
        groupings,
        masks,
        EXTRA_MISTAKES if extras else ("right",),
        PART_RULES if parts else ("right",),
    ):
        if (grouping != "window") + (mask != "all") + (extra != "right") + (part != "right") <= 2:
            yield Rule(count=count, grouping=grouping, mask=mask, extra=extra, part=part)


@dataclass(frozen=True, kw_only=True)
class Split:
    """The numbers of one window that coefficients depend on.

    Args:
        ranks: R; ``micro_batches``: M; ``due``: D.
        places: rank and micro-batch of each vector of the basis (samples or micro-batches).
        vector_counts: tokens of each vector.
        counts: by kind of count, ``[rank][micro-batch]``.
        skipped: micro-batches that the solved weights say are not there.
        observer: the rank whose gradient this is.
        extra_weights: declared, ``[rank][micro-batch]``, in the order of the extras.
    """

    ranks: int
    micro_batches: int
    due: float
    places: Sequence[tuple[int, int]]
    vector_counts: Sequence[float]
    counts: dict[str, Table]
    skipped: frozenset[tuple[int, int]]
    observer: int
    extra_weights: Sequence[Table]

    def main(self, rule: Rule) -> list[float]:
        """Coefficient of each vector of the basis."""
        table = self.counts[rule.count]
        present = self._present(rule.mask)
        if rule.mask == "without the skipped, uncounted":
            table = [[c if (r, m) in present else 0.0 for m, c in enumerate(row)] for r, row in enumerate(table)]
        by_place = self._by_place(rule.grouping, table)
        times = self.ranks if rule.mask == "own rank x R" else 1.0
        samples = [count for count in self.vector_counts if count]
        coefficients = []
        for place, count in zip(self.places, self.vector_counts, strict=True):
            if place not in present:
                coefficients.append(0.0)
            elif rule.grouping == "sample":
                coefficients.append(_over(1.0, count * len(samples)))
            elif rule.grouping == "sample_in_micro_batch":
                mine = sum(1 for p, c in zip(self.places, self.vector_counts, strict=True) if p == place and c)
                coefficients.append(_over(1.0, count * mine * self.ranks * self.micro_batches))
            else:
                coefficients.append(by_place[place[0]][place[1]] * times)
        return coefficients

    def part(self, rule: Rule, main: Sequence[float]) -> list[float]:
        """Coefficient of a part of the loss, of each vector of the basis."""
        if rule.part == "right":
            return list(main)
        kind, _, below = rule.part.partition(" / ")
        splits = self.ranks * self.micro_batches
        coefficients = []
        for rank, micro_batch in self.places:
            value = 1.0
            if below == "n":
                value = _over(1.0, self.counts["true"][rank][micro_batch] * splits)
            elif below == "positions":
                positions = self.counts.get("positions") or self.counts["true"]
                mine = positions[rank][micro_batch] * splits
                value = _over(1.0, mine if kind == "mean" else sum(map(sum, positions)))
            elif below:
                value = 1.0 / self._factor(below)
            coefficients.append(value)
        return coefficients

    def extra(self, rule: Rule) -> list[float]:
        """Coefficient of every extra of every micro-batch, extra by extra."""
        splits = self.ranks * self.micro_batches
        coefficients = []
        for weights in self.extra_weights:
            total = sum(map(sum, weights))
            for rank, row in enumerate(weights):
                for micro_batch, weight in enumerate(row):
                    right = _over(weight, total)
                    tokens = self.counts["true"][rank][micro_batch]
                    kind, _, factor = rule.extra.partition(" x ")
                    if rule.extra == "none":
                        value = 0.0
                    elif rule.extra == "mean / n":
                        value = _over(1.0 / splits, tokens)
                    elif rule.extra == "right / D":
                        value = right / self.due
                    elif rule.extra.startswith("sum / D"):
                        value = 1.0 / self.due / self._factor(rule.extra.removeprefix("sum / D"))
                    else:
                        value = (right if kind == "right" else 1.0 / splits) * self._factor(factor)
                    coefficients.append(value)
        return coefficients

    def _factor(self, name: str) -> float:
        return {"": 1, "R": self.ranks, "M": self.micro_batches, "RM": self.ranks * self.micro_batches}[name]

    def _by_place(self, grouping: str, table: Table) -> Table:
        R, M = self.ranks, self.micro_batches
        by_rank = [sum(row) for row in table]
        by_micro_batch = [sum(row[m] for row in table) for m in range(M)]
        total = sum(by_rank)
        divisors = {
            "window": [[total] * M] * R,
            "micro_batch": [[M * count for count in by_micro_batch]] * R,
            "rank": [[R * count] * M for count in by_rank],
            "rank_and_micro_batch": [[R * M * count for count in row] for row in table],
        }
        return [[_over(1.0, divisor) for divisor in row] for row in divisors.get(grouping, [[0.0] * M] * R)]

    def _present(self, mask: str) -> set[tuple[int, int]]:
        everything = {(r, m) for r in range(self.ranks) for m in range(self.micro_batches)}
        if mask.startswith("without the skipped"):
            return everything - self.skipped
        if mask == "all" or self.ranks == 1:
            return everything
        if mask.startswith("own rank"):
            return {place for place in everything if place[0] == self.observer}
        gone = {"without rank 0": 0, "without rank 1": 1}.get(mask, self.ranks - 1)
        return {place for place in everything if place[0] != gone}


def _over(numerator: float, denominator: float) -> float:
    """Nothing was counted, so nothing is there to be weighted."""
    return numerator / denominator if denominator else 0.0
