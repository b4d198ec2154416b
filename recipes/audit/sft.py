"""``tokennorm audit sft``: the fine-tuning recipe as it is, held against the definition of its objective.

What is audited is what ``tokennorm train sft`` runs: its encoder, loader, model patch, objective, kit and engine,
under DDP. What it is held against shares nothing with it but the chats' words: samples tokenised by hand, the
plain Hugging Face model, and the audit's own cross-entropy in float64.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tokennorm.audit import AuditReport, Sample
from tokennorm.data import ChatDataset, read_jsonl
from tokennorm.engine import OptimConfig, Runtime
from tokennorm.recipes.audit.chats import CHATS, LONGEST, build_folder, samples, write_chats
from tokennorm.recipes.audit.recipe import RecipeLoop, audit_recipe
from tokennorm.recipes.audit.splits import Split, default_splits
from tokennorm.recipes.common import load_tokenizer
from tokennorm.recipes.sft import SftConfig, prepare
from tokennorm.recipes.sft.config import DataConfig, ModelConfig, TrainConfig

__all__ = ["SftLoop", "audit_sft"]


@dataclass(kw_only=True)
class SftLoop(RecipeLoop):
    """The fine-tuning recipe."""

    def config(self, split: Split) -> SftConfig:
        """What a person would configure to get this split."""
        return SftConfig(
            model=ModelConfig(path=str(self.folder / "model")),
            data=DataConfig(
                path=str(self.folder / f"{split.file_name}.jsonl"),
                eval_fraction=0.0,
                max_length=split.pack_length,
                packing=split.packed,
                micro_batch_size=split.rows,
                micro_batches_per_window=split.per_window,
                shuffle=split.shuffled,
            ),
            optim=OptimConfig(lr=1e-2),
            train=TrainConfig(seed=split.seed),
        )

    def prepare(self, split: Split, runtime: Runtime) -> Any:
        """As ``tokennorm train sft`` does."""
        return prepare(self.config(split), runtime)

    def reference_model(self) -> nn.Module:
        """The Hugging Face model as the folder has it."""
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(self.folder / "model")
        return model

    def samples(self) -> list[Sample]:
        """Tokenised by hand."""
        return samples()

    def dataset(self) -> ChatDataset:
        """Encoded as the recipe does it; where that differs from the hand-made samples, the audit shows it."""
        chats = read_jsonl(write_chats(self.folder / "all.jsonl", range(len(CHATS))))
        return ChatDataset.encode(chats, load_tokenizer(self.folder / "model"), max_length=LONGEST)


def audit_sft(
    *,
    splits: Sequence[Split] | None = None,
    say: Callable[[str], None] | None = None,
    loop_type: type[SftLoop] = SftLoop,
    **options: Any,
) -> AuditReport:
    """Audit the fine-tuning recipe on a tiny model.

    Args:
        splits: default :func:`~tokennorm.recipes.audit.splits.default_splits`.
        say: is told what the audit is about to do.
        loop_type: with a change to the recipe, for tests.
        **options: of :func:`tokennorm.audit.audit_loop`.
    """
    chosen = default_splits() if splits is None else tuple(splits)
    if say is not None:
        say("making a tiny model and its chats")
    with tempfile.TemporaryDirectory(prefix="tokennorm-audit-sft-") as name:
        loop = loop_type(folder=build_folder(Path(name)))
        for split in chosen:
            write_chats(loop.folder / f"{split.file_name}.jsonl", split.chats)
        return audit_recipe(loop, chosen, say=say, **options)
