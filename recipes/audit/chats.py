"""Chats of very uneven length, a tokenizer of a few words, and a tiny model: all built here, without a network."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokennorm.audit import Sample
from tokennorm.recipes.common.quiet import quiet_transformers

__all__ = [
    "CHATS",
    "LONG",
    "LONGEST",
    "MASK",
    "UNSUPERVISED",
    "answers",
    "build_folder",
    "build_tokenizer",
    "samples",
    "write_chats",
]

Chat = list[dict[str, str]]

_END, _START, MASK_WORD = "<|im_end|>", "<|im_start|>", "<|mask|>"
_SAID = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "theta", "kappa")
_WORDS = (_END, _START, "<unk>", "system", "user", "assistant", "say", "again", *_SAID, MASK_WORD)
MASK = len(_WORDS) - 1
"""A token that occurs in no chat."""
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_POSITIONS = 128
# Words of the answers of each chat; some chats have two turns. Short ones and long ones take turns.
_ANSWERS = ((1,), (9,), (2,), (5, 3), (1,), (14,), (3,), (1, 11), (2,), (7,), (4,), (18,))
LONGEST = 64
"""No chat has more tokens."""
LONG = len(_ANSWERS)
"""Number of a chat with an answer of 40 words."""
UNSUPERVISED = LONG + 1
"""Number of the sample that stands for a dummy micro-batch: nobody supervises it."""


def _chat(number: int, lengths: Sequence[int]) -> Chat:
    messages: Chat = []
    for turn, length in enumerate(lengths):
        said = [_SAID[(number + 3 * turn + i * (number % 3 + 1)) % len(_SAID)] for i in range(length)]
        question = ["say", *said[: 1 + number % 3], *["again"] * (number % 4)]
        messages.append({"role": "user", "content": " ".join(question)})
        messages.append({"role": "assistant", "content": " ".join(said)})
    return messages


CHATS = tuple(_chat(number, lengths) for number, lengths in enumerate((*_ANSWERS, (40,))))


def samples() -> list[Sample]:
    """The chats as tokens, by hand: what the assistant says is supervised, and the end of its turn.

    Written without the recipe's encoder, its template and its tokenizer. The last one has nothing to learn.
    """
    found = [_sample(chat) for chat in CHATS]
    unsupervised = found[0].input_ids
    return [*found, Sample(input_ids=unsupervised, labels=(-100,) * len(unsupervised))]


def _sample(chat: Chat) -> Sample:
    ids: list[int] = []
    labels: list[int] = []
    for message in chat:
        head = [_WORDS.index(word) for word in (_START, message["role"])]
        body = [_WORDS.index(word) for word in (*message["content"].split(), _END)]
        ids += head + body
        labels += [-100] * len(head) + (body if message["role"] == "assistant" else [-100] * len(body))
    return Sample(input_ids=tuple(ids), labels=tuple(labels))


def answers() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each chat as the tokens of a prompt (with the beginning of the assistant's turn) and of its last answer."""
    found = []
    for sample in samples()[:UNSUPERVISED]:
        start = max(place for place, label in enumerate(sample.labels) if label == -100) + 1
        found.append((sample.input_ids[:start], sample.input_ids[start:]))
    return found


def build_tokenizer() -> Any:
    """A Hugging Face tokenizer of whole words, with a chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=_END, pad_token=_END, additional_special_tokens=[_START]
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def build_folder(folder: Path, *, layers: int = 1) -> Path:
    """Write a tiny Llama and its tokenizer into ``folder/model``, as the hub would have it.

    Args:
        folder: exists.
        layers: of the model.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(_WORDS),
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=layers,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=_POSITIONS,
                # A model that is sure of something, so that samples differ in their gradients.
                initializer_range=0.3,
                eos_token_id=0,
                pad_token_id=0,
                bos_token_id=None,
            )
        )
    with quiet_transformers():
        tokenizer.save_pretrained(folder / "model")
        model.save_pretrained(folder / "model")
    return folder


def write_chats(path: Path, numbers: Sequence[int]) -> Path:
    """Write the chats with these numbers as the JSONL file that a recipe reads."""
    path.write_text("".join(json.dumps({"messages": CHATS[number]}) + "\n" for number in numbers))
    return path
