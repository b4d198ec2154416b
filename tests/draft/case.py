"""A micro-batch for the drafter's loss, seen both ways: as hidden states and as full logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.draft.reference import ALPHAS, Reference, naive_dspark
from tokennorm.draft import (
    DraftVocabulary,
    DSparkForwardOutput,
    DSparkSums,
    SlotPlan,
    dspark_objective,
    plan_slots,
    reduce_output,
    teacher_positions,
)

GAMMA = 4.0
LOSS_OPTIONS = {
    "loss_decay_gamma": GAMMA,
    "ce_loss_alpha": ALPHAS["ce"],
    "l1_loss_alpha": ALPHAS["l1"],
    "confidence_head_alpha": ALPHAS["confidence"],
}
LEAVES = ("hidden", "head", "latents", "markov", "confidence")


@dataclass
class Case:
    """Random tensors; ``supervised`` is what should count, in the drafter's vocabulary when that is reduced."""

    first: int
    hidden: Tensor
    head: Tensor
    latents: Tensor
    markov: Tensor
    confidence: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor | None
    positions: Tensor
    labels: Tensor
    eval_mask: Tensor
    keep: Tensor
    vocabulary: int | DraftVocabulary

    def leaves(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).detach().clone().requires_grad_() for name in LEAVES}

    def plan(self) -> SlotPlan:
        return plan_slots(
            target_ids=self.labels,
            eval_mask=self.eval_mask,
            teacher_positions=self.positions,
            sequence_length=self.teacher_hidden.shape[1],
            vocabulary=self.vocabulary,
            block_keep_mask=self.keep,
            first_supervised_slot=self.first,
        )

    def fused(self, leaves: dict[str, Tensor], **options: Any) -> DSparkSums:
        plan = options.pop("plan", None) or self.plan()
        arguments: dict[str, Any] = {
            "hidden": leaves["hidden"],
            "head": leaves["head"],
            "latents": leaves["latents"],
            "markov_weight": leaves["markov"],
            "confidence": leaves["confidence"],
            "teacher_hidden": self.teacher_hidden,
            "teacher_head": self.teacher_head,
            **LOSS_OPTIONS,
            **options,
        }
        return dspark_objective(plan=plan, **arguments)

    def output(self, leaves: dict[str, Tensor]) -> DSparkForwardOutput:
        """The same micro-batch with all logits, in the drafter's vocabulary plus "the rest" when it is reduced."""
        draft = leaves["hidden"] @ leaves["head"].t() + leaves["latents"] @ leaves["markov"].t()
        output = DSparkForwardOutput(
            draft_logits=draft,
            target_ids=self.labels,
            eval_mask=self.eval_mask,
            block_keep_mask=self.keep,
            confidence_pred=leaves["confidence"],
            aligned_target_logits=self.teacher_logits(leaves),
            first_supervised_slot=self.first,
        )
        return output if isinstance(self.vocabulary, int) else reduce_output(output, self.vocabulary)

    def teacher_logits(self, leaves: dict[str, Tensor]) -> Tensor:
        weight = leaves["head"] if self.teacher_head is None else self.teacher_head
        row = self.positions.clamp(0, self.teacher_hidden.shape[1] - 1)
        batch = torch.arange(row.shape[0]).view(-1, 1, 1)
        return (self.teacher_hidden[batch, row] @ weight.t()).detach()

    def reference(self, leaves: dict[str, Tensor]) -> Reference:
        """By definition, from two distributions over the target's vocabulary."""
        draft = leaves["hidden"] @ leaves["head"].t() + leaves["latents"] @ leaves["markov"].t()
        eval_mask = self.eval_mask
        if not isinstance(self.vocabulary, int):
            full = draft.new_full((*draft.shape[:3], self.vocabulary.target_size), -torch.inf)
            draft = full.index_copy(3, self.vocabulary.ids, draft)
            known = torch.isin(self.labels, self.vocabulary.ids)
            known[..., : self.first] = True
            eval_mask = eval_mask & known.long().cumprod(-1).bool()
        return naive_dspark(
            draft,
            self.teacher_logits(leaves),
            self.labels,
            eval_mask,
            self.keep,
            leaves["confidence"],
            gamma=GAMMA,
            first=self.first,
        )


def make_case(
    *,
    first: int = 0,
    reduced: bool = False,
    dtype: torch.dtype = torch.float64,
    sizes: tuple[int, int, int, int] = (2, 5, 4, 9),
    seed: int = 0,
    empty: bool = False,
) -> Case:
    """``sizes`` is (B, A, K, S). Anchors are closer together than a block, so teacher rows are shared."""
    generator = torch.Generator().manual_seed(seed)
    batch, anchors_per, slots, length = sizes
    width, rank, target_size = 6, 3, 23

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    anchors = torch.stack([torch.randperm(length - 1, generator=generator)[:anchors_per] for _ in range(batch)])
    anchors = anchors.sort(dim=1).values + first
    positions = teacher_positions(anchors, slots, first)
    keep = torch.rand(batch, anchors_per, generator=generator) < 0.8
    keep[:1, :1] = True
    eval_mask = (positions >= 0) & (positions < length) & (torch.rand(positions.shape, generator=generator) < 0.85)
    eval_mask[..., :first] = False
    proposals = eval_mask[..., first:]
    eval_mask[..., first:] = proposals.long().cumprod(-1).bool()
    eval_mask[:1, :1] = torch.arange(slots) >= first
    if empty:
        eval_mask = torch.zeros_like(eval_mask)
    vocabulary: int | DraftVocabulary = target_size
    if reduced:
        ids = torch.randperm(target_size, generator=generator)[:15]
        vocabulary = DraftVocabulary(ids, target_size)
    labels = torch.randint(target_size, positions.shape, generator=generator)
    draft_size = vocabulary.size if isinstance(vocabulary, DraftVocabulary) else target_size
    return Case(
        first=first,
        hidden=normal(batch, anchors_per, slots, width),
        head=normal(draft_size, width),
        latents=normal(batch, anchors_per, slots, rank),
        markov=normal(draft_size, rank),
        confidence=normal(batch, anchors_per, slots),
        teacher_hidden=normal(batch, length, width),
        teacher_head=normal(target_size, width) if reduced else None,
        positions=positions,
        labels=labels,
        eval_mask=eval_mask,
        keep=keep,
        vocabulary=vocabulary,
    )
