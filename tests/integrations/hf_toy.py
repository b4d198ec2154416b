"""Tiny Hugging Face models, uneven data, and the objective of a window by its definition."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from tokennorm.audit import Sample, collate, make_samples

VOCABULARY = 29
POOL = make_samples(VOCABULARY)
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    # As the Trainer sets it. With a cache transformers does not keep the documents of a flattened row apart.
    "use_cache": False,
}


def dense(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_SIZES)).to(dtype)


def mixture(dtype: torch.dtype = torch.float64) -> MixtralForCausalLM:
    """With a router loss that is as big as the cross-entropy."""
    torch.manual_seed(0)
    config = MixtralConfig(
        **_SIZES,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config).to(dtype)


def rows(numbers: Sequence[int]) -> list[dict[str, list[int]]]:
    """Samples of the pool as a dataset; 11 and 12 have no supervised token, 10 is very long."""
    return [{"input_ids": list(POOL[n].input_ids), "labels": list(POOL[n].labels)} for n in numbers]


def pad(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A data collator: padded rows, an attention mask, labels that are not shifted."""
    return collate([Sample(input_ids=tuple(s["input_ids"]), labels=tuple(s["labels"])) for s in samples], False)


def pad_to_64(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A data collator: rows of one length, as a loader that concatenates batches needs them."""
    batch = pad(samples)
    missing = 64 - batch["labels"].shape[1]
    return {key: F.pad(value, (0, missing), value=-100 if key == "labels" else 0) for key, value in batch.items()}


def flatten(samples: Sequence[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A data collator: all samples of a micro-batch in one row."""
    return collate([Sample(input_ids=tuple(s["input_ids"]), labels=tuple(s["labels"])) for s in samples], True)


def arguments(cls: type = TrainingArguments, **options: Any) -> Any:
    defaults = {
        "output_dir": tempfile.gettempdir() + "/tokennorm-hf-tests",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 3,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "max_grad_norm": 0.0,
        "dataloader_pin_memory": False,
        "ddp_find_unused_parameters": False,
    }
    return cls(**{**defaults, **options})


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2", unk_token="t1")


def sft_arguments(**options: Any) -> Any:
    from trl import SFTConfig

    defaults = {
        "bf16": False,
        "activation_checkpointing": False,
        # The rows are tokens and labels already; TRL would drop those without a supervised token.
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }
    return arguments(SFTConfig, **{**defaults, **options})


class Recording(torch.optim.SGD):
    """Keeps what it reads at each step."""

    def __init__(self, model: nn.Module, lr: float = 0.0) -> None:
        super().__init__(model.parameters(), lr=lr)
        self.seen: list[Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append(flat(p.grad for group in self.param_groups for p in group["params"]))
        super().step(closure)


def flat(gradients: Any) -> Tensor:
    return torch.cat([gradient.detach().double().flatten() for gradient in gradients])


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The objective of one window, by its definition."""

    gradient: Tensor
    loss: float
    router: float
    tokens: int


def truth(model: nn.Module, micro_batches: Sequence[dict[str, Tensor]], *, smoothing: float = 0.0) -> Truth:
    """In one process and in float64: sums of token losses over their number, no window of the library's own.

    A router loss is that of each micro-batch, weighted by its tokens.
    """
    model = copy.deepcopy(model).double().train()
    total, router, tokens = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for batch in micro_batches:
        outputs = model(**{key: value for key, value in batch.items() if key != "labels"})
        targets = batch["labels"][:, 1:].flatten()
        logits = outputs.logits[:, :-1].flatten(0, 1)
        losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
        count = int((targets != -100).sum())
        total = total + losses[targets != -100].sum()
        if "aux_loss" in outputs and count:
            router = router + model.config.router_aux_loss_coef * outputs.aux_loss.double() * count
        tokens += count
    ((total + router) / tokens).backward()
    gradient = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    return Truth(gradient=gradient, loss=total.item() / tokens, router=router.item() / tokens, tokens=tokens)


def windows(numbers: Sequence[int], per_window: int) -> Iterator[list[dict[str, Tensor]]]:
    """The micro-batches (one sample each) of every window, however they are dealt out to ranks."""
    for start in range(0, len(numbers), per_window):
        yield [pad(rows([number])) for number in numbers[start : start + per_window]]


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2."""
    return float((got - want).norm() / want.norm())
