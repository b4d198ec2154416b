"""Tiny models of a named architecture, and the tokenizer that TRL asks for. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tokennorm.errors import ConfigError

__all__ = ["VOCABULARY", "tiny_model"]

VOCABULARY = 29
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    # A model that is sure of something, so that samples differ in their gradients.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "use_cache": False,
    "attention_dropout": 0.0,
}
# A router loss about as big as the cross-entropy, so that a mistake in it shows.
_EXPERTS = {
    "num_local_experts": 3,
    "num_experts": 3,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}


def tiny_model(name: str, *, seed: int = 0) -> nn.Module:
    """A causal LM of a Hugging Face architecture with one layer; a mixture of experts has three and a router loss.

    Args:
        name: the ``model_type`` of its configuration: ``llama``, ``qwen3``, ``mixtral``, ...
        seed: of the weights.

    Raises:
        ConfigError: transformers has no such architecture, or it can't be made this small.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        known = AutoConfig.for_model(name)
    except ValueError as error:
        raise ConfigError(
            f"transformers has no architecture {name!r}", fix="give a model_type such as llama, qwen3 or mixtral"
        ) from error
    values = {key: value for key, value in {**_SIZES, **_EXPERTS}.items() if hasattr(known, key)}
    try:
        config: Any = AutoConfig.for_model(name, **values)
        if hasattr(config, "num_experts_per_tok"):
            # The fast kernel for experts differs from the reference's in its last digits.
            config._experts_implementation = "eager"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ConfigError(
            f"a tiny {name} can't be made: {type(error).__name__}: {error}",
            why="its configuration has sizes that the audit does not know.",
            fix="audit it with tokennorm.audit.audit_loop and a build function of your own",
        ) from error
    return model.float()
