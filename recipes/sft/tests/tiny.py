"""A tiny Llama with its own tokenizer, and chats of very uneven length; all built here in a second."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tokennorm.engine import LoopConfig, OptimConfig, Runtime
from tokennorm.recipes.sft import SftJob, prepare
from tokennorm.recipes.sft.config import DataConfig, ModelConfig, RunConfig, SftConfig, TrainConfig

EPOCHS = 4
WORDS = ["alpha", "beta", "gamma", "delta", "omega", "sigma", "theta", "kappa"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chats(count: int = 38, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return questions whose answer repeats a word, once or many times; a few have two turns."""
    generator = random.Random(seed)
    found = []
    for index in range(count):
        messages = []
        for _ in range(2 if index % 7 == 3 else 1):
            word, times = generator.choice(WORDS), generator.choice([1, 1, 2, 3, 20])
            messages += [
                {"role": "user", "content": f"say {word} {times} times"},
                {"role": "assistant", "content": " ".join([word] * times)},
            ]
        found.append(messages)
    return found


def build_folder(folder: Path, *, hidden_size: int = 32) -> Path:
    """Write ``model/`` and ``chats.jsonl`` into ``folder``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for messages in chats() for message in messages]
    tokenizer.train_from_iterator([*texts, "system user assistant\n"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=fast.eos_token_id,
            pad_token_id=fast.pad_token_id,
            bos_token_id=None,
        )
    )
    fast.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    with (folder / "chats.jsonl").open("w") as file:
        for messages in chats():
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


def tiny_config(folder: Path, name: str, /, **changes: object) -> SftConfig:
    """Return a run of a dozen steps; ``changes`` replace whole groups."""
    values: dict[str, object] = {
        "model": ModelConfig(path=str(folder / "model"), dtype="float64"),
        "data": DataConfig(
            path=str(folder / "chats.jsonl"),
            eval_fraction=0.2,
            max_length=128,
            packing=True,
            micro_batches_per_window=3,
        ),
        "optim": OptimConfig(lr=0.01, warmup=1),
        "train": TrainConfig(epochs=EPOCHS),
        "loop": LoopConfig(save_every=2, eval_every=5),
        "run": RunConfig(dir=str(folder / name)),
    }
    return SftConfig(**{**values, **changes})  # type: ignore[arg-type]


def job_of(folder: Path, **changes: Any) -> SftJob:
    """Prepare a run on one rank, with some parts of its configuration changed."""
    return prepare(tiny_config(folder, "unused", **changes), Runtime())
