"""What a run does to the model before it trains: loading, adapters, checkpointing, compiling, wrapping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tokennorm.engine import Runtime, autocast_dtype, decoder_blocks, wrap_model
from tokennorm.errors import ConfigError
from tokennorm.recipes.common import load_causal_lm
from tokennorm.recipes.common.quantised import keep_frozen, nf4_settings, require_true_decoding
from tokennorm.recipes.sft.adapters import add_lora
from tokennorm.recipes.sft.config import ModelConfig, SftConfig

__all__ = ["adapt", "compile_blocks", "compile_decoder", "load", "place"]


def load(config: ModelConfig) -> tuple[Any, Any]:
    """Load the model, its linear layers in 4 bits if so configured, and its tokenizer.

    Raises:
        TokenNormError: it is not there, or not what it should be (:func:`load_causal_lm`).
        ConfigError: bitsandbytes does not compute right with these weights here.
    """
    if config.quantize == "none":
        return load_causal_lm(config.path, config.dtype)
    compute_dtype = autocast_dtype(config.autocast) or getattr(torch, config.dtype)
    model, tokenizer = load_causal_lm(config.path, config.dtype, quantization=nf4_settings(compute_dtype))
    keep_frozen(model)
    require_true_decoding(model)
    return model, tokenizer


def adapt(model: Any, config: SftConfig) -> Any:
    """Add adapters and gradient checkpointing as configured; before the loss patch.

    Raises:
        ConfigError: the model has no gradient checkpointing, or no layer for adapters.
    """
    if config.model.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"{type(model).__name__} has no gradient checkpointing",
                fix="leave model.gradient_checkpointing off",
            )
        # Its new name and its old one. Not the reentrant kind: that gives no gradient where a block's input needs
        # none, as with adapters.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return add_lora(model, config.lora, seed=config.train.seed)


def place(model: Any, config: SftConfig, runtime: Runtime) -> nn.Module:
    """Compile, move to the device and wrap for the ranks; after the loss patch.

    A model that is to be split stays where it is until its units are moved one by one.
    """
    splits = config.distributed.strategy != "ddp" and runtime.world_size > 1
    if config.model.compile:
        (compile_blocks if splits else compile_decoder)(model, config.model.compile_backend)
    if not splits:
        nn.Module.to(model, runtime.device)
    model.train()
    return wrap_model(
        model, runtime, config.distributed, param_dtype=autocast_dtype(config.model.autocast) if splits else None
    )


def compile_decoder(model: Any, backend: str | Callable[..., Any]) -> None:
    """Compile, in place, what comes before the head.

    The head and its loss are left out: the losses of a patched model are Python that a graph can't hold, and take
    three matrix products in any case. Names of weights stay as they are. Shapes are dynamic: micro-batches differ
    in length, and each would be compiled anew.

    Args:
        model: a causal LM of transformers, perhaps with adapters.
        backend: of ``torch.compile``, by name or as a function.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.base_model.compile(backend=backend, dynamic=True)


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any]) -> None:
    """Compile, in place, what each decoder block computes: for a model that is split into these units.

    FSDP2 gathers a unit in a hook before its forward and frees it in one after, which one graph of the decoder
    can't hold. The forward of a block is compiled and its call is not, so the hooks stay outside. Blocks of the
    same code share their graphs, however many they are.

    Args:
        model: before it is split.
        backend: of ``torch.compile``, by name or as a function.
    """
    for block in decoder_blocks(model):
        # Not block.compile(): that compiles the call, and every hook would break its graph.
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)
