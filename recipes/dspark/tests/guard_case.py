"""Micro-batches of a tiny drafter, sound and broken ones, and what a window of them should come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.draft.drafter_toy import WIDTH, close_anchors, toy_drafter, toy_rows
from tests.draft.reference import naive_dspark
from tests.engine.guard_toy import guarded
from tokennorm.draft import Anchors, DraftModel, teacher_positions
from tokennorm.engine import Batch, Engine
from tokennorm.kit import TokenNormedLossKit
from tokennorm.recipes.dspark.config import LossConfig
from tokennorm.recipes.dspark.objective import DSparkObjective

MANY = close_anchors()
FEW = Anchors(positions=torch.tensor([[2], [9]]), keep=torch.tensor([[True], [True]]))
# The second row has no block, so nothing of it reaches the loss.
ONE_ROW = Anchors(positions=torch.tensor([[2, 3], [0, 0]]), keep=torch.tensor([[True, True], [False, False]]))
NOTHING = Anchors(positions=torch.zeros(2, 1, dtype=torch.int64), keep=torch.zeros(2, 1, dtype=torch.bool))
TOKENS = 32
"""In each micro-batch; the first document of its first row is at positions 0 to 6."""


def micro(
    drafter: DraftModel,
    anchors: Anchors,
    seed: int,
    *,
    broken: str | None = None,
    at: tuple[int, int] = (0, 2),
) -> dict[str, Any]:
    """One micro-batch with its states in it.

    Args:
        drafter: that it is for.
        anchors: of its two rows.
        seed: of tokens and states.
        broken: the name of the states that are NaN at one position.
        at: that position, (row, place).
    """
    rows = toy_rows(seed)
    blocks = rows.anchored(anchors, drafter.config)
    generator = torch.Generator().manual_seed(seed)
    last = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=generator)
    batch = {
        "input_ids": rows.input_ids,
        "position_ids": rows.position_ids,
        "documents": rows.documents,
        "blocks": blocks,
        "plan": blocks.plan(drafter.vocabulary),
        "features": rows.features,
        "last_hidden": last,
        "log_total": None,
        "effective_tokens": int(rows.supervised.sum()),
        "total_tokens": TOKENS,
        "sources": [["chat-1", "chat-2", "chat-3"], ["chat-4", "chat-5"]],
    }
    if broken is not None:
        batch[broken][at] = torch.nan
    return batch


def objective_of(drafter: DraftModel, kind: type[DSparkObjective] = DSparkObjective) -> DSparkObjective:
    return kind(LossConfig(), capture=None, teacher_head=drafter.lm_head.weight, guarded=True)


def engine_of(
    drafter: DraftModel, model: torch.nn.Module | None = None, *, objective: Any = None, **options: Any
) -> tuple[Engine, TokenNormedLossKit]:
    """An engine whose step moves each weight by minus its gradient."""
    return guarded(model or drafter, objective=objective or objective_of(drafter), **options)


def reference_gradient(window: Sequence[Batch], **shape: Any) -> Tensor:
    """The gradient of the mean over these micro-batches' slots, in float64, from all logits and by autograd."""
    drafter = toy_drafter(**shape)
    first = drafter.config.first_supervised_slot
    sums, den = [], 0.0
    for batch in window:
        blocks = batch["blocks"]
        output = drafter(
            blocks=blocks,
            features=batch["features"],
            position_ids=batch["position_ids"],
            documents=batch["documents"],
        )
        rows = teacher_positions(blocks.anchors, blocks.block_size, first).clamp(0, 15)
        teacher = batch["last_hidden"][torch.arange(2).view(-1, 1, 1), rows] @ drafter.lm_head.weight.T
        part = naive_dspark(
            output.logits(),
            teacher,
            blocks.target_ids,
            blocks.eval_mask,
            blocks.keep,
            output.confidence,
            gamma=4.0,
            first=first,
        )
        sums.append(part.loss_sum())
        den += part.den
    trained = [p for p in drafter.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(torch.stack(sums).sum() / den, trained)
    return torch.cat([gradient.flatten() for gradient in gradients])


def weights(drafter: DraftModel) -> Tensor:
    """Everything that learns, as one vector."""
    return torch.cat([p.detach().flatten() for p in drafter.parameters() if p.requires_grad])


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
