"""A toy drafter, windows of very uneven micro-batches for it, and the float64 gradient of a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.draft.case import Case, make_case
from tokennorm.draft import DSparkForwardOutput, DSparkSums
from tokennorm.kit import TokenNormedLossKit


def micro(anchors: int, seed: int, *, first: int, empty: bool = False) -> Case:
    return make_case(first=first, sizes=(1, anchors, 4, max(9, anchors + 3)), seed=seed, empty=empty)


def window(first: int) -> list[Case]:
    """From one anchor to forty; the fourth supervises nothing, so of four ranks one has nothing at all."""
    return [
        micro(40, 1, first=first),
        micro(1, 2, first=first),
        micro(13, 3, first=first),
        micro(3, 4, first=first, empty=True),
        micro(6, 5, first=first),
    ]


class ToyDrafter(nn.Module):
    """Trainable maps in front of the objective's inputs; the head is frozen and shared with the teacher."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        base = make_case(seed=99)
        self.backbone = nn.Parameter(base.hidden[0, 0].T @ base.hidden[0, 1] / 2)
        self.gate = nn.Parameter(torch.eye(3) + 0.1)
        self.markov = nn.Parameter(base.markov)
        self.confidence = nn.Parameter(base.hidden[1, 0, 0])
        self.head = nn.Parameter(base.head, requires_grad=False)
        self.to(dtype)

    def leaves(self, case: Case) -> dict[str, Tensor]:
        dtype = self.head.dtype
        hidden = torch.tanh(case.hidden.to(dtype) @ self.backbone)
        return {
            "hidden": hidden,
            "head": self.head,
            "latents": case.latents.to(dtype) @ self.gate,
            "markov": self.markov,
            "confidence": hidden @ self.confidence,
        }

    def sums(self, case: Case) -> DSparkSums:
        return case.fused(self.leaves(case), teacher_hidden=case.teacher_hidden.to(self.head.dtype), chunk_size=7)

    def output(self, case: Case) -> DSparkForwardOutput:
        return case.output(self.leaves(case))

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


def reference(cases: Sequence[Case]) -> tuple[float, list[Tensor]]:
    """Loss and gradients of the window in one process: sums by definition, one division."""
    model = ToyDrafter()
    parts = [case.reference(model.leaves(case)) for case in cases]
    loss = torch.stack([part.loss_sum() for part in parts]).sum() / sum(part.den for part in parts)
    return float(loss.detach()), list(torch.autograd.grad(loss, model.trainable()))


def run_window(
    kit: TokenNormedLossKit,
    model: ToyDrafter,
    cases: Sequence[Case],
    *,
    counted: bool = False,
    separate: bool = False,
) -> None:
    """``separate``: the three terms by themselves, with their own weights, instead of their sum."""
    if counted:
        with torch.no_grad():
            den = torch.stack([torch.as_tensor(model.sums(case).denominator) for case in cases]).sum()
        kit.begin_window(dict.fromkeys(("loss", "ce", "l1", "confidence"), den))
    for case in cases:
        sums = model.sums(case)
        arguments = sums.kit_arguments()
        if separate:
            # The kit's own loss has weight 1 and no graph to add here: all of it is in the terms.
            arguments |= {"loss_sum": sums.loss_sum * 0, "extra_terms": sums.terms}
        kit.accumulate_microbatch(**arguments, total_tokens=case.eval_mask.numel()).backward()


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Global relative L2 error over all gradients."""
    difference = sum(float((a.double() - b).pow(2).sum()) for a, b in zip(found, expected, strict=True))
    return (difference / sum(float(b.pow(2).sum()) for b in expected)) ** 0.5


def gradients(model: ToyDrafter) -> list[Tensor]:
    found = [parameter.grad for parameter in model.trainable()]
    return [gradient for gradient in found if gradient is not None]
