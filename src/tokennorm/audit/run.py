"""The course of one audit: observe, compare, and, where something is off, find out what."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from tokennorm.audit.compare import WindowResult, compare_window
from tokennorm.audit.definitions import DEFINITIONS
from tokennorm.audit.diagnose import Diagnosis, diagnose, named
from tokennorm.audit.evidence import Evidence, undo_own_clipping, window_evidence
from tokennorm.audit.fit import LARGEST_ROUNDING
from tokennorm.audit.jobs import Description, Observe
from tokennorm.audit.launcher import Outcome
from tokennorm.audit.layouts import Layout
from tokennorm.audit.observe import WindowRecord
from tokennorm.audit.reference import ReferenceJob, WindowKey
from tokennorm.audit.workers import Workers
from tokennorm.audit.wrong_gradients import DefinitionsJob
from tokennorm.errors import AuditError

__all__ = ["Run", "is_exact"]

# A diagnosis compares gradients in this many places; more tell no more.
_COORDINATES = 20_000
# Relative error that a right loop may have by rounding alone, by dtype; half precision is measured.
# (Loops in float64 often compute their loss in float32: that is not what an audit is for.)
_TOLERANCES = {torch.float64: 5e-6, torch.float32: 5e-6}
_FLOORS = 4.0
_FIT = 5.0
# One job of the audit itself does the work of many layouts.
_PATIENCE = 10.0
# Wrong definitions of the loss cost a backward each, so they are tried where wrong weights alone (one mistake)
# don't explain the gradients; half precision, which explains none to the last digit, comes last.
_STAGES = (
    ((), True),
    (tuple(d for d in DEFINITIONS if not d.rounds), False),
    (tuple(d for d in DEFINITIONS if d.rounds), False),
)
# Gram matrices of float64 gradients resolve relative residuals down to here.
_SMALLEST_FIT = 1e-6


class Run:
    """The state of one audit: what was observed, and what it was compared with."""

    def __init__(
        self,
        workers: Workers,
        description: Description,
        layouts: Sequence[Layout],
        samples: Sequence[Any],
        say: Callable[[str], None],
    ) -> None:
        self.workers, self.description, self.layouts, self.samples = workers, description, layouts, samples
        self.say = say
        self.records: dict[int, list[list[WindowRecord]]] = {}
        self.failures: dict[int, Outcome] = {}
        self.states: list[dict[str, Tensor]] = []
        self.windows: dict[WindowKey, int] = {}
        self.evidence: dict[WindowKey, Evidence] = {}
        self.results: dict[WindowKey, WindowResult] = {}
        self.own_clipping: float | None = None

    def observe(self) -> None:
        """Run the loop under every layout, one group of ranks per number of ranks."""
        for world_size in sorted({layout.ranks for layout in self.layouts}):
            places = [place for place, layout in enumerate(self.layouts) if layout.ranks == world_size]
            self.say(f"running {_count(places, 'layout')} on {_count(range(world_size), 'rank')}")
            jobs = [Observe(layout=self.layouts[place], samples=self.samples) for place in places]
            for place, outcome in zip(places, self.workers.run(world_size, jobs), strict=True):
                if outcome.values is None:
                    self.failures[place] = outcome
                else:
                    self.records[place] = outcome.values
        for place, records in self.records.items():
            for window, record in enumerate(records[0]):
                self.windows[place, window] = self._state(record.parameters)

    def _state(self, parameters: dict[str, Tensor]) -> int:
        """The number of this set of parameters; most windows begin with the same."""
        for number, known in enumerate(self.states):
            if known.keys() == parameters.keys() and all(torch.equal(known[k], parameters[k]) for k in known):
                return number
        self.states.append(parameters)
        return len(self.states) - 1

    def compare(self) -> None:
        """Compute the reference of every window that the loop got through."""
        shapes = self.description.shapes
        finite = {
            key: state
            for key, state in self.windows.items()
            if all(torch.isfinite(value).all() for value in self.states[state].values())
        }
        if not finite:
            return
        job = ReferenceJob(
            layouts=self.layouts, samples=self.samples, states=self.states, windows=finite, shapes=shapes
        )
        self.say(f"computing the reference of {_count(finite, 'window')} in float64")
        reference = self.in_one_process(job, "the reference can't be computed")
        for key, state in finite.items():
            records = [rank[key[1]] for rank in self.records[key[0]]]
            self.evidence[key] = window_evidence(self.layouts, key, records, state, reference, shapes)
        self.own_clipping = undo_own_clipping(list(self.evidence.values()))
        self.results = {key: compare_window(evidence, shapes) for key, evidence in self.evidence.items()}

    def in_one_process(self, job: Any, what: str) -> Any:
        """Run a job of the audit itself; its failure is the audit's failure."""
        (outcome,) = self.workers.run(1, [job], patience=_PATIENCE)
        if outcome.values is None:
            raise AuditError(f"{what}:\n{outcome.text}")
        return outcome.values[0]

    def default_tolerance(self) -> float:
        """What rounding alone may do in the loop's dtype."""
        dtype = self.description.dtype
        floor = max((evidence.floor for evidence in self.evidence.values()), default=0.0)
        return max(_FLOORS * floor, _TOLERANCES.get(dtype, torch.finfo(dtype).eps))

    def diagnosis(self, verdicts: dict[WindowKey, bool], tolerance: float) -> Diagnosis:
        """What is wrong: plain observations first, then the fit over all windows.

        Args:
            verdicts: which windows are exact.
            tolerance: that they were held to.
        """
        evidence = self.evidence
        if not evidence:
            return named(["loop_failed"])
        if any(e.steps == 0 for e in evidence.values()):
            return named(["optimizer_never_stepped"])
        if any(e.steps > 1 for e in evidence.values()):
            return named(["several_steps_per_window"])
        finite = {key: e for key, e in evidence.items() if e.finite}
        if all(verdicts[key] for key in finite):
            return self._not_finite(list(finite.values()))
        if not any(e.observed.any() for e in finite.values()):
            return named(["parameters_without_gradient"])
        found = self._fit(finite, tolerance)
        if found.name == "unknown" and any(e.missing for e in finite.values()):
            return named(["parameters_without_gradient"])
        return found

    def _not_finite(self, finite: list[Evidence]) -> Diagnosis:
        """Every window that is finite is exact; why are the others not?"""
        broken = [e for e in self.evidence.values() if not e.finite]
        if not broken:
            return named(["loop_failed"])
        empty = all(map(_has_empty_micro_batch, broken)) and not any(map(_has_empty_micro_batch, finite))
        return named(["nan_from_empty_micro_batch" if empty else "not_finite"])

    def _fit(self, finite: dict[WindowKey, Evidence], tolerance: float) -> Diagnosis:
        """Try the catalogue, in stages of rising cost."""
        parameters = sum(torch.Size(shape).numel() for shape in self.description.shapes.values())
        coordinates = None
        if parameters > _COORDINATES:
            generator = torch.Generator().manual_seed(0)
            coordinates = torch.randperm(parameters, generator=generator)[:_COORDINATES]
        found = named(["unknown"])
        self.say("not exact: looking for the mistake")
        for definitions, simple in _STAGES:
            job = DefinitionsJob(
                layouts=self.layouts,
                samples=self.samples,
                states=self.states,
                windows={key: self.windows[key] for key in finite},
                shapes=self.description.shapes,
                coordinates=coordinates,
                keys=frozenset(d.key for d in definitions),
                due={key: e.due for key, e in finite.items()},
            )
            wrong = self.in_one_process(job, "the catalogue of mistakes can't be computed")
            found = diagnose(
                list(finite.values()),
                [wrong[key] for key in finite],
                tolerance=max(_FIT * tolerance, _SMALLEST_FIT),
                coordinates=coordinates,
            )
            if found.name != "unknown" and not (simple and found.also):
                break
            if not simple and not found.residual < LARGEST_ROUNDING:
                break  # too far off for half precision
        return found


def is_exact(result: WindowResult, evidence: Evidence, tolerance: float) -> bool:
    """Whether a window is finite, stepped once, and within tolerance before and after clipping."""
    return (
        evidence.finite
        and evidence.steps == 1
        and result.error <= tolerance
        and result.error_after_clipping <= tolerance
    )


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _has_empty_micro_batch(evidence: Evidence) -> bool:
    full = {(g.rank, g.micro_batch) for g, count in zip(evidence.groups, evidence.counts, strict=True) if count}
    return len(full) < evidence.ranks * evidence.micro_batches
