"""Windows with a broken micro-batch in them, the guarded engine that runs them, and what it should come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.toy import ToyLM, micro_batch, reference_loss, weights
from tokennorm.engine import Batch, CausalLMObjective, Engine, ObjectiveOutput
from tokennorm.kit import TokenNormedLossKit

SETTINGS: dict[str, Any] = {"spike_multiplier": 3.0, "window_size": 16, "min_history": 4}
# A row with this id gets NaN hidden states, as from an overflow in the model; no other row has it.
BROKEN = 16


def sound(supervised: int, total: int, seed: int) -> dict[str, Any]:
    batch = micro_batch(supervised, total, seed)
    batch["input_ids"].clamp_(max=BROKEN - 1)
    return batch


def broken(supervised: int, total: int, seed: int) -> dict[str, Any]:
    batch = sound(supervised, total, seed)
    batch["input_ids"][0, 1] = BROKEN
    return batch


def nan_at_broken(_module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook on the embedding."""
    return output * torch.nan if bool((inputs[0] == BROKEN).any()) else output


def toy(*, router: float = 0.0) -> ToyLM:
    model = ToyLM(router=router)
    model.embedding.register_forward_hook(nan_at_broken)
    return model


class Factor(CausalLMObjective):
    """Multiplies the loss of a micro-batch that has a "factor": a spike, or an overflow of the loss alone."""

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        outputs = super().__call__(model, batch)
        factor = batch.get("factor", 1.0)
        assert outputs.token_losses is not None
        return ObjectiveOutput(
            loss_sum=outputs.loss_sum * factor,
            extra_terms=outputs.extra_terms,
            token_losses=outputs.token_losses * factor,
        )


def guarded(
    model: nn.Module, *, ranks: int = 1, guard: bool = True, lr: float = 1.0, **options: Any
) -> tuple[Engine, TokenNormedLossKit]:
    """An engine whose first step moves each weight by minus ``lr`` times its gradient."""
    kit = TokenNormedLossKit("cpu", ranks, empty_window=options.pop("empty_window", "raise"))
    if guard:
        kit.build_loss_guard(**SETTINGS)
    engine = Engine(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        objective=options.pop("objective", None) or Factor(),
        dp_world_size=ranks,
        token_loss_kit=kit,
        max_grad_norm=None,
        **options,
    )
    return engine, kit


def reference_gradient(window: Sequence[Batch], *, router: float = 0.0) -> Tensor:
    """The gradient of the mean over these micro-batches' tokens, in float64, by autograd alone."""
    model = toy(router=router)
    parameters = list(model.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(reference_loss(model, window), parameters)])


def step_gradient(engine: Engine, window: Sequence[Batch], module: nn.Module) -> Tensor:
    """The gradient that reached the optimizer, read off the step that it made."""
    before = weights(module)
    engine.train_step(window)
    return (before - weights(module)) / engine.optimizer.param_groups[0]["lr"]


def error(found: Tensor, reference: Tensor) -> float:
    return float((found - reference).norm() / reference.norm())
