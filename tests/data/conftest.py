"""Tiny tokenizers and the chat templates that real models use, built here: nothing is downloaded."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? Paris, the capital.",
    "system user assistant model tool\n\nHello there\n\nassistant\n answer: question\n You are a helpful AI",
    "def f(x):\n    return x + 1\n\nclass A:\n    pass\n\n",
] * 3

SPECIAL_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|end|>",
    "<|endoftext|>",
]

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    # The default system prompt and the new line after the end token are SmolLM2's.
    "chatml": CHATML,
    "chatml-without-generation-prompt": CHATML.partition("{% if add_generation_prompt")[0],
    "llama3": (
        "{{ '<|begin_of_text|>' }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
        "{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "gemma": (
        "{{ '<bos>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    # Two closing marks: the assistant's and the chat's.
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
    ),
    # No special token at all: the end of a turn is text.
    "plain-text": (
        "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n### end\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
    ),
    # A prompt that ends in a space, which the tokenizer merges with the answer's first word.
    "vicuna": (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% else %}{{ 'ASSISTANT: ' + m.content + '</s>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
    ),
    # Qwen 3: the reasoning of turns before the last question is dropped, an empty one put into the last turn.
    "drops-earlier-reasoning": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set parts = m.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
        "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
        "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
        "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ answer + '<|im_end|>\n' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # The generation prompt opens a thought, which the last turn closes and earlier ones do not have.
    "opens-thought": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
        "{% set parts = m.content.split('</think>') %}"
        "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '') }}"
        "{{ '\n</think>\n\n' + parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
    # The generation prompt opens a thought that past turns do not have.
    "thought-in-prompt": CHATML.replace(
        "{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}"
    ),
    "drops-system": "{% for m in messages if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "upper-case": CHATML.replace("m.content", "m.content | upper"),
    # Older Mistral templates put the system text into the last question.
    "moves-system": (
        "{% if messages[0].role == 'system' %}{% set text = messages[0].content + '\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set text = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}"
        "{{ '[INST]' + (text if loop.index0 >= rest | length - 2 else '') + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    ),
    "end-of-chat-only": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ '</s>' }}{% endif %}"
    ),
    "last-message-only": "{{ messages[-1].content }}",
    "generation-without-end": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "generation-with-new-line": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "generation-around-user": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'user' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


def _byte_level(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # Adds a BOS of its own, as Llama's does: a chat must not get a second one.
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=trim_offsets),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]),
        ]
    )
    return tokenizer


def _word_start() -> Tokenizer:
    """SentencePiece style: a mark in place of each space and one before the first word; bytes as a last resort."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


BACKENDS = {"byte-level": _byte_level(False), "trimmed-offsets": _byte_level(True), "word-start": _word_start()}


@pytest.fixture
def make_tokenizer():
    """Function (template name or None, kind of tokenizer) -> tokenizer."""

    def make(template: str | None = "chatml", kind: str = "byte-level") -> PreTrainedTokenizerFast:
        # Through a string: a tokenizer object would be shared between tests.
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(BACKENDS[kind].to_str()),
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<|endoftext|>",
            extra_special_tokens=SPECIAL_TOKENS[3:],
        )
        if template is not None:
            tokenizer.chat_template = TEMPLATES[template]
        return tokenizer

    return make
