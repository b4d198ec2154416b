"""The configurations of published drafters, to and from :class:`DraftConfig`.

- ``dspark``: flat, as ``deepseek-ai/dspark_qwen3_8b_block7`` has it; vLLM and SGLang read it.
- ``dflash``: flat, as z-lab's DFlash drafters have it: no Markov and no confidence head, bonus-anchor layout,
  embedding and head are the target's.
- ``speculators``: nested, as the speculators library writes it for vLLM; it counts layers from the embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from tokennorm.draft.config import DraftConfig
from tokennorm.draft.layer_ids import layer_ids_from_server, layer_ids_to_server
from tokennorm.errors import ConfigError, DataError

__all__ = ["DraftFormat", "config_from_folder", "detect_format", "folder_config"]

DraftFormat = Literal["dspark", "dflash", "speculators"]

_FLAT_ARCHITECTURES = {True: "Qwen3DSparkModel", False: "LlamaDSparkModel"}
# Of a target's configuration, what says nothing about the drafter or contradicts it.
_NOT_OURS = ("_name_or_path", "transformers_version", "quantization_config", "auto_map", "id2label", "label2id")
_NOT_OURS += ("problem_type", "return_dict", "output_hidden_states", "output_attentions", "is_encoder_decoder")
_NOT_OURS += ("chunk_size_feed_forward", "pretraining_tp")
# Of a flat drafter's configuration, what says nothing about its target.
_OURS = ("architectures", "dflash_config", "block_size", "num_target_layers", "mask_token_id", "target_layer_ids")
_OURS += (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "num_anchors",
)
_OURS += ("draft_vocab_size", "sample_from_anchor", "dspark_bonus_anchor")


def folder_config(
    config: DraftConfig,
    kind: DraftFormat,
    *,
    dtype: str,
    verifier: str | None = None,
    num_anchors: int | None = None,
) -> dict[str, Any]:
    """``config.json`` of a drafter.

    Args:
        config: the drafter's.
        kind: which schema.
        dtype: of the saved weights, ``bfloat16`` for example.
        verifier: name or path of the target; needed by ``speculators``.
        num_anchors: how many the training drew per sequence, for ``dspark``; only for the record.

    Raises:
        ConfigError: the schema can't express this drafter.
    """
    if kind == "speculators":
        return _speculators(config, dtype=dtype, verifier=verifier)
    values = _decoder(config, dtype=dtype)
    if kind == "dflash":
        _require_plain(config)
        reads = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        return values | {
            "architectures": ["DFlashDraftModel"],
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            "dflash_config": reads,
        }
    values |= {
        "architectures": [_FLAT_ARCHITECTURES[config.qk_norm]],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **_heads(config),
    }
    if num_anchors is not None:
        values["num_anchors"] = num_anchors
    if config.draft_vocab_size is not None:
        values["draft_vocab_size"] = config.draft_vocab_size
    if config.first_supervised_slot:
        values |= {"sample_from_anchor": False, "dspark_bonus_anchor": True}
    return values


def detect_format(values: Mapping[str, Any]) -> DraftFormat:
    """Which schema a ``config.json`` follows.

    Raises:
        DataError: none of them.
    """
    if "speculators_model_type" in values:
        return "speculators"
    architectures = [str(name) for name in values.get("architectures") or []]
    if any("DSpark" in name for name in architectures) or "markov_rank" in values:
        return "dspark"
    if any("DFlash" in name for name in architectures) or "dflash_config" in values:
        return "dflash"
    raise DataError(
        f"config.json with architectures {architectures} is no drafter's",
        fix="give a folder in the DSpark, DFlash or speculators schema.",
    )


def config_from_folder(
    values: Mapping[str, Any], tensor_names: Collection[str], *, num_target_layers: int | None = None
) -> DraftConfig:
    """The drafter that a ``config.json`` describes.

    Args:
        values: its contents.
        tensor_names: of the weights beside it; they tell whether queries and keys are normalised.
        num_target_layers: of the target, where it is at hand; the speculators schema does not say.

    Raises:
        DataError: something is missing, or the drafter is of a kind that this library does not have.
    """
    kind = detect_format(values)
    if kind == "speculators":
        decoder, drafting = values.get("transformer_layer_config") or {}, values
        server_ids = _need(values, "aux_hidden_state_layer_ids", kind)
        layer_ids = layer_ids_from_server(server_ids)
    else:
        decoder, drafting = values, dict(values.get("dflash_config") or {}) | dict(values)
        layer_ids = tuple(_need(drafting, "target_layer_ids", kind))
    _refuse_other_layers(decoder)
    vocabulary = _need(decoder, "vocab_size", kind)
    reduced = drafting.get("draft_vocab_size")
    rank = int(drafting.get("markov_rank") or 0)
    heads = _need(decoder, "num_attention_heads", kind)
    layers = num_target_layers or values.get("num_target_layers") or max(*layer_ids, 0) + 1
    try:
        return DraftConfig(
            vocab_size=vocabulary,
            hidden_size=_need(decoder, "hidden_size", kind),
            intermediate_size=_need(decoder, "intermediate_size", kind),
            num_layers=_need(decoder, "num_hidden_layers", kind),
            num_attention_heads=heads,
            num_key_value_heads=decoder.get("num_key_value_heads") or heads,
            head_dim=decoder.get("head_dim") or decoder["hidden_size"] // heads,
            rms_norm_eps=decoder.get("rms_norm_eps", 1e-6),
            hidden_act=decoder.get("hidden_act", "silu"),
            rope_parameters=_read_rope(decoder),
            max_position_embeddings=decoder.get("max_position_embeddings", 32768),
            initializer_range=decoder.get("initializer_range", 0.02),
            qk_norm=any(name.endswith("self_attn.q_norm.weight") for name in tensor_names),
            num_target_layers=layers,
            target_layer_ids=layer_ids,
            block_size=_need(drafting, "block_size", kind),
            mask_token_id=_need(drafting, "mask_token_id", kind),
            first_supervised_slot=_read_layout(drafting, values.get("speculators_model_type", kind)),
            markov_rank=rank,
            markov_head_type=drafting.get("markov_head_type") or "vanilla",
            enable_confidence_head=bool(drafting.get("enable_confidence_head", False)),
            confidence_head_with_markov=bool(drafting.get("confidence_head_with_markov", False)) and rank > 0,
            draft_vocab_size=None if reduced in (None, vocabulary) else reduced,
            target={key: value for key, value in decoder.items() if key not in _OURS},
        )
    except ConfigError as error:
        raise DataError(f"config.json describes no drafter that works: {error.what}", fix=error.fix) from error


def _decoder(config: DraftConfig, *, dtype: str) -> dict[str, Any]:
    """The target's configuration with the drafter's layers; rotary parameters the old and the new way."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {key: value for key, value in config.target.items() if key not in _NOT_OURS} | {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _heads(config: DraftConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def _speculators(config: DraftConfig, *, dtype: str, verifier: str | None) -> dict[str, Any]:
    if not verifier:
        raise ConfigError(
            "the speculators format names the target",
            fix="give its Hugging Face id or path: verifier=...",
        )
    plain = config.markov_rank == 0 and not config.enable_confidence_head
    algorithm = "dflash" if plain else "dspark"
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_proposals}
    return {
        "speculators_model_type": algorithm,
        "architectures": ["DFlashDraftModel" if plain else "DSparkDraftModel"],
        "transformer_layer_config": _decoder(config, dtype=dtype),
        "draft_vocab_size": config.num_draft_tokens,
        "target_hidden_size": config.hidden_size,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(layer_ids_to_server(config.target_layer_ids)),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.first_supervised_slot == 0,
        **({} if plain else _heads(config)),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": verifier,
                "architectures": list(config.target.get("architectures") or []),
            },
        },
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def _require_plain(config: DraftConfig) -> None:
    has = {
        "a Markov head": config.markov_rank > 0,
        "a confidence head": config.enable_confidence_head,
        "a reduced vocabulary": config.draft_vocab_size is not None,
        "the next-token layout": config.first_supervised_slot == 0,
    }
    if found := [name for name, present in has.items() if present]:
        raise ConfigError(
            f"the DFlash schema has no place for {', '.join(found)}", fix="export as dspark or speculators."
        )


def _read_layout(drafting: Mapping[str, Any], kind: str) -> int:
    if "dspark_bonus_anchor" in drafting:
        return int(bool(drafting["dspark_bonus_anchor"]))
    # Each schema's default where it is silent.
    from_anchor = drafting.get("sample_from_anchor", kind != "dflash")
    return 0 if from_anchor else 1


def _read_rope(decoder: Mapping[str, Any]) -> dict[str, Any]:
    if parameters := decoder.get("rope_parameters"):
        return {"rope_type": "default", **parameters}
    scaling = dict(decoder.get("rope_scaling") or {})
    rope_type = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    return {"rope_theta": decoder.get("rope_theta", 10000.0), **scaling, "rope_type": rope_type}


def _refuse_other_layers(decoder: Mapping[str, Any]) -> None:
    kinds = set(decoder.get("layer_types") or []) - {"full_attention"}
    if kinds:
        raise DataError(f"the drafter has layers of type {sorted(kinds)}", why="every layer here attends in full.")


def _need(values: Mapping[str, Any], name: str, kind: str) -> Any:
    if values.get(name) is None:
        raise DataError(f"config.json has no {name}", why=f"the {kind} schema needs it.")
    return values[name]
