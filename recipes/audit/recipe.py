"""A recipe in the hands of the audit: its own windows go through its own engine, and the audit watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from tokennorm.audit import AuditReport, Layout, Sample, audit_loop
from tokennorm.data import ChatDataset, WindowLoader
from tokennorm.engine import DistributedConfig, Runtime, distributed_session
from tokennorm.errors import AuditError
from tokennorm.recipes.audit.splits import Plan, Split, check_plan, layout_of, plan_of

__all__ = ["RecipeLoop", "audit_recipe"]


@dataclass(kw_only=True)
class RecipeLoop:
    """A recipe as the audit's ``build`` and ``step``: each is called in the rank's own process.

    Attributes:
        folder: of model and data.
        splits: of the audit, with the plan of each.
    """

    folder: Path
    splits: dict[tuple[str, int], tuple[Split, Plan]] = field(default_factory=dict)
    _engine: Any = None
    _windows: Any = None

    def build(self, layout: Layout) -> tuple[nn.Module, Any]:
        """Prepare the recipe's run for a layout; model and optimizer of its engine."""
        split, plan = self.splits[layout.name, layout.ranks]
        with distributed_session(DistributedConfig(device="cpu", threads=1)) as runtime:
            job = self.prepare(split, runtime)
        loader: WindowLoader = job.windows.loader
        check_plan(split, plan, loader)
        self._engine, self._windows = job.engine, iter(job.windows)
        return job.engine.model, job.engine.optimizer

    def prepare(self, split: Split, runtime: Runtime) -> Any:
        """The recipe's job, with ``engine`` and ``windows``."""
        raise NotImplementedError

    def step(self, _model: nn.Module, _optimizer: Any, _micro_batches: Any) -> dict[str, float | None]:
        """The engine's step on the recipe's own next window; the audit's micro-batches say what is due in it."""
        report = self._engine.train_step(next(self._windows))
        return {"loss": report.loss, "grad_norm": report.grad_norm, "tokens": report.effective_tokens}

    def reference_model(self) -> nn.Module:
        """The model without anything of the recipe."""
        raise NotImplementedError

    def token_loss(self) -> Callable[..., Any] | None:
        """The definition of the objective; None: next-token cross-entropy."""
        return None

    def samples(self) -> list[Sample]:
        """What the definition is computed on, by the numbers of the chats."""
        raise NotImplementedError

    def dataset(self) -> ChatDataset:
        """All chats, as the recipe makes samples of them."""
        raise NotImplementedError


def audit_recipe(loop: RecipeLoop, splits: Sequence[Split], **options: Any) -> AuditReport:
    """Audit a recipe whose folder is there.

    Args:
        loop: of the recipe.
        splits: to run.
        **options: of :func:`tokennorm.audit.audit_loop`.

    Raises:
        AuditError: two splits with one name, or a reference that can't be made.
    """
    layouts, dataset = [], loop.dataset()
    for split in splits:
        if (split.name, split.ranks) in loop.splits:
            raise AuditError(f"two splits of {split.ranks} ranks are called {split.name!r}")
        plan = plan_of(split, dataset.select(split.chats))
        loop.splits[split.name, split.ranks] = (split, plan)
        layouts.append(layout_of(split, plan))
    return audit_loop(
        loop.build,
        loop.step,
        reference_model=loop.reference_model,
        token_loss=loop.token_loss(),
        samples=loop.samples(),
        layouts=layouts,
        **options,
    )
