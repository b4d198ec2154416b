"""``tokennorm audit dspark``: the drafter's training as it is, held against the definition of its loss.

What is audited is what ``tokennorm train dspark`` runs: loader, blocks, the target's states (from the cache in
some splits, from the target in the others), fused objective, kit and engine, under DDP. Every position where a
block may start is an anchor, so the slots of a document are the same in every split; their number differs from
document to document, and a rank that has run out of documents has none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tokennorm.audit import AuditReport, Sample
from tokennorm.data import ChatDataset
from tokennorm.engine import OptimConfig, Runtime
from tokennorm.recipes.audit.chats import CHATS, LONGEST, MASK, answers, build_folder
from tokennorm.recipes.audit.dspark_reference import DSparkTokenLoss
from tokennorm.recipes.audit.recipe import RecipeLoop, audit_recipe
from tokennorm.recipes.audit.splits import Split, default_splits
from tokennorm.recipes.dspark import DSparkConfig, prepare
from tokennorm.recipes.dspark.answers import Answer
from tokennorm.recipes.dspark.build import build_drafter, load_answers, load_target
from tokennorm.recipes.dspark.config import (
    CacheConfig,
    DataConfig,
    DrafterConfig,
    RunConfig,
    TargetConfig,
    TrainConfig,
)

__all__ = ["DSparkLoop", "audit_dspark"]

_IGNORED = -100
_ALL = "all"


@dataclass(kw_only=True)
class DSparkLoop(RecipeLoop):
    """The drafter's recipe."""

    def config(self, split: Split) -> DSparkConfig:
        """What a person would configure to get this split."""
        return DSparkConfig(
            target=TargetConfig(path=str(self.folder / "model")),
            # Both ways to the target's states; in float32, so that only the order of additions differs.
            cache=CacheConfig(enabled=split.packed and not split.shuffled, dtype="float32"),
            draft=DrafterConfig(block_size=3, layers=1, target_layers=(0, 1), mask_token_id=MASK, markov_rank=4),
            data=DataConfig(
                max_length=split.pack_length,
                packing=split.packed,
                micro_batch_size=split.rows,
                micro_batches_per_window=split.per_window,
                # More than any row has.
                anchors=4 * LONGEST,
                shuffle=split.shuffled,
            ),
            optim=OptimConfig(lr=1e-2, weight_decay=0.0),
            train=TrainConfig(seed=split.seed),
            run=RunConfig(dir=str(self.folder / split.file_name)),
        )

    def prepare(self, split: Split, runtime: Runtime) -> Any:
        """As ``tokennorm train dspark`` does."""
        return prepare(self.config(split), runtime)

    def reference_model(self) -> nn.Module:
        """A drafter of the same shape, with the target's embedding and head."""
        config = self.config(next(iter(self.splits.values()))[0])
        target, tokenizer = load_target(config)
        return build_drafter(config, target, tokenizer, self.dataset())

    def token_loss(self) -> Callable[..., Any]:
        """The DSpark loss by its definition, with the recipe's weights."""
        loss = DSparkConfig().loss
        assert loss.gamma is not None
        return DSparkTokenLoss(
            target=self.folder / "model", gamma=loss.gamma, ce=loss.ce, l1=loss.l1, confidence=loss.confidence
        )

    def samples(self) -> list[Sample]:
        """Prompts with the last answer supervised; and a document without any."""
        found = [
            Sample(input_ids=prompt + answer, labels=(_IGNORED,) * len(prompt) + answer)
            for prompt, answer in answers()
        ]
        return [*found, Sample(input_ids=found[0].input_ids, labels=(_IGNORED,) * len(found[0].labels))]

    def dataset(self) -> ChatDataset:
        """As the recipe reads it from its folder."""
        return load_answers(self.folder / _ALL / "answers.jsonl", max_length=LONGEST)

    def write_answers(self, name: str, numbers: Sequence[int]) -> None:
        """Write what the recipe finds in its folder after ``tokennorm draft generate``."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        lines = []
        for number in numbers:
            prompt, answer = answers()[number]
            lines.append(
                Answer(
                    id=f"chat-{number}",
                    group="chats",
                    task="say",
                    held_out=False,
                    messages=tuple(CHATS[number]),
                    prompt_ids=prompt,
                    answer_ids=answer,
                    finish="stop",
                ).to_line()
            )
        (folder / "answers.jsonl").write_text("".join(lines))


def audit_dspark(
    *,
    splits: Sequence[Split] | None = None,
    say: Callable[[str], None] | None = None,
    loop_type: type[DSparkLoop] = DSparkLoop,
    **options: Any,
) -> AuditReport:
    """Audit the drafter's recipe on a tiny target.

    Args:
        splits: default :func:`~tokennorm.recipes.audit.splits.default_splits`.
        say: is told what the audit is about to do.
        loop_type: with a change to the recipe, for tests.
        **options: of :func:`tokennorm.audit.audit_loop`.
    """
    chosen = default_splits() if splits is None else tuple(splits)
    if say is not None:
        say("making a tiny target and its answers")
    with tempfile.TemporaryDirectory(prefix="tokennorm-audit-dspark-") as name:
        loop = loop_type(folder=build_folder(Path(name), layers=2))
        loop.write_answers(_ALL, range(len(CHATS)))
        for split in chosen:
            loop.write_answers(split.file_name, split.chats)
        return audit_recipe(loop, chosen, say=say, **options)
