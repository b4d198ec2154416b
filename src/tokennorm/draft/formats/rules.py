"""The rules by which servers load drafters: settings and layout; the weights' are beside this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tokennorm.draft.formats.contents import Findings, Folder, Server
from tokennorm.draft.formats.weights import check_weights

__all__ = ["check_folder"]


def check_folder(folder: Folder, server: Server) -> Findings:
    """Everything that ``server`` would object to."""
    if server == "speculators" and not folder.nested:
        yield "refuses", "it is a flat checkpoint (no speculators_model_type): export it as speculators"
        return
    if server == "sglang" and folder.nested:
        yield "refuses", "it is in the speculators format, which SGLang does not read: export it as dspark"
        return
    if server == "speculators":
        yield from _speculators_fields(folder)
    missing = list(_required(folder))
    for name in missing:
        yield "refuses", f"config.json has no {name}"
    if missing:
        return
    yield from _architecture(folder, server)
    yield from _mask_and_layers(folder, server)
    yield from check_weights(folder, server)
    yield from _layout(folder, server)
    yield from _against_target(folder)


def _required(folder: Folder) -> Iterator[str]:
    """What nothing else can be said without, as far as it is missing or no number."""
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(folder.decoder.get(name), int):
            yield f"transformer_layer_config.{name}" if folder.nested else name
    for name in ("block_size", "mask_token_id"):
        if not isinstance(folder.get(name), int):
            yield name
    if folder.layer_ids is None:
        yield "aux_hidden_state_layer_ids" if folder.nested else "target_layer_ids"


def _speculators_fields(folder: Folder) -> Findings:
    kind = folder.values["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        yield "refuses", f"speculators_model_type is {kind!r}, not dspark or dflash"
    inner = folder.values.get("speculators_config")
    if not isinstance(inner, Mapping):
        yield "refuses", "config.json has no speculators_config (algorithm, proposal_methods, verifier)"
        return
    if inner.get("algorithm") != kind:
        yield (
            "refuses",
            f"speculators_config says algorithm {inner.get('algorithm')!r}, the model type is {kind!r}",
        )
    if not (inner.get("verifier") or {}).get("name_or_path"):
        yield "refuses", "speculators_config does not name the target (verifier.name_or_path)"
    methods = inner.get("proposal_methods") or []
    tokens = methods[0].get("speculative_tokens") if methods else None
    size = folder.get("block_size")
    expected = None if size is None else size - folder.bonus_anchor
    if tokens is None:
        yield "refuses", "speculators_config has no proposal_methods with speculative_tokens"
    elif tokens != expected:
        yield "degrades", f"it proposes {tokens} tokens per block, blocks of {size} in this layout hold {expected}"
    if folder.values.get("draft_vocab_size") is None:
        yield "refuses", "config.json has no draft_vocab_size"


def _architecture(folder: Folder, server: Server) -> Findings:
    known = {
        "vllm": ("Qwen3DSparkModel", "DFlashDraftModel", "DSparkDraftModel"),
        "sglang": ("Qwen3DSparkModel", "DFlashDraftModel", "DSparkDraftModel"),
        "speculators": ("DSparkDraftModel", "DFlashDraftModel", "DSparkSpeculator", "DFlashSpeculator"),
    }[server]
    # vLLM chooses the class of a nested checkpoint by its model type.
    if not (folder.nested and server == "vllm") and not set(folder.architectures) & set(known):
        yield "refuses", f"architectures are {folder.architectures}; it knows {', '.join(known)}"
    kinds = set(folder.decoder.get("layer_types") or []) - {"full_attention"}
    if kinds:
        yield "notes", f"layers of type {', '.join(sorted(kinds))}"


def _mask_and_layers(folder: Folder, server: Server) -> Findings:
    mask, vocabulary = int(folder.get("mask_token_id")), int(folder.decoder["vocab_size"])
    if not 0 <= mask < vocabulary:
        yield "refuses", f"mask_token_id {mask} is outside the target's vocabulary of {vocabulary}"
    ends = {"pad_token_id", "eos_token_id"}
    if same := [name for name in sorted(ends) if _is_one(mask, folder.decoder.get(name))]:
        yield "notes", f"mask_token_id {mask} is also the {' and the '.join(same)}"
    ids = folder.layer_ids
    assert ids is not None
    if not ids:
        yield "refuses", "the list of target layers is empty"
    if server == "sglang":
        layers = folder.values.get("num_target_layers") or (folder.target or {}).get("num_hidden_layers")
        if -1 in ids:
            yield "refuses", "it reads the embedding's output (layer -1), which SGLang can't capture"
        if layers is not None and int(layers) - 1 in ids:
            yield "refuses", f"it reads the last layer ({int(layers) - 1}), which SGLang can't capture"


def _layout(folder: Folder, server: Server) -> Findings:
    size = int(folder.get("block_size"))
    proposals = size - folder.bonus_anchor
    if server == "sglang" and folder.bonus_anchor and not folder.is_dflash:
        yield (
            "refuses",
            (
                "bonus-anchor layout: SGLang's DSpark reads slot 0 as the first proposal, so every token would "
                "come one position early"
            ),
        )
    elif server == "sglang" and not folder.is_dflash:
        yield "notes", f"start it with num_draft_tokens {size + 1}: it drafts one less than that"
    if folder.is_dflash and not folder.bonus_anchor and server != "speculators":
        yield "refuses", "next-token layout in a DFlash drafter: servers read slot 0 as the anchor"
    if proposals < 1:
        yield "refuses", f"blocks of {size} slots propose nothing in this layout"


def _against_target(folder: Folder) -> Findings:
    if folder.target is None:
        return
    for name in ("vocab_size", "hidden_size"):
        mine, theirs = folder.decoder.get(name), folder.target.get(name)
        if theirs is not None and mine != theirs:
            yield "refuses", f"{name} is {mine}, the target's is {theirs}"
    layers, ids = folder.target.get("num_hidden_layers"), folder.layer_ids or []
    if layers is not None and (outside := [i for i in ids if not -1 <= i < layers]):
        yield "refuses", f"it reads layers {outside} (counted from 0) of a target with {layers}"
    said = folder.values.get("num_target_layers")
    if said is not None and layers is not None and said != layers:
        yield "refuses", f"num_target_layers is {said}, the target has {layers}"


def _is_one(token: int, ids: Any) -> bool:
    return token in ids if isinstance(ids, list) else token == ids
