"""Audit a training loop: run it under many layouts and hold every gradient against the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tokennorm.audit.compare import WindowResult, compare_window, spread
from tokennorm.audit.definitions import DEFINITIONS, DefinitionsJob
from tokennorm.audit.diagnose import Diagnosis, diagnose, named
from tokennorm.audit.evidence import Evidence, undo_own_clipping, window_evidence
from tokennorm.audit.jobs import Describe, Description, LoopUnderTest, Observe
from tokennorm.audit.launcher import Outcome
from tokennorm.audit.layouts import Layout, default_layouts
from tokennorm.audit.notes import make_notes
from tokennorm.audit.observe import WindowRecord
from tokennorm.audit.reference import ReferenceJob, WindowKey
from tokennorm.audit.report import AuditReport, LayoutReport, TokenWeights
from tokennorm.audit.samples import collate, make_samples
from tokennorm.audit.token_loss import CausalTokenLoss
from tokennorm.audit.workers import Workers
from tokennorm.errors import AuditError, ConfigError

__all__ = ["assert_token_normalised", "audit_loop"]

_MAX_PARAMETERS = 4_000_000
# A diagnosis compares gradients in this many places; more tell no more.
_COORDINATES = 20_000
# Relative error that a right loop may have by rounding alone, by dtype; half precision is measured.
# (Loops in float64 often compute their loss in float32: that is not what an audit is for.)
_TOLERANCES = {torch.float64: 5e-6, torch.float32: 5e-6}
_FLOORS = 4.0
_FIT = 5.0
# Wrong definitions of the loss cost a backward each, so they are tried where wrong weights alone (one mistake) don't
# explain the gradients; half precision, which explains no gradient to the last digit, comes last.
_STAGES = (
    ((), True),
    (tuple(d for d in DEFINITIONS if not d.rounds), False),
    (tuple(d for d in DEFINITIONS if d.rounds), False),
)
# Gram matrices of float64 gradients resolve relative residuals down to here.
_SMALLEST_FIT = 1e-6


def audit_loop(
    build: Callable[..., Any],
    step: Callable[..., Any],
    *,
    token_loss: Callable[..., Any] | None = None,
    layouts: Sequence[Layout] | None = None,
    make_batch: Callable[..., Any] | None = None,
    samples: Sequence[Any] | None = None,
    ranks: Sequence[int] = (1, 2, 3),
    packed: bool | None = None,
    label_smoothing: float = 0.0,
    reference_model: Callable[[], Any] | None = None,
    vocabulary_size: int | None = None,
    tolerance: float | None = None,
    timeout_s: float = 30.0,
    start_method: Literal["auto", "spawn", "fork"] = "auto",
    seed: int = 0,
) -> AuditReport:
    """Learn whether a loop's gradient is that of the token-normalised objective, by how much it is off, and why.

    The loop runs on the CPU, in child processes that are joined by gloo already (``torch.distributed`` is
    initialised, also for one rank). Use a tiny model: a few thousand parameters tell as much as a billion.

    Args:
        build: ``build() -> (model, optimizer)``, or ``build(layout)`` for a loop that is configured with
            ``layout.accumulation_steps``. Called anew for every layout, with the same seed on every rank. The
            model may be wrapped (DDP, FSDP2, ``torch.compile``); the optimizer too, as long as a
            ``torch.optim.Optimizer`` is inside.
        step: ``step(model, optimizer, micro_batches)``, one optimizer step of the loop on this rank's
            micro-batches. What it returns is optional: the logged loss, or a mapping with ``loss``, ``grad_norm``,
            ``tokens``.
        token_loss: what "right" means: ``token_loss(model, batch) -> (loss[T], weight[T], segment[T])`` or a
            :class:`TokenLoss`. Default: next-token cross-entropy of ``labels``, plus the router loss of a model
            that returns ``aux_loss``.
        layouts: default :func:`default_layouts`.
        make_batch: ``make_batch(samples, packed)`` collates a list of samples into one micro-batch. Default:
            ``input_ids``, ``labels`` and ``attention_mask``, or ``position_ids`` if packed.
        samples: what micro-batches are made of; default :func:`make_samples`. Layouts refer to them by number,
            modulo their number.
        ranks: of the default layouts, run those with these numbers of ranks; ``(1,)`` for a loop that is meant for
            one process.
        packed: of the default layouts, run the packed ones; default: if the model takes ``position_ids``.
        label_smoothing: that the default token loss has.
        reference_model: builds the plain model, where the audit can't see through the wrapper.
        vocabulary_size: of the samples; default: read from the model.
        tolerance: relative error of a window that counts as exact; default: from the dtype.
        timeout_s: seconds without progress after which the loop counts as hanging.
        start_method: how the audit's process comes to be: ``spawn`` a new one, which imports the person's module;
            ``fork`` this one, which also knows functions without an importable name; ``auto``: spawn if it can.
        seed: of model and samples.

    Returns:
        A report; also where the loop raises, hangs or dies.

    Raises:
        ConfigError: arguments that can't work.
        AuditError: the model can't be built or can't be made a reference of.
    """
    started = time.monotonic()
    loop = LoopUnderTest(
        build=build,
        step=step,
        token_loss=token_loss or CausalTokenLoss(label_smoothing=label_smoothing),
        make_batch=make_batch or collate,
        reference_model=reference_model,
        seed=seed,
    )
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s is {timeout_s} s", fix="give the loop some seconds per layout.")
    if token_loss is not None and label_smoothing:
        raise ConfigError(
            "label_smoothing goes with the default token loss", fix="put the smoothing into your token_loss."
        )
    with Workers(loop, timeout_s=timeout_s, start_method=start_method) as workers:
        chosen = tuple(layouts) if layouts is not None else default_layouts(ranks=ranks)
        if not chosen:
            raise ConfigError("there is no layout to run", fix="pass at least one Layout.")
        description = _describe(workers, chosen[0])
        if layouts is None and not (description.takes_positions if packed is None else packed):
            chosen = default_layouts(ranks=ranks, packed=False)
        pool = samples
        if pool is None:
            pool = make_samples(vocabulary_size or description.vocabulary_size or 0, seed=seed)
        run = _Run(workers, description, chosen, pool)
        run.observe()
        run.compare()
        within = tolerance if tolerance is not None else run.default_tolerance()
        verdicts = {key: _exact(run.results[key], run.evidence[key], within) for key in run.results}
        exact = not run.failures and all(verdicts.values())
        diagnosis = None if exact else _diagnosis(run, verdicts, within)
    reports = tuple(_layout_report(place, layout, run, verdicts) for place, layout in enumerate(chosen))
    notes = make_notes(description, reports, run.evidence, own_clipping=run.own_clipping)
    parameters = sum(torch.Size(shape).numel() for shape in description.shapes.values())
    return AuditReport(
        exact=exact,
        layouts=reports,
        diagnosis=diagnosis,
        token_weights=_token_weights(list(run.results.values())),
        tolerance=within,
        notes=notes,
        model=f"{description.wrapper}, {parameters:,} parameters, {str(description.dtype).removeprefix('torch.')}",
        seconds=time.monotonic() - started,
    )


def assert_token_normalised(build: Callable[..., Any], step: Callable[..., Any], **options: Any) -> AuditReport:
    """For a project's tests: audit the loop, and fail with the whole report unless it is exact.

    Args:
        build: as in :func:`audit_loop`, like ``step`` and all ``options``.

    Returns:
        The report.

    Raises:
        AuditError: (an ``AssertionError``) the loop is not exact.
    """
    report = audit_loop(build, step, **options)
    if not report.exact:
        raise AuditError(f"the loop is not token-normalised\n{report}")
    return report


class _Run:
    """The state of one audit: what was observed, and what it was compared with."""

    def __init__(
        self, workers: Workers, description: Description, layouts: Sequence[Layout], samples: Sequence[Any]
    ) -> None:
        self.workers, self.description, self.layouts, self.samples = workers, description, layouts, samples
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
        reference = self.in_one_process(job, "the reference can't be computed")
        for key, state in finite.items():
            records = [rank[key[1]] for rank in self.records[key[0]]]
            self.evidence[key] = window_evidence(self.layouts, key, records, state, reference, shapes)
        self.own_clipping = undo_own_clipping(list(self.evidence.values()))
        self.results = {key: compare_window(evidence, shapes) for key, evidence in self.evidence.items()}

    def in_one_process(self, job: Any, what: str) -> Any:
        """Run a job of the audit itself; its failure is the audit's failure."""
        (outcome,) = self.workers.run(1, [job])
        if outcome.values is None:
            raise AuditError(f"{what}:\n{outcome.text}")
        return outcome.values[0]

    def default_tolerance(self) -> float:
        """What rounding alone may do in the loop's dtype."""
        dtype = self.description.dtype
        floor = max((evidence.floor for evidence in self.evidence.values()), default=0.0)
        return max(_FLOORS * floor, _TOLERANCES.get(dtype, torch.finfo(dtype).eps))


def _describe(workers: Workers, layout: Layout) -> Description:
    (outcome,) = workers.run(1, [Describe(layout=layout)])
    if outcome.values is None:
        raise AuditError(
            f"the model can't be built in one process ({outcome.failure}):\n{outcome.text}",
            why="the audit builds it once on its own, to describe it and to make a reference of it.",
        )
    description: Description = outcome.values[0]
    parameters = sum(torch.Size(shape).numel() for shape in description.shapes.values())
    if parameters > _MAX_PARAMETERS:
        raise ConfigError(
            f"the model has {parameters:,} trainable parameters",
            why="the audit keeps a float64 gradient of every sample; a tiny model of the same kind tells as much.",
            fix=f"build a model of at most {_MAX_PARAMETERS:,} parameters: few layers, a narrow width, 29 tokens.",
        )
    return description


def _exact(result: WindowResult, evidence: Evidence, tolerance: float) -> bool:
    return (
        evidence.finite
        and evidence.steps == 1
        and result.error <= tolerance
        and result.error_after_clipping <= tolerance
    )


def _diagnosis(run: _Run, verdicts: dict[WindowKey, bool], tolerance: float) -> Diagnosis:
    """Simple observations first, then the fit over all windows."""
    evidence = run.evidence
    if not evidence:
        return named(["loop_failed"])
    if any(e.steps == 0 for e in evidence.values()):
        return named(["optimizer_never_stepped"])
    if any(e.steps > 1 for e in evidence.values()):
        return named(["several_steps_per_window"])
    finite = {key: e for key, e in evidence.items() if e.finite}
    if all(verdicts[key] for key in finite):
        if len(finite) == len(evidence):
            return named(["loop_failed"])
        broken = [e for e in evidence.values() if not e.finite]
        empty = all(_has_empty_micro_batch(e) for e in broken) and not any(
            map(_has_empty_micro_batch, finite.values())
        )
        return named(["nan_from_empty_micro_batch" if empty else "not_finite"])
    if not finite:
        return named(["not_finite"])
    missing = any(e.missing for e in finite.values())
    if not any(e.observed.any() for e in finite.values()):
        return named(["parameters_without_gradient"])
    parameters = sum(torch.Size(shape).numel() for shape in run.description.shapes.values())
    coordinates = None
    if parameters > _COORDINATES:
        generator = torch.Generator().manual_seed(0)
        coordinates = torch.randperm(parameters, generator=generator)[:_COORDINATES]
    found = named(["unknown"])
    for definitions, simple in _STAGES:
        job = DefinitionsJob(
            layouts=run.layouts,
            samples=run.samples,
            states=run.states,
            windows={key: run.windows[key] for key in finite},
            shapes=run.description.shapes,
            coordinates=coordinates,
            keys=frozenset(d.key for d in definitions),
            due={key: e.due for key, e in finite.items()},
        )
        wrong = run.in_one_process(job, "the catalogue of mistakes can't be computed")
        found = diagnose(
            list(finite.values()),
            [wrong[key] for key in finite],
            tolerance=max(_FIT * tolerance, _SMALLEST_FIT),
            coordinates=coordinates,
        )
        if found.name != "unknown" and not (simple and found.also):
            break
    if missing and found.name == "unknown":
        return named(["parameters_without_gradient"])
    return found


def _has_empty_micro_batch(evidence: Evidence) -> bool:
    full = {(g.rank, g.micro_batch) for g, count in zip(evidence.groups, evidence.counts, strict=True) if count}
    return len(full) < evidence.ranks * evidence.micro_batches


def _layout_report(place: int, layout: Layout, run: _Run, verdicts: dict[WindowKey, bool]) -> LayoutReport:
    keys = [key for key in run.windows if key[0] == place]
    complete = [key for key in keys if key in run.results]
    failure = run.failures.get(place)
    return LayoutReport(
        name=layout.name,
        ranks=layout.ranks,
        micro_batches=layout.micro_batches,
        packed=layout.packed,
        windows=tuple(run.results[key] for key in complete),
        failure=failure.failure if failure else None,
        failure_text=failure.text if failure else "",
        exact=failure is None and len(complete) == len(keys) and all(verdicts[key] for key in complete),
    )


def _token_weights(results: list[WindowResult]) -> TokenWeights | None:
    span = spread(results)
    if span is None:
        return None
    per_sample: dict[int, tuple[float, float]] = {}
    for w in (w for result in results for w in result.weights):
        low, high = per_sample.get(w.sample, (w.weight, w.weight))
        per_sample[w.sample] = (min(low, w.weight), max(high, w.weight))
    return TokenWeights(min=span[0], max=span[1], per_sample=dict(sorted(per_sample.items())))
