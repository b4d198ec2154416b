"""A drafter's counted work is what torch counts while it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.draft.drafter_toy import VOCAB, WIDTH, Rows, toy_drafter, toy_rows
from tokennorm.draft import Anchors, DraftModel, drafter_flops, dspark_objective
from tokennorm.draft.blocks import Blocks
from tokennorm.draft.masks import block_attention_mask

# Every block is kept: what torch runs for a dummy counts as no work here.
ALL_KEPT = Anchors(positions=torch.tensor([[1, 3, 8, 13], [0, 4, 9, 11]]), keep=torch.ones(2, 4, dtype=torch.bool))


def _product(_into: Any, left: Any, right: Any, **_: Any) -> int:
    """From the shapes."""
    return 2 * left[0] * left[1] * right[1]


def counted_by_torch(
    drafter: DraftModel, rows: Rows, blocks: Blocks, totals: torch.Tensor | None
) -> dict[str, int]:
    teacher = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # Torch knows addmm, and not that addmm_ is the same in place.
    in_place: Any = {torch.ops.aten.addmm_: _product}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter, sdpa_kernel(SDPBackend.MATH):
        output = drafter(
            blocks=blocks, features=rows.features, position_ids=rows.position_ids, documents=rows.documents
        )
        dspark_objective(
            plan=blocks.plan(drafter.vocabulary),
            **output.objective_arguments(),
            teacher_hidden=teacher,
            teacher_head=head,
            teacher_log_total=totals,
            loss_decay_gamma=4.0,
            ce_loss_alpha=0.1,
            l1_loss_alpha=0.9,
            confidence_head_alpha=1.0,
        ).loss_sum.backward()
    return {str(operation): flops for operation, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize(
    ("shape", "totals"),
    [
        ({}, False),
        ({"markov_head_type": "gated", "detach_confidence_inputs": True}, False),
        ({"markov_head_type": "rnn", "first_supervised_slot": 1}, False),
        ({"draft_vocab_size": 24}, True),
        ({"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}, False),
    ],
)
def test_products_with_weights_are_those_that_torch_counts(shape: dict[str, Any], totals: bool) -> None:
    drafter, rows = toy_drafter(**shape), toy_rows()
    blocks = rows.anchored(ALL_KEPT, drafter.config)
    known = torch.full((2, 16), 9.0) if totals else None
    counts = counted_by_torch(drafter, rows, blocks, known)
    flops = drafter_flops(
        drafter,
        blocks=blocks,
        plan=blocks.plan(drafter.vocabulary),
        position_ids=rows.position_ids,
        context_tokens=32,
        log_totals=totals,
    )
    attention = counts.pop("aten.bmm")
    assert flops.total - flops.attention == sum(counts.values())
    # Torch multiplies all pairs of a dense mask; what counts are those that may see each other.
    mask = block_attention_mask(blocks.anchors, blocks.block_size, 16, rows.documents)
    assert flops.attention == attention * int(mask.sum()) / mask.numel()


def test_padding_dummies_and_frozen_weights_are_no_work() -> None:
    drafter, rows = toy_drafter(), toy_rows()
    blocks = rows.anchored(ALL_KEPT, drafter.config)
    dummies = Anchors(
        positions=torch.cat([ALL_KEPT.positions, torch.zeros(2, 3, dtype=torch.int64)], dim=1),
        keep=torch.cat([ALL_KEPT.keep, torch.zeros(2, 3, dtype=torch.bool)], dim=1),
    )
    more = rows.anchored(dummies, drafter.config)

    def count(blocks: Blocks, tokens: int = 32) -> float:
        plan = blocks.plan(drafter.vocabulary)
        return drafter_flops(
            drafter, blocks=blocks, plan=plan, position_ids=rows.position_ids, context_tokens=tokens
        ).total

    assert count(more) == count(blocks)
    # A context token costs fc, and keys and values in two layers.
    assert count(blocks) - count(blocks, 31) == 4 * 48 * WIDTH + 2 * 6 * 2 * WIDTH * 12
    whole = count(blocks)
    drafter.fc.requires_grad_(False)
    assert whole - count(blocks) == 2 * 48 * WIDTH * 32
