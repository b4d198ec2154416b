"""The promise: the window's gradient is that of its supervised tokens' mean, whatever the split.

Global relative gradient error against a float64 one-process definition, for 1, 2 and 4 ranks, 1, 3 and 8
micro-batches each, uneven tokens, a rank without supervised tokens, a short last window with dummies, packed and
padded, two chunk sizes, deferred and counted. One spawn per world size; ``pytest -s`` prints the table.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from tests.distributed import exactness
from tokennorm.kit import TokenNormedLossKit, token_loss
from tokennorm.testing import spawn_ranks


def _crossing_targets(rows, *, packed):
    """The collator with its labels shifted across document borders."""
    batch = exactness.collate_rows(rows, packed=packed)
    labels, ids = batch["shift_labels"].clone(), batch["input_ids"]
    starts = batch["position_ids"][:, 1:] == 0
    labels[:, :-1] = torch.where(starts, ids[:, 1:], labels[:, :-1])
    return {**batch, "shift_labels": labels}


FAULTS = {
    "no rescale": lambda: patch.object(
        TokenNormedLossKit, "rescale_gradients", lambda kit, parameters, stats: kit._window.unscaled(parameters)
    ),
    "averaging forgotten": lambda: patch.object(token_loss, "averaging_factor_or_default", lambda *args: 1.0),
    "targets cross documents": lambda: patch.object(exactness, "collate", _crossing_targets),
}


def _measure_with_faults(rank: int, world_size: int) -> dict[str, list[exactness.Row]]:
    found = {}
    for name, plant in FAULTS.items():
        with plant():
            found[name] = exactness.measure(rank, world_size, few=True)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_gradient_is_exact_in_every_layout(world_size: int) -> None:
    ranks = [result.value for result in spawn_ranks(exactness.measure, world_size, timeout_s=280)]
    print(f"\n{world_size} ranks: global relative gradient error, worst rank")
    print(f"{'layout':<62} {'window':<6} {'tokens':>6} {'dtype':<8} {'error':>8} {'naive':>8} {'loss':>8}")
    for rows in zip(*ranks, strict=True):
        worst = max(rows, key=lambda row: row.error)
        window = "short" if worst.short else "full"
        print(
            f"{worst.layout:<62} {window:<6} {worst.tokens:>6} {worst.dtype:<8} {worst.error:>8.1e} "
            f"{worst.naive_error:>8.1e} {worst.loss_error:>8.1e}"
        )
        limit = 1e-12 if worst.dtype == "float64" else max(1e-6, 2 * worst.naive_error)
        assert worst.tokens > 0
        assert worst.error <= limit, worst
        assert worst.loss_error <= (1e-13 if worst.dtype == "float64" else 1e-6)


def test_the_table_shows_planted_mistakes() -> None:
    found = spawn_ranks(_measure_with_faults, 2, timeout_s=280)[0].value
    for fault, rows in found.items():
        affected = [
            row
            for row in rows
            if fault == "averaging forgotten"
            or (fault == "no rescale" and "deferred" in row.layout)
            or (fault == "targets cross documents" and "packed" in row.layout and not row.short)
        ]
        assert affected
        assert all(row.error > 1e-3 for row in affected), fault
        assert all(row.error < 1e-6 for row in rows if row not in affected and "cross" not in fault), fault
