"""What each server would say, in words: a folder that is right, and one mistake at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.draft.drafter_toy import VOCAB, WIDTH, toy_drafter
from tokennorm.draft.formats.export import export_drafter
from tokennorm.draft.formats.validate import FolderReport, validate_folder
from tokennorm.errors import DataError

SERVERS = ("vllm", "sglang", "speculators")
# The toys read the embedding and the last layer, which SGLang can't capture.
MIDDLE = {"target_layer_ids": (1, 2, 4)}
DFLASH = {
    "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False,
    "first_supervised_slot": 1, **MIDDLE,
}  # fmt: skip


def exported(folder: Path, kind: Any = "dspark", **options: Any) -> Path:
    return export_drafter(toy_drafter(**{**MIDDLE, **options}), folder / "out", kind=kind, verifier="org/target")


def served_by(report: FolderReport) -> set[str]:
    return {server for server in SERVERS if report.serves(server)}  # type: ignore[arg-type]


def change(folder: Path, settings: dict[str, Any], weights: dict[str, torch.Tensor | None] | None = None) -> Path:
    """Change or (None) remove settings and weights."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    if weights:
        tensors = load_file(folder / "model.safetensors") | weights
        save_file({n: v for n, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("kind", "options", "servers"),
    [
        ("dspark", {}, {"vllm", "sglang"}),
        ("speculators", {}, {"vllm", "speculators"}),
        ("dflash", DFLASH, {"vllm", "sglang"}),
        ("speculators", DFLASH, {"vllm", "speculators"}),
        ("dspark", {"draft_vocab_size": 20}, {"vllm"}),
        ("speculators", {"draft_vocab_size": 20}, {"vllm", "speculators"}),
        ("dspark", {"first_supervised_slot": 1}, {"vllm"}),
        ("speculators", {"first_supervised_slot": 1}, {"vllm", "speculators"}),
        ("dspark", {"markov_head_type": "gated"}, {"sglang"}),
        ("dspark", {"markov_head_type": "rnn"}, {"sglang"}),
        ("speculators", {"markov_head_type": "rnn"}, {"speculators"}),
        ("dspark", {"qk_norm": False}, set()),
        ("dspark", {"target_layer_ids": (-1, 2, 4)}, {"vllm"}),
        ("dspark", {"target_layer_ids": (1, 2, 5)}, {"vllm"}),
        ("dspark", {"enable_confidence_head": False}, {"vllm", "sglang"}),
        ("dspark", {"confidence_head_with_markov": False}, {"vllm", "sglang"}),
    ],
)
def test_who_loads_what_we_export(kind: Any, options: dict, servers: set[str], tmp_path: Path) -> None:
    report = validate_folder(exported(tmp_path, kind, **options), target=_target())
    assert served_by(report) == servers, str(report)


def _target(**settings: Any) -> dict[str, Any]:
    return {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 6, **settings}


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], dict[str, str]]] = {
    # name: (settings, weights, what each server refuses it for)
    "no mask token": ({"mask_token_id": None}, {}, {"vllm": "no mask_token_id", "sglang": "no mask_token_id"}),
    "mask token outside": ({"mask_token_id": VOCAB}, {}, {"vllm": "outside", "sglang": "outside"}),
    "no layers": (
        {"target_layer_ids": None},
        {},
        {"vllm": "no target_layer_ids", "sglang": "no target_layer_ids"},
    ),
    "one layer less": ({"target_layer_ids": [1, 2]}, {}, {"vllm": "fc.weight is", "sglang": "fc.weight is"}),
    "other architecture": (
        {"architectures": ["LlamaForCausalLM"]},
        {},
        {"vllm": "architectures", "sglang": "knows"},
    ),
    "prefix": (
        {},
        {"norm.weight": None, "model.norm.weight": torch.zeros(WIDTH)},
        {"vllm": "prefix model", "sglang": "prefix model"},
    ),
    "missing weight": ({}, {"norm.weight": None}, {"vllm": "missing", "sglang": "missing"}),
    "unknown weight": (
        {},
        {"layers.0.self_attn.q_proj.bias": torch.zeros(24)},
        {"vllm": "no loader knows", "sglang": "no loader knows"},
    ),
    "no Markov type": ({"markov_head_type": None}, {}, {"sglang": "markov_head_type is missing"}),
    "Markov type unknown": ({"markov_head_type": "lstm"}, {}, {"vllm": "none of", "sglang": "none of"}),
    "Markov weight of another type": (
        {},
        {"markov_head.gate_proj.weight": torch.zeros(5, 21)},
        {"vllm": "has no gate_proj", "sglang": "has no gate_proj"},
    ),
    "rank wrong": ({"markov_rank": 4}, {}, {"vllm": "markov_w1.weight is", "sglang": "markov_w2.weight is"}),
    "rank zero": ({"markov_rank": 0}, {}, {"vllm": "needs a Markov head", "sglang": "needs a Markov head"}),
    "half a confidence head": (
        {},
        {"confidence_head.proj.bias": None},
        {"vllm": "confidence_head.proj.bias", "sglang": "confidence_head.proj.bias"},
    ),
    # vLLM switches the head off, see below.
    "no confidence head": (
        {},
        {"confidence_head.proj.bias": None, "confidence_head.proj.weight": None},
        {"sglang": "confidence_head.proj.weight"},
    ),
    "confidence without Markov": (
        {"confidence_head_with_markov": False},
        {},
        {"vllm": "confidence_head.proj.weight is", "sglang": "confidence_head.proj.weight is"},
    ),
    "another target": (
        {"num_target_layers": 5},
        {},
        {"vllm": "the target has 6", "sglang": "the target has 6"},
    ),
    "text for a number": ({"hidden_size": "wide"}, {}, {"vllm": "no hidden_size", "sglang": "no hidden_size"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_mistake_at_a_time(name: str, tmp_path: Path) -> None:
    settings, weights, expected = MISTAKES[name]
    report = validate_folder(change(exported(tmp_path), settings, weights), target=_target())
    refused = {
        server: " / ".join(f.message for f in report.findings if f.server == server and f.verdict == "refuses")
        for server in ("vllm", "sglang")
    }
    assert {server for server, text in refused.items() if text} == set(expected), str(report)
    for server, words in expected.items():
        assert words in refused[server], str(report)


def test_reduced_vocabularies(tmp_path: Path) -> None:
    folder = exported(tmp_path, "speculators", draft_vocab_size=20)
    tensors = load_file(folder / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(20)

    def said(weights: dict[str, torch.Tensor | None], server: str = "vllm") -> str:
        save_file(tensors, folder / "model.safetensors")
        report = validate_folder(change(folder, {}, weights))
        return " / ".join(f.message for f in report.findings if f.server == server and f.verdict == "refuses")

    assert said({}) == ""
    # The tokens themselves instead of offsets: the commonest mistake.
    assert "offsets, not the tokens" in said({"d2t": ids})
    assert "needs d2t" in said({"d2t": None})
    assert "lm_head.weight" in said({"lm_head.weight": None})
    assert "lm_head.weight is [31, 16]" in said({"lm_head.weight": torch.zeros(VOCAB, WIDTH)})
    assert "t2d" in said({"t2d": None}, "speculators")
    assert said({"t2d": None}) == ""


def test_fields_of_the_speculators_format(tmp_path: Path) -> None:
    folder = exported(tmp_path, "speculators")
    inner = json.loads((folder / "config.json").read_text())["speculators_config"]

    def said(settings: dict[str, Any]) -> str:
        before = (folder / "config.json").read_text()
        report = validate_folder(change(folder, settings))
        (folder / "config.json").write_text(before)
        return " / ".join(f.message for f in report.findings if f.server == "speculators")

    assert said({}) == ""
    assert "no speculators_config" in said({"speculators_config": None})
    assert "algorithm" in said({"speculators_config": {**inner, "algorithm": "eagle3"}})
    assert "does not name the target" in said({"speculators_config": {**inner, "verifier": {}}})
    assert "no proposal_methods" in said({"speculators_config": {**inner, "proposal_methods": []}})
    wrong = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert "hold 4" in said({"speculators_config": {**inner, "proposal_methods": wrong}})
    assert "draft_vocab_size" in said({"draft_vocab_size": None})
    assert "not dspark or dflash" in said({"speculators_model_type": "medusa"})
    assert "aux_hidden_state_layer_ids" in said({"aux_hidden_state_layer_ids": None})


def test_what_only_degrades_is_told_apart(tmp_path: Path) -> None:
    folder = change(
        exported(tmp_path), {}, {"confidence_head.proj.bias": None, "confidence_head.proj.weight": None}
    )
    report = validate_folder(folder)
    assert report.serves("vllm")
    text = str(report)
    assert "vLLM: can load it" in text
    assert "loads it, but: the confidence head is switched off" in text
    assert "SGLang: refuses it" in text
    folder = change(exported(tmp_path), {"enable_confidence_head": False, "eos_token_id": 29})
    text = str(validate_folder(folder))
    assert "enable_confidence_head is not set" in text
    assert "note: mask_token_id 29 is also the eos_token_id" in text
    assert "note: start it with num_draft_tokens 5" in text
    assert "embed_tokens and lm_head are skipped" in text


def test_targets_that_do_not_belong(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    for settings, words in (
        ({"vocab_size": 40}, "vocab_size is 31, the target's is 40"),
        ({"hidden_size": 32}, "hidden_size is 16, the target's is 32"),
        ({"num_hidden_layers": 3}, "reads layers [4]"),
    ):
        assert words in str(validate_folder(folder, target=_target(**settings)))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": _target(vocab_size=40)}))
    assert "the target's is 40" in str(validate_folder(folder, target=tmp_path))
    with pytest.raises(DataError, match=r"config\.json"):
        validate_folder(tmp_path / "nothing")
    with pytest.raises(DataError, match="no weights"):
        validate_folder(tmp_path)
