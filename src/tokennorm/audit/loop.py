"""Audit a training loop: run it under many layouts and hold every gradient against the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from tokennorm.audit.compare import WindowResult, spread
from tokennorm.audit.jobs import Describe, Description, LoopUnderTest
from tokennorm.audit.layouts import Layout, default_layouts
from tokennorm.audit.notes import make_notes
from tokennorm.audit.reference import WindowKey
from tokennorm.audit.report import AuditReport, LayoutReport, TokenWeights
from tokennorm.audit.run import Run, is_exact
from tokennorm.audit.samples import collate, make_samples
from tokennorm.audit.token_loss import CausalTokenLoss
from tokennorm.audit.workers import Workers
from tokennorm.errors import AuditError, ConfigError

__all__ = ["assert_token_normalised", "audit_loop"]

_MAX_PARAMETERS = 500_000


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
    say: Callable[[str], None] | None = None,
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
        say: is told what the audit is about to do, a line at a time.

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
        run = Run(workers, description, chosen, pool, say or _nothing)
        run.observe()
        run.compare()
        within = tolerance if tolerance is not None else run.default_tolerance()
        verdicts = {key: is_exact(run.results[key], run.evidence[key], within) for key in run.results}
        exact = not run.failures and all(verdicts.values())
        diagnosis = None if exact else run.diagnosis(verdicts, within)
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


def _nothing(_line: str) -> None:
    """Say nothing."""


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


def _layout_report(place: int, layout: Layout, run: Run, verdicts: dict[WindowKey, bool]) -> LayoutReport:
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
