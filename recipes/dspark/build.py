"""The target, the documents and a new drafter, from the configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tokennorm.data import ChatDataset, Sample
from tokennorm.draft import (
    DraftConfig,
    DraftModel,
    DraftVocabulary,
    frequent_tokens,
    init_from_target,
    target_weights,
    warm_start,
)
from tokennorm.errors import ConfigError, DataError
from tokennorm.recipes.common import load_causal_lm
from tokennorm.recipes.dspark.config import DrafterConfig, DSparkConfig
from tokennorm.recipes.dspark.generate import Answer, read_answers

__all__ = ["build_drafter", "draft_config", "fingerprint", "load_answers", "load_target"]

_CANDIDATES_SHOWN = 4


def load_target(config: DSparkConfig, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """Load the target, frozen and in eval mode, and its tokenizer."""
    target, tokenizer = load_causal_lm(config.target.path, config.target.dtype)
    target.requires_grad_(False)
    torch.nn.Module.to(target, device)
    return target.eval(), tokenizer


def load_answers(path: Path, *, max_length: int) -> ChatDataset:
    """Read answers as documents whose answers are supervised, cut at ``max_length`` tokens.

    Raises:
        DataError: nothing readable, or no answer that keeps a token.
    """
    answers = read_answers(path)
    samples = [_sample(answer, max_length) for answer in answers]
    kept = [sample for sample in samples if sample.num_supervised]
    if not kept:
        raise DataError(
            f"{path} has no answer with a token within {max_length} tokens",
            fix="raise data.max_length, or let the target answer again",
        )
    return ChatDataset(kept)


def _sample(answer: Answer, max_length: int) -> Sample:
    ids = torch.tensor([*answer.prompt_ids, *answer.answer_ids], dtype=torch.int64)
    supervised = torch.arange(ids.shape[0]) >= len(answer.prompt_ids)
    return Sample(input_ids=ids[:max_length], supervised=supervised[:max_length], source=answer.id)


def fingerprint(samples: Sequence[Sample]) -> str:
    """A hash of every token and mask that is trained on."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.input_ids.numpy().tobytes() + sample.supervised.numpy().tobytes() + b"|")
    return digest.hexdigest()[:16]


def draft_config(config: DrafterConfig, target: Any, tokenizer: Any) -> DraftConfig:
    """The drafter's shape.

    Raises:
        ConfigError: no mask token was chosen, or one that does not fit.
    """
    if config.mask_token_id is None:
        raise ConfigError(
            "draft.mask_token_id is not set",
            why="it stands in the slots to fill, so it must be a token that never occurs in text; "
            "which one that is can't be guessed",
            fix=f"choose one, for example: {_unused_tokens(tokenizer)}",
        )
    if config.mask_token_id in _special_ids(tokenizer):
        raise ConfigError(
            f"draft.mask_token_id {config.mask_token_id} is "
            f"{tokenizer.convert_ids_to_tokens(config.mask_token_id)}, which stands in every chat",
            fix=f"choose a token that does not, for example: {_unused_tokens(tokenizer)}",
        )
    return DraftConfig.from_target(
        target,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layers,
        num_layers=config.layers,
        block_size=config.block_size,
        first_supervised_slot=1 if config.layout == "bonus_anchor" else 0,
        markov_rank=config.markov_rank,
        markov_head_type=config.markov_head,
        enable_confidence_head=config.confidence,
        confidence_head_with_markov=config.markov_rank > 0,
        detach_confidence_inputs=config.detach_confidence,
        draft_vocab_size=config.vocabulary,
        qk_norm=config.qk_norm,
    )


def build_drafter(config: DSparkConfig, target: Any, tokenizer: Any, documents: ChatDataset) -> DraftModel:
    """A new drafter on the target's device: the same for the same seed, documents and configuration."""
    shape = draft_config(config.draft, target, tokenizer)
    vocabulary: DraftVocabulary | None = None
    if shape.draft_vocab_size is not None:
        answers = (sample.input_ids[sample.supervised] for sample in documents)
        vocabulary = frequent_tokens(answers, size=shape.draft_vocab_size, target_size=shape.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        drafter = DraftModel(
            shape, vocabulary=vocabulary, gradient_checkpointing=config.draft.gradient_checkpointing
        )
    drafter = drafter.to(getattr(torch, config.draft.dtype))
    if config.draft.init_from_target:
        init_from_target(drafter, target)
    if config.draft.warm_start is not None:
        warm_start(drafter, config.draft.warm_start)
    embedding, head = target_weights(target)
    drafter = drafter.to(embedding.device)
    drafter.share_target(embedding, head)
    return drafter


def _special_ids(tokenizer: Any) -> set[int]:
    return {int(i) for i in tokenizer.all_special_ids}


def _unused_tokens(tokenizer: Any) -> str:
    known = {**tokenizer.get_added_vocab()}
    special, template = _special_ids(tokenizer), tokenizer.chat_template or ""
    free = [(i, token) for token, i in known.items() if i not in special and token not in template]
    if not free:
        return "none is unused here; add one to the tokenizer, or take a rare token"
    return ", ".join(f"{i} ({token})" for i, token in sorted(free, reverse=True)[:_CANDIDATES_SHOWN])
