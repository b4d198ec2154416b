"""The audit, which shares no code with the integration, on a Trainer with and without it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer

from tests.integrations import hf_toy as toy
from tokennorm.audit import AuditReport, audit_loop, default_layouts
from tokennorm.integrations.hf import token_normalised


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are forked from this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(make: Any) -> tuple[Any, Any]:
    model = make(torch.float32)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def one_window(cls: Any, model: Any, optimizer: Any, micro_batches: list[Any]) -> dict[str, float]:
    """Let a Trainer train on these micro-batches, this rank's share of a window."""
    os.environ["OMP_NUM_THREADS"] = "1"
    run = cls(
        model=model,
        args=toy.arguments(gradient_accumulation_steps=len(micro_batches), max_grad_norm=1.0),
        # The loader deals batches out to the ranks in turn; a rank reads only its own.
        train_dataset=[batch for batch in micro_batches for _ in range(dist.get_world_size())],
        data_collator=lambda batches: dict(batches[0]),
        optimizers=(optimizer, None),
    )
    run.train()
    (entry,) = (entry for entry in run.state.log_history if "loss" in entry)
    # The objective: token losses, and what the model adds.
    result = {"loss": entry["loss"] + entry.get("router_loss", 0.0), "grad_norm": entry["grad_norm"]}
    if "supervised_tokens" in entry:
        result["tokens"] = entry["supervised_tokens"]
    # The DDP that the Trainer put around the model goes, with its hooks.
    run.accelerator.free_memory()
    del run
    gc.collect()
    return result


# One process and two, packed and padded, uneven, an empty rank, a short last window: each in one of them.
LAYOUTS = tuple(
    layout
    for layout in default_layouts(ranks=(1, 2))
    if (layout.ranks, layout.name)
    in {(1, "packed"), (1, "a short last window"), (2, "an empty rank"), (2, "a short last window")}
)


def audit(cls: Any, make: Any) -> AuditReport:
    return audit_loop(
        lambda: build(make),
        lambda model, optimizer, batches: one_window(cls, model, optimizer, batches),
        layouts=LAYOUTS,
        start_method="fork",
        timeout_s=120,
    )


def test_the_trainer_with_the_integration_is_exact() -> None:
    report = audit(token_normalised(Trainer), toy.mixture)
    assert report.exact, str(report)
    assert len(report.layouts) == 4
    assert report.token_weights is not None
    assert report.token_weights.min == pytest.approx(1, abs=1e-4)
    assert report.token_weights.max == pytest.approx(1, abs=1e-4)
    assert not any("logged" in note for note in report.notes), str(report)


def test_the_trainer_without_it_is_named() -> None:
    report = audit(Trainer, toy.mixture)
    assert report.diagnosis is not None, str(report)
    assert report.diagnosis.name == "auxiliary_loss_multiplied"
    assert any("logged" in note for note in report.notes)
