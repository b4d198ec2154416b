"""One batch of prompts through the target: nothing but the temperature shapes what it answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tokennorm.errors import ConfigError
from tokennorm.recipes.common.quiet import quiet_transformers
from tokennorm.recipes.dspark.answers import Answer
from tokennorm.recipes.dspark.prompt import Prompt

__all__ = ["Answerer", "Work", "stop_token_ids"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A prompt as tokens."""

    prompt: Prompt
    ids: tuple[int, ...]


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return what ends an answer: generation_config's end tokens, the tokenizer's, and the chat template's.

    The template's is the first special token that it puts behind an assistant's message.
    """
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found: set[Any] = set(configured if isinstance(configured, (list, tuple)) else [configured])
    found |= {tokenizer.eos_token_id}
    question, content = {"role": "user", "content": "a"}, "b"
    before = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    chat = [question, {"role": "assistant", "content": content}]
    after = tokenizer.apply_chat_template(chat, tokenize=False)
    if after.startswith(before + content):
        tail = tokenizer(after[len(before) + len(content) :], add_special_tokens=False)["input_ids"]
        # Not all_special_ids: it holds the tokens with a role (eos, pad) only.
        special = {token for token, content in tokenizer.added_tokens_decoder.items() if content.special}
        found |= set([token for token in tail if token in special][:1])
    found.discard(None)
    if not found:
        raise ConfigError(
            "neither the model nor its tokenizer nor its chat template names an end token",
            why="answers would always run to max_new_tokens",
            fix="set model.generation_config.eos_token_id",
        )
    return tuple(sorted(found))


class Answerer:
    """Runs transformers' ``generate`` on one batch at a time.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: of the model.
        stops: tokens that end an answer.
        max_new_tokens: of an answer, its end token included.
        temperature: 0 for greedy decoding.
        top_p: sample from the smallest set of tokens with this probability.
        seed: of the sampling.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        stops: tuple[int, ...],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
    ) -> None:
        from transformers import GenerationConfig

        self.model, self.tokenizer, self.stops, self.seed = model, tokenizer, stops, seed
        self.limit = max_new_tokens
        pad = tokenizer.pad_token_id
        self.pad = stops[0] if pad is None else pad
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=list(stops),
            pad_token_id=self.pad,
            use_cache=True,
            **(sampling if temperature > 0 else {"do_sample": False}),
        )

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Switch to evaluation, and to our generation settings: generate() fills gaps from the model's own."""
        own, training = self.model.generation_config, self.model.training
        self.model.eval()
        self.model.generation_config = self.config
        try:
            with quiet_transformers(errors_only=True):
                yield
        finally:
            self.model.generation_config = own
            self.model.train(training)

    def answer(self, batch: Sequence[Work]) -> list[Answer]:
        """Answer the prompts of one batch, padded on the left."""
        width = max(len(work.ids) for work in batch)
        device = self.model.device
        ids = torch.full((len(batch), width), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, work in enumerate(batch):
            ids[row, width - len(work.ids) :] = torch.tensor(work.ids)
            mask[row, width - len(work.ids) :] = 1
        # The batch's own seed, whatever was generated before it in this process.
        text = json.dumps([self.seed, *(work.prompt.id for work in batch)])
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                torch.manual_seed(number)
                output = self.model.generate(input_ids=ids.to(device), attention_mask=mask.to(device))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"{len(batch)} prompts of {width} tokens and {self.limit} new ones each don't fit into memory",
                fix="halve batch_size, and begin a new file: the batch size decides which prompts go together",
            ) from error
        return [self._finish(work, row) for work, row in zip(batch, output[:, width:].tolist(), strict=True)]

    def _finish(self, work: Work, tokens: list[int]) -> Answer:
        end = next((index for index, token in enumerate(tokens) if token in self.stops), None)
        answer = tokens[: self.limit] if end is None else tokens[: end + 1]
        text = self.tokenizer.decode(answer if end is None else answer[:-1], skip_special_tokens=True)
        prompt = work.prompt
        return Answer(
            id=prompt.id,
            group=prompt.group,
            task=prompt.task,
            held_out=prompt.held_out,
            messages=(*prompt.messages, {"role": "assistant", "content": text}),
            prompt_ids=work.ids,
            answer_ids=tuple(answer),
            finish="length" if end is None else "stop",
        )
