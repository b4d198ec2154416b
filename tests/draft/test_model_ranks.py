"""The drafter under DDP and FSDP2: the gradient of the whole window, also with a rank that has no anchor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.draft.drafter_toy import WIDTH, close_anchors, toy_drafter, toy_rows
from tests.draft.reference import relative_error
from tokennorm.draft import Anchors, DraftModel, DSparkSums, dspark_objective
from tokennorm.kit import TokenNormedLossKit
from tokennorm.testing import spawn_ranks

# Anchors of each micro-batch, two per rank: many, two, and a rank's both without any.
CLOSE = close_anchors()
NOTHING = Anchors(positions=torch.zeros(2, 1, dtype=torch.int64), keep=torch.zeros(2, 1, dtype=torch.bool))
FEW = Anchors(positions=torch.tensor([[2], [9]]), keep=torch.tensor([[True], [True]]))
WINDOWS = {"uneven": [CLOSE, FEW, FEW, NOTHING], "empty rank": [CLOSE, NOTHING, FEW, NOTHING]}


def sums_of(model: nn.Module, drafter: DraftModel, anchors: Anchors, seed: int) -> DSparkSums:
    rows = toy_rows(seed)
    blocks = rows.anchored(anchors, drafter.config)
    output = model(blocks=blocks, features=rows.features, position_ids=rows.position_ids, documents=rows.documents)
    teacher = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return dspark_objective(
        plan=blocks.plan(drafter.vocabulary),
        **output.objective_arguments(),
        teacher_hidden=teacher,
        loss_decay_gamma=4.0,
        ce_loss_alpha=0.1,
        l1_loss_alpha=0.9,
        confidence_head_alpha=1.0,
    )


def reference(window: list[Anchors]) -> dict[str, torch.Tensor]:
    """One process: all numerators over all denominators."""
    model = toy_drafter()
    sums = [sums_of(model, model, anchors, seed) for seed, anchors in enumerate(window)]
    total = torch.stack([part.denominator for part in sums]).sum()
    (torch.stack([part.loss_sum for part in sums]).sum() / total).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def worst_error(rank: int, ranks: int, name: str, sharded: bool) -> float:
    drafter = toy_drafter()
    if sharded:
        for layer in drafter.layers:
            fully_shard(layer)
        model: Any = fully_shard(drafter)
    else:
        model = DistributedDataParallel(drafter)
    kit = TokenNormedLossKit("cpu", ranks)
    window = WINDOWS[name]
    for seed in range(rank, len(window), ranks):
        sums = sums_of(model, drafter, window[seed], seed)
        kit.accumulate_microbatch(**sums.kit_arguments(), total_tokens=32).backward()
    stats = kit.reduce_window()
    kit.rescale_gradients(drafter.parameters(), stats)
    kit.reset()
    errors = []
    for key, expected in reference(window).items():
        grad = drafter.get_parameter(key).grad
        assert grad is not None, key
        errors.append(relative_error(grad.full_tensor() if isinstance(grad, DTensor) else grad, expected))
    return max(errors)


def all_cases(rank: int, ranks: int) -> dict[tuple[str, bool], float]:
    return {
        (name, sharded): worst_error(rank, ranks, name, sharded) for name in WINDOWS for sharded in (False, True)
    }


def test_two_ranks_give_the_gradient_of_the_window() -> None:
    for result in spawn_ranks(all_cases, 2):
        for case, error in result.value.items():
            assert error < 1e-11, (case, error)


def test_a_mean_of_micro_batch_means_would_be_found() -> None:
    model, window = toy_drafter(), WINDOWS["uneven"]
    parts = [sums_of(model, model, anchors, seed) for seed, anchors in enumerate(window[:3])]
    torch.stack([part.loss_sum / part.denominator for part in parts]).mean().backward()
    grad = model.fc.weight.grad
    assert grad is not None
    assert relative_error(grad, reference(window)["fc.weight"]) > 0.01
