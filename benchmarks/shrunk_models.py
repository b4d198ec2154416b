"""Tiny models of every family: the default configuration of transformers, with its sizes made small.

Sizes are replaced by the name of the attribute, the same way for all families. What a family needs beyond that is
in ``SPECIAL``. Nothing here knows about losses.
"""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 211
HIDDEN = 32

# Size -> names of attributes.
_BY_NAME: dict[int, str] = {
    VOCABULARY: """
        vocab_size n_vocab text_vocab_size vocab_size_per_layer_input
    """,
    HIDDEN: """
        hidden_size d_model n_embd emb_dim embedding_size embedding_dim embed_dim dim
        word_embed_proj_dim input_embedding_size output_embedding_size lru_width
        attention_hidden_size backbone_hidden_size text_hidden_size audio_hidden_size
        vision_hidden_size output_dim projection_dim projector_hidden_size out_hidden_size
        linear_num_heads_dim qformer_hidden_size encoder_hidden_size cross_hidden_size
        vision_feature_dim shape_embed_dim pronunciation_embed_dim hidden_dim vision_output_dim
        projector_output_dim ple_embed_dim
    """,
    48: """
        intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dim_ff dff
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size d_inner
        ffn_hidden_size feed_forward_size expert_ffn_hidden_size intermediate_size_mlp ffn_size
        moe_shared_expert_intermediate_size shared_experts_intermediate_size mlp_dim
        dense_intermediate_size prompt_mid_dim router_hidden_size
    """,
    2: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth
        num_encoder_layers num_decoder_layers num_blocks num_experts_per_tok moe_topk moe_k
        num_key_value_heads n_heads_kv num_experts_per_token top_k_experts num_kv_heads
        max_window_layers linear_num_key_heads swa_num_key_value_heads num_hidden_layers_vision
        num_global_layers num_nextn_predict_layers num_global_key_value_heads moe_top_k
    """,
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads
        encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads num_experts
        n_routed_experts num_local_experts moe_num_experts num_expert index_n_heads
        linear_num_value_heads linear_num_heads num_query_groups swa_num_attention_heads rotary_dim
        mamba_d_state mamba_n_heads time_step_rank mamba_dt_rank
    """,
    8: """
        head_dim qk_nope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim d_kv
        kv_channels dim_head swa_head_dim linear_head_dim state_size ssm_state_size d_head
        qk_rope_head_dim attention_head_size global_head_dim index_head_dim index_topk
        hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank hc_lowrank
        mamba_chunk_size chunk_size block_size moe_latent_size o_lora_rank
    """,
    16: """
        q_lora_rank kv_lora_rank sliding_window sliding_window_size attention_window_size
    """,
    1: """
        n_group topk_group num_expert_group mamba_n_groups n_groups mamba_ngroups n_shared_experts
    """,
    128: """
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length
        max_target_positions max_source_positions original_max_position_embeddings seq_length
    """,
}
_SIZES: dict[str, int] = {name: size for size, names in _BY_NAME.items() for name in names.split()}
# What would be between head and loss, or added to the loss, if the defaults didn't leave it out.
_SWITCHED_ON = {
    "is_decoder": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "aux_loss_coef": 0.1,
    "z_loss_coefficient": 0.1,
    "logits_scaling": 0.6,
    "logit_scale": 0.4,
    "lm_head_multiplier": 0.7,
    "final_logit_softcapping": 3.0,
    "logits_soft_cap": 3.0,
    "output_logit_soft_cap": 3.0,
    "unpadded_vocab_size": VOCABULARY - 7,
}
_NO_DROPOUT = ("dropout", "pdrop", "drop", "dropout_rate", "dropout_prob", "layerdrop")

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

# What a family needs beyond small sizes: constructor arguments of its configuration, by model type.
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"num_hidden_layers": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {"num_hidden_layers": 4, "num_hash_layers": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "flint": {"mlp_only_layers": []},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 5},
    "glm46v_text": {"rope_parameters": _MROPE},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 8, "qk_head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "reformer": {
        "axial_pos_shape": [4, 6],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
}


def shrunk_config(default: Any, **overrides: Any) -> Any:
    """A small configuration of the same class as ``default``, and of all the configurations inside it."""
    arguments: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name.startswith("_"):
            continue
        if name in getattr(default, "sub_configs", {}) and hasattr(value, "to_dict"):
            arguments[name] = shrunk_config(value)
        elif isinstance(value, int) and not isinstance(value, bool) and name in _SIZES:
            arguments[name] = min(_SIZES[name], value) if value > 0 else value
        elif isinstance(value, float) and name.endswith(_NO_DROPOUT):
            arguments[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY - 40:
            arguments[name] = VOCABULARY - 1 - len(arguments) % 40
    # Fewer key-value heads only where the family shares them.
    if getattr(default, "num_key_value_heads", None) == getattr(default, "num_attention_heads", 0):
        arguments.pop("num_key_value_heads", None)
        if hasattr(default, "num_key_value_heads"):
            arguments["num_key_value_heads"] = arguments.get("num_attention_heads")
    arguments.update(SPECIAL.get(default.model_type, {}))
    arguments.update(overrides)
    config = type(default)(**arguments)
    for name, value in _SWITCHED_ON.items():
        if hasattr(config, name):
            setattr(config, name, value)
    # The grouped matrix product knows no float64.
    config._experts_implementation = "eager"
    return config


def build(config: Any, model_class: Any, dtype: torch.dtype) -> Any:
    """The model in float64 or float32, with the same weights whatever the dtype, and logits of ordinary size."""
    torch.manual_seed(0)
    model = model_class(config).float()
    head = model.get_output_embeddings()
    with torch.no_grad():
        for parameter in head.parameters() if head is not None else ():
            parameter.mul_(20)
    return model.to(dtype)
