"""What is done to a model before it trains leaves the gradient exact: checkpointing, compiling, adapters.

In one process, against the float64 definition of the same model; ``pytest -s`` prints the errors.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.exactness import (
    batches_of,
    by_definition,
    make_model,
    relative_error,
    with_learned_adapters,
)
from tests.distributed.sharded import LAYOUT, KeepsGradients
from tokennorm.engine import CausalLMObjective, Engine, Runtime, precision_notes
from tokennorm.errors import ConfigError
from tokennorm.kit import apply_chunked_token_loss_patch
from tokennorm.recipes.sft.config import LoraConfig, ModelConfig, SftConfig
from tokennorm.recipes.sft.modelling import adapt, compile_decoder, place

# peft still reads what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# Three micro-batches, packed, of very different token counts.
BATCHES, SAMPLES = batches_of(dataclasses.replace(LAYOUT, unsupervised_rank=False), 1, 0, short=False)


def train_once(model: nn.Module) -> list[torch.Tensor]:
    """The gradient of a window as it reaches the optimizer."""
    optimizer = KeepsGradients([p for p in model.parameters() if p.requires_grad], lr=1.0)
    Engine(model=model, optimizer=optimizer, objective=CausalLMObjective(), max_grad_norm=None).train_step(BATCHES)
    return [gradient for gradient in optimizer.seen if gradient is not None]


def configured(model: Any, config: SftConfig) -> Any:
    """The recipe's own steps, in its order."""
    model = apply_chunked_token_loss_patch(adapt(model, config), chunk_size=3)
    return place(model, config, Runtime())


def calls_of_a_block(model: nn.Module) -> list[int]:
    calls: list[int] = []
    block = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def test_gradient_checkpointing_is_exact_and_runs_each_block_twice() -> None:
    model = configured(make_model(), SftConfig(model=ModelConfig(dtype="float64", gradient_checkpointing=True)))
    calls = calls_of_a_block(model)
    error = relative_error(train_once(model), by_definition(make_model(), SAMPLES, torch.float64))
    print(f"checkpointing {error:.1e}")
    assert error < 1e-12
    assert len(calls) == 2 * len(BATCHES)


def test_a_compiled_decoder_is_exact() -> None:
    model = configured(make_model(), SftConfig(model=ModelConfig(dtype="float64")))
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    names = list(model.state_dict())
    compile_decoder(model, counting)
    error = relative_error(train_once(model), by_definition(make_model(), SAMPLES, torch.float64))
    print(f"compiled {error:.1e}, {len(graphs)} graphs")
    assert error < 1e-12
    # One graph of the whole decoder, which serves micro-batches of any length (and one for a single row).
    assert 1 <= len(graphs) <= 2
    assert list(model.state_dict()) == names


def adapted(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A small model with adapters that have already learned something."""
    config = SftConfig(lora=LoraConfig(rank=2, **options))
    return with_learned_adapters(adapt(make_model().to(dtype), config))


@pytest.mark.parametrize("options", [{}, {"target_modules": ("q_proj", "lm_head"), "alpha": 1}])
def test_adapters_are_exact_and_the_base_is_frozen(options: dict[str, Any]) -> None:
    plain = adapted(**options)
    learning = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert learning
    assert all("lora_" in name for name in learning)
    model = place(apply_chunked_token_loss_patch(copy.deepcopy(plain), chunk_size=3), SftConfig(), Runtime())
    error = relative_error(train_once(model), by_definition(plain, SAMPLES, torch.float64))
    print(f"adapters {options} {error:.1e}")
    assert error < 1e-12


def test_adapters_of_a_half_precision_base_are_float32() -> None:
    plain = adapted(torch.bfloat16)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in plain.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert precision_notes(plain, None) == []
    truth = by_definition(plain, SAMPLES, torch.float64)
    model = place(apply_chunked_token_loss_patch(copy.deepcopy(plain), chunk_size=3), SftConfig(), Runtime())
    error = relative_error(train_once(model), truth)
    naive = relative_error(naive_loop(plain), truth)
    print(f"adapters on bfloat16 {error:.1e}, naive {naive:.1e}")
    assert 1e-5 < error < 1.5 * naive


def naive_loop(model: Any) -> list[torch.Tensor]:
    """One sample at a time, in the model's own mixture of dtypes."""
    model = copy.deepcopy(model)
    count = sum(int((sample.shift_labels() != -100).sum()) for sample in SAMPLES)
    for sample in SAMPLES:
        logits = model(input_ids=sample.input_ids.unsqueeze(0)).logits[0]
        loss = nn.functional.cross_entropy(logits.float(), sample.shift_labels(), reduction="sum")
        (loss / count).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def test_adapters_start_alike_whatever_the_random_state() -> None:
    config = SftConfig(lora=LoraConfig(rank=2))
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.random.get_rng_state()
        models.append(adapt(make_model_keeping_state(), config).state_dict())
        assert torch.equal(torch.random.get_rng_state(), expected)
    assert any("lora_A" in name and value.norm() > 0 for name, value in models[0].items())
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def make_model_keeping_state() -> Any:
    with torch.random.fork_rng():
        return make_model()


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="no adapters on nonsense"):
        adapt(make_model(), SftConfig(lora=LoraConfig(rank=2, target_modules=("nonsense",))))
    with pytest.raises(ConfigError, match="autocast is 'bfloat16'"):
        ModelConfig(dtype="float64", autocast="bfloat16")
    with pytest.raises(ConfigError, match="float16' with bfloat16 weights"):
        SftConfig(model=ModelConfig(dtype="bfloat16", autocast="float16"))
    plain: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Linear has no gradient checkpointing"):
        adapt(plain, SftConfig(model=ModelConfig(gradient_checkpointing=True)))
