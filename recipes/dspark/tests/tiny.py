"""A tiny target that has learnt to answer, and answers to learn from."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.sft.tests.tiny import build_folder, chats
from tokennorm.engine import LoopConfig, OptimConfig
from tokennorm.recipes.dspark.config import (
    AnswersConfig,
    CacheConfig,
    DataConfig,
    DrafterConfig,
    DSparkConfig,
    EvaluateConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)
from tokennorm.recipes.dspark.generate import Answer

EPOCHS = 4
MASK = 300
"""A token of the tiny tokenizer that no text of the tests contains."""


def build_target(folder: Path) -> Path:
    """Write ``model/`` into ``folder``: a random model would be undecided everywhere, and nothing to imitate."""
    build_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [tokenizer.apply_chat_template(messages[:2], tokenize=False) for messages in chats(30)]
    batch = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    return folder


def write_answers(folder: Path, run: Path) -> None:
    """Write ``answers.jsonl`` and ``held_out.jsonl`` of a run: the chats of the tests, as if spoken."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    run.mkdir(parents=True, exist_ok=True)
    answers = []
    for number, messages in enumerate(chats(30)):
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)
        text = messages[1]["content"] + "<|im_end|>"
        answers.append(
            Answer(
                id=f"chat-{number}",
                group="words" if number % 2 else "more words",
                task="say",
                held_out=number >= 26,
                messages=tuple(messages[:2]),
                prompt_ids=tuple(prompt["input_ids"]),
                answer_ids=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
                finish="stop",
            )
        )
    for name, held_out in (("answers.jsonl", False), ("held_out.jsonl", True)):
        (run / name).write_text("".join(a.to_line() for a in answers if a.held_out is held_out))


def tiny_config(folder: Path, name: str, /, **changes: object) -> DSparkConfig:
    """Return a run of a few dozen steps; ``changes`` replace whole groups."""
    values: dict[str, object] = {
        "target": TargetConfig(path=str(folder / "model"), dtype="float64"),
        "answers": AnswersConfig(per_group=3, held_out_per_group=2, max_new_tokens=12, batch_size=4),
        "cache": CacheConfig(dtype="float32", batch_tokens=256, shard_tokens=256),
        "draft": DrafterConfig(
            block_size=3, layers=1, target_layers=(0, 1), mask_token_id=MASK, markov_rank=8, dtype="float64"
        ),
        "data": DataConfig(max_length=128, micro_batches_per_window=3, anchors=6),
        "optim": OptimConfig(lr=0.01, warmup=1, weight_decay=0.0),
        "train": TrainConfig(epochs=EPOCHS),
        "loop": LoopConfig(save_every=4, eval_every=20),
        "run": RunConfig(dir=str(folder / name)),
        "evaluate": EvaluateConfig(
            prompts_per_group=2, untrained_prompts_per_group=1, max_new_tokens=12, calibrate=False
        ),
    }
    return DSparkConfig(**{**values, **changes})  # type: ignore[arg-type]
