"""Adapters on a frozen base that is split over ranks; run on each rank by ``test_sharded``, in its spawn."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.distributed.exactness import (
    batches_of,
    by_definition,
    make_model,
    relative_error,
    with_learned_adapters,
)
from tests.distributed.sharded import LAYOUT, STRATEGIES, Case, build, lonely_samples, measure
from tokennorm.data import IGNORE_INDEX, Sample, collate_padded
from tokennorm.engine import AutocastObjective, CausalLMObjective
from tokennorm.kit import TokenNormedLossKit
from tokennorm.recipes.sft.config import LoraConfig, SftConfig
from tokennorm.recipes.sft.modelling import adapt

SPLIT, APART = "FSDP2, head apart, gradients split", "HSDP 2x2, head apart"


def adapted(dtype: torch.dtype, *targets: str) -> Any:
    """The small model, frozen, with adapters that have already learned something."""
    config = SftConfig(lora=LoraConfig(rank=2, target_modules=targets))
    model = adapt(make_model().to(dtype), config)
    return with_learned_adapters(model)


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """Errors of float64 adapters in each strategy, of one lonely token, of a wrong factor, and in mixed dtypes."""
    plain = adapted(torch.float64)
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    short_batches, short_samples = batches_of(LAYOUT, world_size, rank, short=True)
    truth, short_truth = (by_definition(plain, one, torch.float64) for one in (samples, short_samples))
    cases: dict[str, Case] = {}
    frozen = []
    for name in (SPLIT, APART):
        engine, optimizer = build(rank, world_size, STRATEGIES[name], plain)
        cases[name] = measure(engine, optimizer, batches, truth, max_norm=None)
        engine.max_grad_norm = 0.5
        cases[f"{name}, short, clipped"] = measure(engine, optimizer, short_batches, short_truth, max_norm=0.5)
        parameters = list(engine.model.parameters())
        frozen.append(
            all(isinstance(one, DTensor) for one in parameters)
            and all(one.grad is None for one in parameters if not one.requires_grad)
            and isinstance(next(m for n, m in engine.model.named_modules() if n.endswith("layers.0")), FSDPModule)
        )
    # An adapter on the head, which is a unit of its own with a frozen weight in it.
    on_head = adapted(torch.float64, "q_proj", "lm_head")
    engine, optimizer = build(rank, world_size, STRATEGIES[APART], on_head)
    head_truth = by_definition(on_head, samples, torch.float64)
    cases["adapter on the head, apart"] = measure(engine, optimizer, batches, head_truth, max_norm=None)
    lonely = lonely_samples(world_size)
    batch = collate_padded([lonely[rank]], pad_token_id=0)
    lonely_truth = by_definition(on_head, lonely, torch.float64)
    cases["one token against a thousand"] = measure(engine, optimizer, [batch], lonely_truth, max_norm=None)
    kit = TokenNormedLossKit("cpu", world_size, averaging_factor=2.0)
    engine, optimizer = build(rank, world_size, STRATEGIES[APART], plain, kit=kit)
    mistake = measure(engine, optimizer, batches, truth, max_norm=None).error
    return {
        "cases": cases,
        "frozen": all(frozen),
        "mistake": mistake,
        "mixed": mixed_dtypes(rank, world_size),
    }


def mixed_dtypes(rank: int, world_size: int) -> dict[str, tuple[float, float, set[torch.dtype]]]:
    """A bfloat16 base and float32 adapters in one unit: error, that of a naive loop, dtypes of the gradients."""
    plain = adapted(torch.bfloat16)
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    truth = by_definition(plain, samples, torch.float64)
    found = {}
    for name, dtype in (("bfloat16 base", None), ("bfloat16 base, bfloat16 arithmetic", torch.bfloat16)):
        objective = CausalLMObjective()
        options = {"objective": AutocastObjective(objective, dtype) if dtype else objective, "param_dtype": dtype}
        engine, optimizer = build(rank, world_size, STRATEGIES["FSDP2"], plain, **options)
        case = measure(engine, optimizer, batches, truth, max_norm=None)
        naive = relative_error(naive_loop(plain, samples, dtype), truth)
        found[name] = (case.error, naive, {gradient.dtype for gradient in optimizer.seen if gradient is not None})
    return found


def naive_loop(model: nn.Module, samples: list[Sample], dtype: torch.dtype | None) -> list[Tensor]:
    """One sample at a time in the model's own dtypes, or all of it in ``dtype``."""
    model = copy.deepcopy(model).to(dtype) if dtype else copy.deepcopy(model)
    count = sum(int((sample.shift_labels() != IGNORE_INDEX).sum()) for sample in samples)
    for sample in samples:
        logits = model(input_ids=sample.input_ids.unsqueeze(0)).logits[0]
        (nn.functional.cross_entropy(logits.float(), sample.shift_labels(), reduction="sum") / count).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
