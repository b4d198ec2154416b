"""Gradients to explain, each with the bases that hypotheses explain it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokennorm.audit.coefficients import Split
from tokennorm.audit.compare import solve_weights
from tokennorm.audit.evidence import Evidence, extra_weights
from tokennorm.audit.factors import WindowSize
from tokennorm.audit.wrong_gradients import WrongGradients

__all__ = ["Observation", "observe_windows", "only_whole_ranks_skipped", "without_previous"]

# A weight below this part of the largest is that of a micro-batch that was left out.
_SKIPPED = 1e-3


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One window as one rank's optimizer read it. P' is the number of places that are compared.

    Args:
        gradient: ``[P']``.
        size: R, M, D.
        split: where every vector of the basis belongs.
        samples: ``[n, P']``, gradients of the groups of the window under the right definition.
        parts: ``[n, P']``, the part of each that ``part_names`` are; None if the loss has no parts.
        extras: ``[e, P']``, gradients of the extras of all micro-batches; None if there are none.
        micro_batches: by wrong definition, ``[RM, P']`` and own counts ``[rank][micro-batch]``.
    """

    gradient: Tensor
    size: WindowSize
    split: Split
    samples: Tensor
    parts: Tensor | None
    part_names: tuple[str, ...]
    extras: Tensor | None
    micro_batches: dict[str, tuple[Tensor, list[list[float]]]]


def observe_windows(
    windows: Sequence[Evidence], wrong: Sequence[list[list[WrongGradients]]], coordinates: Tensor | None
) -> list[Observation]:
    """One observation per window, or per rank where ranks disagree; windows without tokens have none."""
    return [
        _observation(evidence, gradients, observer, coordinates)
        for evidence, gradients in zip(windows, wrong, strict=True)
        if evidence.due > 0
        for observer in _observers(evidence, windows)
    ]


def _observers(evidence: Evidence, windows: Sequence[Evidence]) -> range:
    """Ranks to explain: one if all agree; after ranks have stepped apart, only the one whose weights are known."""
    apart = any(e.layout is evidence.layout and e.window < evidence.window and not e.ranks_agree for e in windows)
    return range(1) if apart or evidence.ranks_agree else range(evidence.ranks)


def _observation(
    evidence: Evidence, wrong: list[list[WrongGradients]], observer: int, coordinates: Tensor | None
) -> Observation:
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
    return Observation(
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
        part_names=tuple(evidence.parts),
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


def only_whole_ranks_skipped(observations: Sequence[Observation]) -> bool:
    """What is left out is, in every window, all that some ranks had: then it is the rank that is missing."""
    for observation in observations:
        split = observation.split
        ranks = {rank for rank, _ in split.skipped}
        if ranks and split.ranks == 1:
            return False
        with_tokens = {p for p, count in zip(split.places, split.vector_counts, strict=True) if count}
        if any(place not in split.skipped for place in with_tokens if place[0] in ranks):
            return False
    return True


def without_previous(windows: Sequence[Evidence], observations: Sequence[Observation]) -> list[Observation]:
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
        kept.append(replace(observation, gradient=gradient))
    return kept
