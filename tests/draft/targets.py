"""Tiny targets of several families."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 40


def tiny_target(family: str, *, seed: int = 0, layers: int = 4, dtype: torch.dtype = torch.float64) -> Any:
    """A causal LM in eval mode with random weights, not tied."""
    import transformers as tf

    heads = {"num_attention_heads": 2, "num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 24}
    grouped = heads | {"num_key_value_heads": 1, "head_dim": 8}
    configs: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", grouped),
        "qwen3": ("Qwen3Config", grouped),
        "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 64}),
        "gpt_neox": ("GPTNeoXConfig", heads),
        "opt": ("OPTConfig", {**heads, "ffn_dim": 24, "word_embed_proj_dim": 16, "max_position_embeddings": 64}),
        "mamba": ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": layers, "state_size": 4}),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            {**grouped, "num_experts": layers, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        ),
        "phi": ("PhiConfig", heads),
        "mistral": ("MistralConfig", {**grouped, "sliding_window": 6}),
    }
    name, options = configs[family]
    options = {"vocab_size": VOCAB, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **options}
    config = getattr(tf, name)(**options, attn_implementation="eager")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: an identity norm would look like none.
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()
