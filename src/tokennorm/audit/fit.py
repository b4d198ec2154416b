"""Hypotheses, and what each leaves unexplained of the gradients of all windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokennorm.audit.coefficients import Rule, Split, rules
from tokennorm.audit.definitions import DEFINITIONS
from tokennorm.audit.factors import FACTORS
from tokennorm.audit.observation import Observation, only_whole_ranks_skipped

__all__ = ["LARGEST_ROUNDING", "Hypothesis", "search"]

_MAX_MISTAKES = 3
# Half precision: how large the error may be, and which part of its square the prediction must explain.
LARGEST_ROUNDING = 0.05
_EXPLAINED = 0.5


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """The mistakes in it, the freedom that it has, and the largest relative residual of any window."""

    names: tuple[str, ...]
    cost: float
    residual: float


def search(observations: Sequence[Observation], *, rounding: bool) -> list[Hypothesis]:
    """Every hypothesis with its residual; for half precision, only those that explain most of the error."""
    skipped = any(o.split.skipped for o in observations) and not only_whole_ranks_skipped(observations)
    ranks = max(o.size.ranks for o in observations)
    masks = ["all"]
    if ranks > 1:
        masks += ["own rank x R", "own rank", "without rank 0", "without rank 1", "without the last rank"]
    if skipped:
        masks += ["without the skipped", "without the skipped, uncounted"]
    has_counts = all("positions" in o.split.counts for o in observations)
    counts = ["before_shift", "positions", "shifted_positions", "tokens", "shifted_tokens"] if has_counts else []
    groupings = ["window", "micro_batch", "rank", "rank_and_micro_batch"]
    has_extras = any(o.extras is not None for o in observations)
    has_parts = any(o.parts is not None for o in observations)
    right = list(
        rules(
            counts=["true", *counts],
            groupings=[*groupings, "sample", "sample_in_micro_batch"],
            masks=masks,
            extras=has_extras,
            parts=has_parts,
        )
    )
    found = [] if rounding else _evaluate(observations, None, (), right)
    elsewhere = list(
        rules(
            counts=["own", "true", *counts[:2]],
            groupings=groupings,
            masks=masks[:1],
            extras=has_extras,
            parts=False,
        )
    )
    for definition in DEFINITIONS:
        if definition.rounds == rounding and any(definition.key in o.micro_batches for o in observations):
            found += _evaluate(observations, definition.key, definition.names, elsewhere, rounding=rounding)
    return found


def _evaluate(
    observations: Sequence[Observation],
    key: str | None,
    names: tuple[str, ...],
    grid: Sequence[Rule],
    *,
    rounding: bool = False,
) -> list[Hypothesis]:
    """The best scale for every rule of the grid under one definition of the loss."""
    part_names = observations[0].part_names
    wanted = [
        (rule, tuple(sorted({*names, *rule.names(part_names)})))
        for rule in grid
        if len({*names, *rule.names(part_names)}) <= _MAX_MISTAKES
    ]
    chosen = [rule for rule, _ in wanted]
    pp, po, exact_po = [], [], []
    for observation in observations:
        basis, coefficients = _predictions(observation, key, chosen)
        gram, product = basis @ basis.T, basis @ observation.gradient
        pp.append(((coefficients @ gram) * coefficients).sum(1))
        po.append(coefficients @ product)
        if rounding:
            right_basis, right = _predictions(observation, None, chosen)
            exact_po.append(_explained(observation.gradient, right @ right_basis, coefficients @ basis))
    pp, po = torch.stack(pp), torch.stack(po)
    exact_oo = torch.stack([o.gradient @ o.gradient for o in observations])[:, None]
    oo = exact_oo.clamp_min(1e-300)
    sizes = [o.size for o in observations]
    found = []
    for factor in FACTORS[:1] if rounding else FACTORS:
        scales = factor.scales(sizes, pp, po, oo)
        residuals = ((exact_oo - 2 * scales * po + scales**2 * pp).clamp_min(0) / oo).sqrt()
        worst = residuals.amax(0)
        for place, (_, rule_names) in enumerate(wanted):
            all_names = tuple(sorted({*rule_names, *factor.names}))
            residual = float(worst[place])
            if math.isnan(residual) or len(all_names) > _MAX_MISTAKES:
                continue
            if rounding and not (
                residual < LARGEST_ROUNDING
                and float(torch.stack([e[place] for e in exact_po]).mean()) > _EXPLAINED
            ):
                continue
            found.append(Hypothesis(names=all_names, cost=factor.cost, residual=residual))
    return found


def _explained(observed: Tensor, exact: Tensor, rounded: Tensor) -> Tensor:
    """Which part ``[H]`` of the squared error against exact arithmetic the rounded prediction explains."""
    error, left = observed - exact, observed - rounded
    return 1 - (left**2).sum(1) / (error**2).sum(1).clamp_min(1e-300)


def _predictions(observation: Observation, key: str | None, grid: Sequence[Rule]) -> tuple[Tensor, Tensor]:
    """The basis ``[n, P']`` of a definition, and every rule's coefficients ``[H, n]`` in it."""
    split = observation.split
    if key is None or key not in observation.micro_batches:
        basis = [observation.samples]
        if observation.parts is not None:
            basis.append(observation.parts)
        if key is not None:
            split = _with_own_counts(split, split.counts["true"], split.places, split.vector_counts)
    else:
        vectors, own = observation.micro_batches[key]
        places = [(r, m) for r in range(split.ranks) for m in range(split.micro_batches)]
        split = _with_own_counts(split, own, places, [own[r][m] for r, m in places])
        basis = [vectors]
    with_parts = len(basis) == 2
    rows = []
    for rule in grid:
        main = split.main(rule)
        row = list(main)
        if with_parts:
            row += [p - m for p, m in zip(split.part(rule, main), main, strict=True)]
        if observation.extras is not None:
            row += split.extra(rule)
        rows.append(row)
    if observation.extras is not None:
        basis.append(observation.extras)
    return torch.cat(basis), torch.tensor(rows, dtype=torch.float64)


def _with_own_counts(
    split: Split, own: list[list[float]], places: Sequence[tuple[int, int]], vector_counts: Sequence[float]
) -> Split:
    return replace(split, places=places, vector_counts=vector_counts, counts={**split.counts, "own": own})
