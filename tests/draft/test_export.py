"""What is exported comes back bit by bit, in each schema; foreign folders load; what doesn't fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.draft.drafter_toy import VOCAB, WIDTH, close_anchors, toy_config, toy_drafter, toy_rows
from tests.draft.targets import tiny_target
from tokennorm.draft import DraftVocabulary
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.formats.export import export_drafter, load_drafter, warm_start
from tokennorm.draft.formats.schema import config_from_folder, folder_config
from tokennorm.draft.model import DraftModel
from tokennorm.draft.target import target_weights
from tokennorm.errors import CheckpointError, ConfigError, DataError

# deepseek-ai/dspark_qwen3_8b_block7: shape -> how often.
PUBLISHED_LAYER = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
    "mlp.gate_proj.weight": (12288, 4096),
    "mlp.up_proj.weight": (12288, 4096),
    "mlp.down_proj.weight": (4096, 12288),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
PUBLISHED_TOP = {
    "embed_tokens.weight": (151936, 4096),
    "lm_head.weight": (151936, 4096),
    "norm.weight": (4096,),
    "fc.weight": (4096, 20480),
    "hidden_norm.weight": (4096,),
    "markov_head.markov_w1.weight": (151936, 256),
    "markov_head.markov_w2.weight": (151936, 256),
    "confidence_head.proj.weight": (1, 4352),
    "confidence_head.proj.bias": (1,),
}


def logits(model: DraftModel) -> torch.Tensor:
    rows = toy_rows()
    blocks = rows.anchored(close_anchors(), model.config)
    with torch.no_grad():
        output = model(
            blocks=blocks, features=rows.features, position_ids=rows.position_ids, documents=rows.documents
        )
        assert (output.confidence is None) == (not model.config.enable_confidence_head)
        confidence = output.hidden[..., 0] if output.confidence is None else output.confidence
        return torch.cat([output.logits(), confidence.unsqueeze(-1)], dim=-1)


class Target(torch.nn.Module):
    """Lends embedding and head, like a causal LM."""

    def __init__(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(*embed.shape), torch.nn.Linear(*head.shape[::-1], bias=False)
        self.embed.weight.data, self.head.weight.data = embed.clone(), head.clone()
        self.config: Any = type("Config", (), {"num_hidden_layers": 6})()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def target_of(model: DraftModel) -> Target:
    """The target whose embedding and head this drafter has."""
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    if not isinstance(model.vocabulary, DraftVocabulary):
        head = model.lm_head.weight.detach()
    return Target(model.embed_tokens.weight.detach(), head)


def test_the_published_8b_checkpoint_is_rebuilt() -> None:
    from transformers import Qwen3Config

    target = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, eos_token_id=151645,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000},
    )  # fmt: skip
    config = DraftConfig.from_target(target, mask_token_id=151669)
    with torch.device("meta"):
        drafter = DraftModel(config)
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    expected = dict(PUBLISHED_TOP)
    for layer in range(5):
        expected |= {f"layers.{layer}.{name}": shape for name, shape in PUBLISHED_LAYER.items()}
    assert shapes == expected
    assert len(shapes) == 64
    assert sum(value.numel() for value in drafter.state_dict().values()) == 2_371_081_729

    values = folder_config(config, "dspark", dtype="bfloat16", num_anchors=512)
    published = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "num_hidden_layers": 5,
        "num_target_layers": 36, "block_size": 7, "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 5,
        "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512,
        "enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 256,
        "markov_head_type": "vanilla", "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960, "eos_token_id": 151645,
        "attention_bias": False, "hidden_act": "silu", "dtype": "bfloat16",
    }  # fmt: skip
    assert {name: values.get(name) for name in published} == published
    # Servers count the bonus-anchor layout in only where it is said.
    assert "sample_from_anchor" not in values
    assert config_from_folder(json.loads(json.dumps(values)), shapes).target_layer_ids == config.target_layer_ids


CASES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated, bonus anchor": {"markov_head_type": "gated", "first_supervised_slot": 1},
    "rnn, Llama layers": {"markov_head_type": "rnn", "qk_norm": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "confidence without Markov": {"confidence_head_with_markov": False},
    "no heads": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
}
DFLASH = {**CASES["no heads"], "first_supervised_slot": 1}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["dspark", "speculators"])
def test_round_trip_is_bitwise(name: str, kind: Any, tmp_path: Path) -> None:
    model = toy_drafter(**CASES[name])
    folder = export_drafter(model, tmp_path / "out", kind=kind, dtype=None, verifier="org/target")
    target = target_of(model)
    again = load_drafter(folder, target=target, dtype=torch.float64)
    assert torch.equal(logits(again), logits(model))
    state, other = model.state_dict(), again.state_dict()
    assert state.keys() == other.keys()
    assert all(torch.equal(state[key], other[key]) for key in state)
    for field in ("target_layer_ids", "mask_token_id", "block_size", "first_supervised_slot", "markov_head_type"):
        assert getattr(again.config, field) == getattr(model.config, field), field
    assert again.config.num_target_layers == 6
    # The target's weights are the target's: loading wrote nothing into them.
    assert torch.equal(target.embed.weight, model.embed_tokens.weight)
    second = export_drafter(again, tmp_path / "second", kind=kind, dtype=None, verifier="org/target")
    for file in ("config.json", "model.safetensors"):
        assert (second / file).read_bytes() == (folder / file).read_bytes()


def test_dflash_folders_and_half_precision(tmp_path: Path) -> None:
    model = toy_drafter(**DFLASH).to(torch.bfloat16)
    folder = export_drafter(model, tmp_path / "out", kind="dflash", provenance={"step": 3})
    tensors = load_file(folder / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["dflash_config"] == {"mask_token_id": 29, "target_layer_ids": [-1, 2, 5]}
    assert json.loads((folder / "tokennorm.json").read_text())["step"] == 3
    again = load_drafter(folder, target=target_of(model), dtype=torch.bfloat16)
    assert again.config.first_supervised_slot == 1
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(DataError, match="give the target"):
        load_drafter(folder)
    with pytest.raises(ConfigError, match="no place for a Markov head, a confidence head, the next-token layout"):
        export_drafter(toy_drafter(), tmp_path / "no", kind="dflash")
    with pytest.raises(ConfigError, match="names the target"):
        export_drafter(toy_drafter(), tmp_path / "no", kind="speculators")
    assert not (tmp_path / "no").exists()


def test_a_folder_of_another_writer_loads(tmp_path: Path) -> None:
    """Prefixed names, old rotary settings, tables that nobody needs, two files."""
    model = toy_drafter(draft_vocab_size=20)
    folder = export_drafter(model, tmp_path / "out", kind="speculators", dtype=None, verifier="org/target")
    values = json.loads((folder / "config.json").read_text())
    layer = values["transformer_layer_config"]
    del layer["rope_parameters"]
    values["aux_hidden_state_layer_ids"] = [0, 3, 6]
    del values["sample_from_anchor"], values["num_target_layers"]
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors["model.rotary_emb.inv_freq"] = torch.ones(3)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:9]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, folder / "model-2.safetensors")
    again = load_drafter(folder, target=target_of(model), dtype=torch.float64)
    assert again.config.target_layer_ids == (-1, 2, 5)
    assert torch.equal(logits(again), logits(model))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = export_drafter(toy_drafter(), tmp_path / "out", dtype=None)
    tensors = load_file(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())

    def changed(settings: dict[str, Any] | None = None, **weights: torch.Tensor | None) -> Path:
        names = {name.replace("__", "."): value for name, value in weights.items()}
        kept = {name: value for name, value in (tensors | names).items() if value is not None}
        save_file(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**values, **(settings or {})}))
        return folder

    with pytest.raises(DataError, match=r"lacks 1 weights, the first is norm\.weight"):
        load_drafter(changed(norm__weight=None))
    with pytest.raises(DataError, match=r"1 weights that this drafter does not have, .*q_proj\.bias"):
        load_drafter(changed(layers__0__self_attn__q_proj__bias=torch.zeros(24)))
    with pytest.raises(DataError, match=r"fc\.weight in .* is \[16, 32\], the drafter's is \[16, 48\]"):
        load_drafter(changed(fc__weight=torch.zeros(16, 32)))
    with pytest.raises(DataError, match="no d2t"):
        load_drafter(changed({"draft_vocab_size": 20}))
    with pytest.raises(DataError, match="sliding"):
        load_drafter(changed({"layer_types": ["sliding_attention", "full_attention"]}))
    with pytest.raises(DataError, match="mask_token_id"):
        load_drafter(changed({"mask_token_id": None}))
    with pytest.raises(DataError, match="describes no drafter"):
        load_drafter(changed({"mask_token_id": VOCAB}))
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    save_file({"fc.weight": torch.zeros(2)}, plain / "model.safetensors")
    with pytest.raises(DataError, match="no drafter's"):
        load_drafter(plain)
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match="can't be read"):
        load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="no weights"):
        load_drafter(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be exported"):
        export_drafter(toy_drafter(), tmp_path / "file" / "out")


def test_layer_numbers_of_both_schemas(tmp_path: Path) -> None:
    """A planted off-by-one must not survive: what is read back is what training used."""
    config = toy_config()
    flat = folder_config(config, "dspark", dtype="float32")
    nested = folder_config(config, "speculators", dtype="float32", verifier="org/target")
    assert flat["target_layer_ids"] == [-1, 2, 5]
    assert nested["aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert config_from_folder(flat, []).target_layer_ids == config_from_folder(nested, []).target_layer_ids
    wrong = {**nested, "aux_hidden_state_layer_ids": flat["target_layer_ids"]}
    with pytest.raises(DataError, match="name layers"):
        config_from_folder(wrong, [])
    assert nested["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    bonus = folder_config(
        toy_config(first_supervised_slot=1), "speculators", dtype="float32", verifier="org/target"
    )
    assert bonus["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert bonus["sample_from_anchor"] is False


def test_warm_start_takes_what_fits(tmp_path: Path) -> None:
    source = toy_drafter(seed=7)
    folder = export_drafter(source, tmp_path / "dspark", dtype=None)
    drafter = toy_drafter(block_size=6)
    before = drafter.lm_head.weight.clone()
    report = warm_start(drafter, folder)
    assert report.kept == ()
    assert report.differences == ("block_size: 4 there, 6 here",)
    for name, value in drafter.named_parameters():
        same = torch.equal(value, dict(source.named_parameters())[name])
        assert same == (name not in ("embed_tokens.weight", "lm_head.weight")), name
    assert torch.equal(drafter.lm_head.weight, before)

    # A DFlash drafter has no heads; a reduced vocabulary takes its rows.
    plain = toy_drafter(seed=8, **DFLASH)
    report = warm_start(drafter, export_drafter(plain, tmp_path / "dflash", kind="dflash", dtype=None))
    assert set(report.kept) == {
        "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }  # fmt: skip
    assert report.differences == ("block_size: 4 there, 6 here", "first_supervised_slot: 1 there, 0 here")
    assert torch.equal(drafter.fc.weight, plain.fc.weight)
    reduced = toy_drafter(draft_vocab_size=20)
    warm_start(reduced, folder)
    assert reduced.markov_head is not None
    assert source.markov_head is not None
    assert isinstance(reduced.vocabulary, DraftVocabulary)
    rows = source.markov_head.markov_w2.weight[reduced.vocabulary.ids]
    assert torch.equal(reduced.markov_head.markov_w2.weight, rows)
    # Another drafter's reduced vocabulary is no use to a full one.
    report = warm_start(drafter, export_drafter(reduced, tmp_path / "reduced", dtype=None))
    assert report.kept == ("markov_head.markov_w2.weight",)

    with pytest.raises(DataError, match=r"target_layer_ids=\[-1, 2, 5\]"):
        warm_start(toy_drafter(target_layer_ids=(2, -1, 5)), folder)
    with pytest.raises(DataError, match="is \\["):
        warm_start(toy_drafter(markov_rank=6), folder)
    with pytest.raises(DataError, match="does not have"):
        warm_start(toy_drafter(num_layers=1), folder)


def test_a_drafter_of_a_tied_target_is_saved_whole(tmp_path: Path) -> None:
    target = tiny_target("llama", dtype=torch.float32)
    target.lm_head.weight = target.model.embed_tokens.weight
    config = DraftConfig.from_target(target, mask_token_id=39, markov_rank=4, num_layers=1)
    drafter = DraftModel(config)
    drafter.share_target(*target_weights(target))
    again = load_drafter(export_drafter(drafter, tmp_path / "out", dtype=None))
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)
    assert torch.equal(again.embed_tokens.weight, target.lm_head.weight)
    assert again.config.rms_norm_eps == config.rms_norm_eps
