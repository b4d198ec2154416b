from __future__ import annotations

import shutil

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from tokennorm.data import documents_are_isolated
from tokennorm.errors import ConfigError
from tokennorm.recipes.common import load_causal_lm, load_tokenizer


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )


def tiny_tokenizer() -> FastTokenizer:
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(31)} | {"<unk>": 31}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return FastTokenizer(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>", eos_token="<unk>")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(complete, tmp_path):
    return shutil.copytree(complete, tmp_path / "tiny")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", torch.float32), (torch.bfloat16, torch.bfloat16), ("float64", torch.float64)],
)
def test_loads_a_folder_ready_for_packing(folder, capfd, dtype, expected):
    model, tokenizer = load_causal_lm(folder, dtype)
    assert model.dtype == expected
    assert tokenizer.chat_template
    assert model.config.use_cache is False
    assert documents_are_isolated(model)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=expected)
    capfd.readouterr()
    ids = torch.arange(5)[None]
    assert torch.equal(model(ids).logits, reference(ids).logits)
    assert load_tokenizer(str(folder)).get_vocab() == tokenizer.get_vocab()
    assert capfd.readouterr().err == ""


def test_a_missing_folder(tmp_path):
    for path in (tmp_path / "nothing", "./nothing", "~/nothing/there", "a/b/c"):
        with pytest.raises(ConfigError, match="the folder is not there"):
            load_causal_lm(path)
    file = tmp_path / "model.bin"
    file.write_text("x")
    with pytest.raises(ConfigError, match="the folder is a file"):
        load_causal_lm(file)


def test_a_folder_without_its_parts(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="can't load the tokenizer from the folder"):
        load_causal_lm(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_causal_lm(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_causal_lm(folder)


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="can't load the model from the folder"):
        load_causal_lm(folder)


@pytest.mark.filterwarnings("ignore")
def test_weights_that_would_be_random_are_refused(folder):
    LlamaModel(tiny_config()).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"lacks 1 weights of the model, lm_head\.weight"):
        load_causal_lm(folder)


def test_a_tokenizer_without_a_chat_template(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        load_causal_lm(folder)
    _, tokenizer = load_causal_lm(folder, require_chat_template=False)
    assert tokenizer.chat_template is None


def test_an_unreachable_hub(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nand more lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ConfigError) as error:
        load_causal_lm("someone/some-model")
    text = str(error.value)
    assert "of someone/some-model from the Hugging Face hub: OSError: We couldn't connect" in text
    assert "smollm2-135m" in text
    assert "more lines" not in text


def test_an_unknown_dtype(folder):
    with pytest.raises(ConfigError, match="unknown dtype 'half'"):
        load_causal_lm(folder, "half")
