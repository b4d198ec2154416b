"""Split models whose blocks are compiled, through the Engine; run on each rank by ``test_sharded``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.distributed.exactness import batches_of, by_definition, make_model
from tests.distributed.sharded import CHECKPOINTED, LAYOUT, STRATEGIES, Case, build, measure
from tokennorm.recipes.sft.config import LoraConfig, SftConfig
from tokennorm.recipes.sft.modelling import adapt, compile_blocks


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One window of a model with compiled blocks.

    Attributes:
        case: its errors.
        graphs: how many graphs were made for the two blocks.
        same_names: whether the weights are called as before.
    """

    case: Case
    graphs: int
    same_names: bool


def everything(rank: int, world_size: int) -> dict[str, Compiled]:
    """Strategies, checkpointing and adapters, each with compiled blocks."""
    plain = make_model()
    checkpointed = adapt(make_model(), CHECKPOINTED)
    adapted = adapt(make_model(), SftConfig(lora=LoraConfig(rank=2)))
    return {
        "FSDP2": _case(rank, world_size, plain, "FSDP2"),
        "HSDP, gradients split": _case(rank, world_size, plain, "HSDP 2x2, gradients split"),
        "HSDP, checkpointing": _case(rank, world_size, checkpointed, "HSDP 2x2, head apart"),
        "FSDP2, adapters": _case(rank, world_size, adapted, "FSDP2"),
    }


def _case(rank: int, world_size: int, plain: Any, strategy: str) -> Compiled:
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def change(model: nn.Module) -> None:
        model.train()
        compile_blocks(model, counting)

    names = list(plain.state_dict())
    torch.compiler.reset()
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    truth = by_definition(plain, samples, torch.float64)
    engine, optimizer = build(rank, world_size, STRATEGIES[strategy], plain, change=change)
    case = measure(engine, optimizer, batches, truth, max_norm=None)
    return Compiled(case=case, graphs=len(graphs), same_names=list(engine.model.state_dict()) == names)
