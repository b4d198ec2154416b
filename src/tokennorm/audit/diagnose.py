"""Which mistake explains the gradients of all layouts at once.

Every hypothesis (a definition of the loss, a rule for the coefficients, a scale) predicts the gradient of every
window. The simplest one whose relative residual is within tolerance in every window is the diagnosis; if several
equally simple ones are, the audit says that it can't tell; if none is, that it is none of the known ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tokennorm.audit.catalogue import CATALOGUE, describe, in_order
from tokennorm.audit.definitions import DEFINITIONS
from tokennorm.audit.evidence import Evidence
from tokennorm.audit.fit import LARGEST_ROUNDING, Hypothesis, search
from tokennorm.audit.observation import Observation, observe_windows, without_previous
from tokennorm.audit.wrong_gradients import WrongGradients

__all__ = ["Diagnosis", "diagnose", "named"]

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
    observations = observe_windows(windows, wrong, coordinates)
    if not observations:
        return named(["unknown"])
    reordered = any(evidence.scaled_after_clipping is not None for evidence in windows)
    prefix = ("clipped_before_rescaling",) if reordered else ()
    searches = [("", observations), ("gradients_not_cleared", without_previous(windows, observations))]
    found = []
    for name, kept in searches:
        if kept:
            for hypothesis in search(kept, rounding=False):
                names = (*prefix, name, *hypothesis.names) if name else (*prefix, *hypothesis.names)
                found.append((names, hypothesis))
    accepted = [(n, h) for n, h in found if h.residual <= tolerance and _applies(n, observations)]
    if accepted:
        return _simplest(accepted)
    rounding = [h for h in search(observations, rounding=True) if _applies(h.names, observations)]
    if rounding:
        best = min(rounding, key=lambda h: (len(h.names), h.residual))
        return named((*prefix, *best.names), residual=best.residual)
    alike = _like_rounding(observations)
    if alike:
        return _unsure(alike) if len(alike) > 1 else named(alike)
    names, nearest = min(found, key=lambda item: item[1].residual)
    name = "+".join(in_order(set(names))) or "no mistake"
    return named(
        ["unknown"],
        residual=nearest.residual,
        candidates=[f"{name} ({nearest.residual:.1%} unexplained)"],
    )


def _simplest(accepted: list[tuple[tuple[str, ...], Hypothesis]]) -> Diagnosis:
    def cost(item: tuple[tuple[str, ...], Hypothesis]) -> float:
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


def _like_rounding(observations: Sequence[Observation]) -> list[str]:
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
            if not definition.rounds or error > LARGEST_ROUNDING or o.extras is not None:
                break
            ratios.append(error / max(predicted, 1e-300))
        else:
            # A systematic error of the same size has another ratio in every window.
            if ratios and min(ratios) > 1 / _ALIKE and max(ratios) < _ALIKE:
                alike.extend(name for name in definition.names if name not in alike)
    return alike


def _applies(names: Sequence[str], observations: Sequence[Observation]) -> bool:
    """Mistakes between ranks need ranks, and so on: elsewhere they are another name for a simpler one."""
    ranks = max(o.size.ranks for o in observations)
    micro_batches = max(o.size.micro_batches for o in observations)
    known = [CATALOGUE[name] for name in names if name in CATALOGUE]
    return not any((m.needs_ranks and ranks == 1) or (m.needs_micro_batches and micro_batches == 1) for m in known)
