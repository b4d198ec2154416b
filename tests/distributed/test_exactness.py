"""The promise: the window's gradient is that of its supervised tokens' mean, whatever the split.

Global relative gradient error against a float64 one-process definition, for 1, 2 and 4 ranks, 1, 3 and 8
micro-batches each, uneven tokens, a rank without supervised tokens, a short last window with dummies, packed and
padded, two chunk sizes, deferred and counted. One spawn per world size; ``pytest -s`` prints the table.
"""

from __future__ import annotations

import pytest

from tests.distributed import exactness
from tokennorm.kit import TokenNormedLossKit
from tokennorm.testing import spawn_ranks


def _measure_with(rank: int, world_size: int, fault: str) -> list[exactness.Row]:
    """Measure with a mistake planted in the kit's use or in the data."""
    if fault == "no rescale":
        TokenNormedLossKit.rescale_gradients = lambda self, parameters, stats: self._window.unscaled(parameters)
    elif fault == "averaging forgotten":
        original = TokenNormedLossKit.__init__

        def init(self, device, dp_world_size, **options):
            original(self, device, dp_world_size, averaging_factor=1, **options)

        TokenNormedLossKit.__init__ = init
    elif fault == "targets cross documents":
        collate = exactness.collate

        def crossing(rows, *, packed):
            batch = collate(rows, packed=packed)
            labels = batch["shift_labels"].clone()
            labels[:, :-1] = batch["input_ids"][:, 1:].where(labels[:, :-1] != -100, labels[:, :-1])
            starts = batch["position_ids"][:, 1:] == 0
            labels[:, :-1] = batch["input_ids"][:, 1:].where(starts, labels[:, :-1])
            batch["shift_labels"] = labels
            return batch

        exactness.collate = crossing
    return exactness.measure(rank, world_size, few=True)


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


@pytest.mark.parametrize("fault", ["no rescale", "averaging forgotten", "targets cross documents"])
def test_the_table_shows_a_planted_mistake(fault: str) -> None:
    rows = spawn_ranks(_measure_with, 2, fault, timeout_s=280)[0].value
    wrong = [row for row in rows if row.error > 1e-3]
    expected = [
        row
        for row in rows
        if (fault == "averaging forgotten")
        or (fault == "no rescale" and "deferred" in row.layout)
        or (fault == "targets cross documents" and "packed" in row.layout and row.tokens > 100)
    ]
    assert expected
    assert {row.layout for row in expected} <= {row.layout for row in wrong}
