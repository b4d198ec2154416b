"""Which mistake explains the gradients of all layouts at once.

Every hypothesis (a definition of the loss, a rule for the coefficients, a scale) predicts the gradient of every
window. The simplest one whose relative residual is within tolerance in every window is the diagnosis; if several
equally simple ones are, the audit says that it can't tell; if none is, that it is none of the known ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.audit.catalogue import CATALOGUE, describe, in_order
from tokennorm.audit.coefficients import Rule, Split, rules
from tokennorm.audit.compare import solve_weights
from tokennorm.audit.definitions import DEFINITIONS, WrongGradients
from tokennorm.audit.evidence import Evidence, extra_weights
from tokennorm.audit.factors import FACTORS, WindowSize

__all__ = ["Diagnosis", "diagnose"]

_MAX_MISTAKES = 3
# A weight below this part of the largest is that of a micro-batch that was left out.
_SKIPPED = 1e-3
# Half precision: how large the error may be, and which part of its square the prediction must explain.
_LARGEST_ROUNDING = 0.05
_EXPLAINED = 0.5
# By which factor the size of an unexplained error may differ from that of half precision.
_ALIKE = 3.0


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is wrong.

    Args:
        name: a stable identifier from the catalogue; ``unknown`` or ``cannot_tell`` if need be.
        also: further mistakes of the same loop.
        candidates: for ``cannot_tell``, the explanations that fit equally well; for ``unknown``, the nearest.
        residual: largest relative part of a window's gradient that the diagnosis leaves unexplained.
        explanation: one sentence.
        fix: what to do.
    """

    name: str
    also: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    residual: float = math.nan
    explanation: str = ""
    fix: str = ""


def named(names: Sequence[str], *, residual: float = math.nan, candidates: Sequence[str] = ()) -> Diagnosis:
    """A diagnosis with the catalogue's words."""
    ordered = in_order(set(names))
    explanation, fix = describe(ordered)
    return Diagnosis(
        name=ordered[0],
        also=ordered[1:],
        candidates=tuple(candidates),
        residual=residual,
        explanation=explanation,
        fix=fix,
    )


@dataclass(kw_only=True)
class _Observation:
    """One gradient to explain ``[P']``, and the bases to explain it from."""

    gradient: Tensor
    size: WindowSize
    split: Split
    samples: Tensor  # [n, P'], the right definition
    parts: Tensor | None  # [n, P']
    extras: Tensor | None  # [e, P']
    micro_batches: dict[str, tuple[Tensor, list[list[float]]]]  # by definition: [RM, P'] and own counts


@dataclass(frozen=True, kw_only=True)
class _Hypothesis:
    names: tuple[str, ...]
    cost: float
    residual: float


def diagnose(
    windows: Sequence[Evidence],
    wrong: Sequence[list[list[WrongGradients]]],
    *,
    tolerance: float,
    coordinates: Tensor | None = None,
) -> Diagnosis:
    """Explain windows that are finite, not all exact, and stepped once.

    Args:
        windows: the evidence.
        wrong: for each window, the micro-batches under wrong definitions.
        tolerance: relative residual up to which a window counts as explained.
        coordinates: ``[P']``, the entries of the flat gradient that ``wrong`` holds; None for all.
    """
    observations = [
        _observation(evidence, gradients, observer, coordinates)
        for evidence, gradients in zip(windows, wrong, strict=True)
        if evidence.due > 0
        for observer in _observers(evidence, windows)
    ]
    if not observations:
        return named(["unknown"])
    reordered = any(evidence.scaled_after_clipping is not None for evidence in windows)
    prefix = ("clipped_before_rescaling",) if reordered else ()
    searches = [("", observations), ("gradients_not_cleared", _without_previous(windows, observations))]
    found = []
    for name, kept in searches:
        if kept:
            for hypothesis in _search(kept, tolerance, rounding=False):
                names = (*prefix, name, *hypothesis.names) if name else (*prefix, *hypothesis.names)
                found.append((names, hypothesis))
    accepted = [(n, h) for n, h in found if h.residual <= tolerance and _applies(n, observations)]
    if accepted:
        return _simplest(accepted)
    rounding = [h for h in _search(observations, tolerance, rounding=True) if _applies(h.names, observations)]
    if rounding:
        best = min(rounding, key=lambda h: (len(h.names), h.residual))
        return named((*prefix, *best.names), residual=best.residual)
    alike = _like_rounding(observations)
    if alike:
        return _unsure(alike) if len(alike) > 1 else named(alike)
    nearest = sorted((h.residual, "+".join(in_order(set(n)))) for n, h in found if n)
    return named(
        ["unknown"],
        residual=nearest[0][0] if nearest else math.nan,
        candidates=[f"{name} ({residual:.1%} unexplained)" for residual, name in nearest[:1]],
    )


def _observers(evidence: Evidence, windows: Sequence[Evidence]) -> range:
    """Ranks to explain: one if all agree; after ranks have stepped apart, only the one whose weights are known."""
    apart = any(e.layout is evidence.layout and e.window < evidence.window and not e.ranks_agree for e in windows)
    return range(1) if apart or evidence.ranks_agree else range(evidence.ranks)


def _simplest(accepted: list[tuple[tuple[str, ...], _Hypothesis]]) -> Diagnosis:
    def cost(item: tuple[tuple[str, ...], _Hypothesis]) -> float:
        names, hypothesis = item
        return len(set(names)) + hypothesis.cost

    least = min(map(cost, accepted))
    best: dict[tuple[str, ...], float] = {}
    for names, hypothesis in accepted:
        if cost((names, hypothesis)) == least:
            key = in_order(set(names))
            best[key] = min(best.get(key, math.inf), hypothesis.residual)
    if () in best:
        return named(["rounding"], residual=best[()])
    if len(best) == 1:
        key, residual = next(iter(best.items()))
        return named(key, residual=residual)
    return _unsure(["+".join(key) for key in sorted(best, key=lambda key: best[key])], max(best.values()))


def _unsure(candidates: Sequence[str], residual: float = math.nan) -> Diagnosis:
    return Diagnosis(
        name="cannot_tell",
        candidates=tuple(candidates),
        residual=residual,
        explanation=f"these explain the layouts equally well: {', '.join(candidates)}",
        fix=CATALOGUE["cannot_tell"].fix,
    )


def _like_rounding(observations: Sequence[_Observation]) -> list[str]:
    """Kinds of half precision that would err as much as this, where none rounds in the same places.

    How half precision rounds depends on what a loop multiplies its loss by; how much, hardly.
    """
    alike = []
    for definition in DEFINITIONS:
        ratios = []
        for o in observations:
            if definition.key not in o.micro_batches or not o.gradient.any():
                break
            vectors, own = o.micro_batches[definition.key]
            right = o.samples.sum(0) / o.split.due
            error = float((o.gradient - right).norm() / right.norm())
            predicted = float((vectors.sum(0) / sum(map(sum, own)) - right).norm() / right.norm())
            if not definition.rounds or error > _LARGEST_ROUNDING or o.extras is not None:
                break
            ratios.append(error / max(predicted, 1e-300))
        else:
            # A systematic error of the same size has another ratio in every window.
            if ratios and min(ratios) > 1 / _ALIKE and max(ratios) < _ALIKE:
                alike.extend(name for name in definition.names if name not in alike)
    return alike


def _applies(names: Sequence[str], observations: Sequence[_Observation]) -> bool:
    """Mistakes between ranks need ranks, and so on: elsewhere they are another name for a simpler one."""
    ranks = max(o.size.ranks for o in observations)
    micro_batches = max(o.size.micro_batches for o in observations)
    known = [CATALOGUE[name] for name in names if name in CATALOGUE]
    return not any((m.needs_ranks and ranks == 1) or (m.needs_micro_batches and micro_batches == 1) for m in known)


def _search(observations: Sequence[_Observation], tolerance: float, *, rounding: bool) -> list[_Hypothesis]:
    """Every hypothesis with its residual; for half precision, only those that explain most of the error."""
    skipped = any(o.split.skipped for o in observations) and not _whole_ranks(observations)
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
    if not rounding:
        found = _evaluate(observations, None, (), right, tolerance)
    else:
        found = []
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
            found += _evaluate(
                observations, definition.key, definition.names, elsewhere, tolerance, rounding=rounding
            )
    return found


def _evaluate(
    observations: Sequence[_Observation],
    key: str | None,
    names: tuple[str, ...],
    grid: Sequence[Rule],
    tolerance: float,
    *,
    rounding: bool = False,
) -> list[_Hypothesis]:
    """The best scale for every rule of the grid under one definition of the loss."""
    part_names = ("label_smoothing",)
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
                residual < _LARGEST_ROUNDING
                and float(torch.stack([e[place] for e in exact_po]).mean()) > _EXPLAINED
            ):
                continue
            found.append(_Hypothesis(names=all_names, cost=factor.cost, residual=residual))
    return found


def _explained(observed: Tensor, exact: Tensor, rounded: Tensor) -> Tensor:
    """Which part ``[H]`` of the squared error against exact arithmetic the rounded prediction explains."""
    error, left = observed - exact, observed - rounded
    return 1 - (left**2).sum(1) / (error**2).sum(1).clamp_min(1e-300)


def _predictions(observation: _Observation, key: str | None, grid: Sequence[Rule]) -> tuple[Tensor, Tensor]:
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
    return Split(
        ranks=split.ranks,
        micro_batches=split.micro_batches,
        due=split.due,
        places=places,
        vector_counts=vector_counts,
        counts={**split.counts, "own": own},
        skipped=split.skipped,
        observer=split.observer,
        extra_weights=split.extra_weights,
    )


def _observation(
    evidence: Evidence, wrong: list[list[WrongGradients]], observer: int, coordinates: Tensor | None
) -> _Observation:
    R, M = evidence.ranks, evidence.micro_batches
    true = [[0.0] * M for _ in range(R)]
    for group, count in zip(evidence.groups, evidence.counts.tolist(), strict=True):
        true[group.rank][group.micro_batch] += count
    counts = {"true": true, "own": true}
    others = [[cell.other_counts for cell in row] for row in wrong]
    if all(cell is not None for row in others for cell in row):
        for kind in ("before_shift", "positions", "shifted_positions", "tokens", "shifted_tokens"):
            counts[kind] = [[getattr(cell, kind) for cell in row] for row in others]

    def taken(values: Tensor) -> Tensor:
        return values if coordinates is None else values[..., coordinates]

    places = [(group.rank, group.micro_batch) for group in evidence.groups]
    samples = taken(evidence.gradients)
    right = {
        (r, m): samples[[i for i, place in enumerate(places) if place == (r, m)]].sum(0)
        for r in range(R)
        for m in range(M)
    }
    keys = {key for row in wrong for cell in row for key in cell.gradients}
    micro_batches = {}
    for key in keys:
        vectors = [wrong[r][m].gradients.get(key, right[r, m]) for r in range(R) for m in range(M)]
        own = [[wrong[r][m].counts.get(key, true[r][m]) for m in range(M)] for r in range(R)]
        micro_batches[key] = (torch.stack(vectors), own)
    extras = [extra.gradient for rows in evidence.extras.values() for row in rows for extra in row]
    return _Observation(
        gradient=taken(evidence.observed[observer]),
        size=WindowSize(ranks=R, micro_batches=M, configured=evidence.layout.accumulation_steps, due=evidence.due),
        split=Split(
            ranks=R,
            micro_batches=M,
            due=evidence.due,
            places=places,
            vector_counts=evidence.counts.tolist(),
            counts=counts,
            skipped=_skipped(evidence),
            observer=observer,
            extra_weights=[
                extra_weights(rows, evidence.groups, evidence.counts).tolist() for rows in evidence.extras.values()
            ],
        ),
        samples=samples,
        parts=taken(torch.stack(list(evidence.parts.values())).sum(0)) if evidence.parts else None,
        extras=taken(torch.stack(extras)) if extras else None,
        micro_batches=micro_batches,
    )


def _skipped(evidence: Evidence) -> frozenset[tuple[int, int]]:
    """Micro-batches with tokens whose solved weight is nothing next to the largest."""
    weights, _ = solve_weights(evidence)
    largest = max((abs(w.weight) for w in weights), default=0.0)
    heaviest: dict[tuple[int, int], float] = {}
    for w in weights:
        place = (w.rank, w.micro_batch)
        heaviest[place] = max(heaviest.get(place, 0.0), abs(w.weight))
    skipped = {place for place, weight in heaviest.items() if weight < _SKIPPED * largest}
    return frozenset(skipped)


def _whole_ranks(observations: Sequence[_Observation]) -> bool:
    """What is left out is, in every window, everything that some ranks had: then it is the rank that is missing."""
    for observation in observations:
        split = observation.split
        ranks = {rank for rank, _ in split.skipped}
        if ranks and split.ranks == 1:
            return False
        with_tokens = {p for p, count in zip(split.places, split.vector_counts, strict=True) if count}
        if any(place not in split.skipped for place in with_tokens if place[0] in ranks):
            return False
    return True


def _without_previous(windows: Sequence[Evidence], observations: Sequence[_Observation]) -> list[_Observation]:
    """The observations with the previous window's gradient taken out of each second window's."""
    stepped = [evidence for evidence in windows if evidence.due > 0]
    if not all(evidence.ranks_agree for evidence in stepped) or all(e.window == 0 for e in stepped):
        return []
    kept = []
    for place, (evidence, observation) in enumerate(zip(stepped, observations, strict=True)):
        before = place - 1
        if evidence.window and (before < 0 or stepped[before].layout is not evidence.layout):
            return []
        gradient = observation.gradient
        if evidence.window:
            gradient = gradient - observations[before].gradient
        if not gradient.any():
            return []
        kept.append(_Observation(**{**vars(observation), "gradient": gradient}))
    return kept
