"""Which library, model and layouts are audited, and how one audit is run."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.audit_peers_evaluation import SAMPLES, Notes
from tokennorm.audit import Layout, audit_loop, default_layouts
from tokennorm.recipes.audit.trainer import audit_trainer
from tokennorm.recipes.audit.trainer_models import tiny_model
from tokennorm.recipes.audit.trainer_report import TrainerReport

__all__ = ["CASES", "SITUATIONS", "Case", "all_layouts", "audit", "situation_of"]

# situation -> (ranks, layout) of the audit's own layouts
SITUATIONS: dict[str, tuple[tuple[int, str], ...]] = {
    "one process": ((1, "one micro-batch"), (1, "uneven micro-batches"), (1, "one very long sample")),
    "short last window": ((1, "a short last window"), (2, "a short last window")),
    "uneven ranks": (
        (2, "uneven ranks"),
        (2, "uneven ranks and micro-batches"),
        (2, "the same samples in another order"),
    ),
    "empty micro-batch or rank": ((1, "an empty micro-batch"), (2, "an empty rank")),
}


def situation_of(layout: Any) -> str:
    """The situation that a layout (or its report) belongs to."""
    return next(name for name, known in SITUATIONS.items() if (layout.ranks, layout.name) in known)


def all_layouts() -> tuple[Layout, ...]:
    """Those of all situations: what the audit runs by default on one and two ranks, but for the packed ones."""
    return default_layouts(ranks=(1, 2), packed=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One library's loop on one model, stock or with the integration.

    Args:
        library: with its version, as the table names it.
        model: ``llama`` (dense) or ``mixtral`` (mixture of experts with a router loss).
        exact: with the integration.
        target: a trainer's import path, or the module of a loop here.
        arguments: of a trainer's configuration.
    """

    library: str
    model: str
    exact: bool
    target: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.library}, {self.model}, {'with the integration' if self.exact else 'stock'}"


_TARGETS: tuple[tuple[str, str, tuple[str, ...], dict[str, Any]], ...] = (
    ("Hugging Face Trainer", "transformers:Trainer", ("llama", "mixtral"), {}),
    ("TRL SFTTrainer", "trl:SFTTrainer", ("llama", "mixtral"), {}),
    ("TRL SFTTrainer, chunked_nll", "trl:SFTTrainer", ("llama",), {"loss_type": "chunked_nll"}),
    ("Accelerate loop", "benchmarks.audit_peers_accelerate", ("llama", "mixtral"), {}),
    ("Lightning, automatic", "benchmarks.audit_peers_lightning", ("llama", "mixtral"), {}),
)
CASES = tuple(
    Case(library=library, model=model, exact=exact, target=target, arguments=arguments)
    for library, target, models, arguments in _TARGETS
    for model in models
    for exact in (False, True)
)


def audit(case: Case, layouts: tuple[Layout, ...], *, say: Callable[[str], None] | None = None) -> TrainerReport:
    """Audit one case; the ranks are forked from this process, after it has imported what they need."""
    options: dict[str, Any] = {"layouts": layouts, "start_method": "fork", "timeout_s": 120.0, "say": say}
    if ":" in case.target:
        return audit_trainer(
            case.target, model=case.model, integration=case.exact, arguments=case.arguments, **options
        )
    module: Any = importlib.import_module(case.target)
    tiny_model(case.model)
    with tempfile.TemporaryDirectory(prefix="tokennorm-audit-peers-") as folder:
        notes = Notes(Path(folder) / "evaluations.jsonl", case.model)
        loop = (module.ExactLoop if case.exact else module.StockLoop)(case.model, notes)
        report = audit_loop(
            loop.build, loop.step, samples=SAMPLES, reference_model=loop.reference_model, **options
        )
        return TrainerReport(trainer=case.library, model=case.model, audit=report, evaluations=notes.read())
