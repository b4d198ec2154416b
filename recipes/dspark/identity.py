"""What a training is: in words for the terminal, and as entries that a checkpoint must have in common with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokennorm.data import ChatDataset
from tokennorm.draft import DraftModel
from tokennorm.draft.states.spec import fingerprint_target
from tokennorm.engine import config_to_dict
from tokennorm.recipes.common.guard import guard_identity
from tokennorm.recipes.dspark.build import fingerprint
from tokennorm.recipes.dspark.config import DSparkConfig, TrainConfig

__all__ = ["describe_drafter", "run_identity"]


def describe_drafter(drafter: DraftModel, documents: ChatDataset, say: Callable[[str], None]) -> None:
    """Say its size, and what of the answers it can propose."""
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    config = drafter.config
    say(
        f"drafter: {config.num_layers} layers, blocks of {config.block_size}, {config.num_draft_tokens:,} of "
        f"{config.vocab_size:,} tokens, {trained:,} parameters to train; it reads layers "
        f"{list(config.target_layer_ids)} of {config.num_target_layers}"
    )
    vocabulary = drafter.vocabulary
    if isinstance(vocabulary, int):
        return
    answered = torch.cat([sample.input_ids[sample.supervised] for sample in documents])
    known = (vocabulary.draft_of[answered] >= 0).double().mean().item()
    say(f"its vocabulary covers {100 * known:.2f} % of the answers' tokens")


def run_identity(config: DSparkConfig, documents: ChatDataset, total_steps: int, target: Any) -> dict[str, Any]:
    """Everything that decides the weights; where a run is saved or how often it reports is left out."""
    resolved = config_to_dict(config)
    data, train = resolved["data"], resolved["train"]
    layout = {name: data[name] for name in ("micro_batch_size", "micro_batches_per_window")}
    # What decides is which rows a window has. They get their anchors one by one, so the cut into micro-batches
    # changes none: it is as if each row were a micro-batch, and that is how a checkpoint has it.
    rows = {"micro_batch_size": 1, "micro_batches_per_window": config.data.rows_per_window}
    if config.train.empty_window == TrainConfig.empty_window:
        # A checkpoint from before there was the option still fits.
        del train["empty_window"]
    return {
        **guard_identity(config.guard, layout),
        "data": {**data, **rows, "tokens": fingerprint(list(documents))},
        "target": {"weights": fingerprint_target(target), "dtype": config.target.dtype},
        "states": {"cached": config.cache.enabled, "dtype": config.cache.dtype if config.cache.enabled else None},
        "draft": resolved["draft"],
        "loss": resolved["loss"],
        "optim": resolved["optim"],
        "train": {**train, "max_steps": total_steps},
    }
