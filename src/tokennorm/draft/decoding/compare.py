"""Whether two outputs of one prompt are the same, and if not, whether rounding explains it.

Verifying several tokens at once multiplies other matrix shapes than decoding one by one, so logits differ in the
last digits. Where the target's two best tokens are as close as that, either is its greedy output: such a
difference is a tie. Any other one is an error of the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.decoding.rounds import Decoded
from tokennorm.draft.target import decoder_of
from tokennorm.errors import DataError

__all__ = ["TIE_TOLERANCE", "Difference", "OutputComparison", "compare_outputs", "explain_difference"]

TIE_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two greedy outputs part.

    Attributes:
        position: of the first token that differs, from the first new one (0).
        margin: how far below the target's largest logit there the worse of the two tokens is; infinite where one
            output is the beginning of the other, which no rounding explains.
        is_tie: the margin is within the tolerance.
    """

    position: int
    margin: float
    is_tie: bool


@torch.inference_mode()
def explain_difference(
    target: Any,
    prompt_ids: Tensor | Sequence[int],
    a: Sequence[int],
    b: Sequence[int],
    *,
    tolerance: float = TIE_TOLERANCE,
) -> Difference | None:
    """Compare two outputs token for token; None where they are the same.

    The logits at the first difference are computed anew, from prompt and common beginning in one forward pass
    without a cache.

    Args:
        target: a Hugging Face causal LM.
        prompt_ids: ``[1, S]`` or ``[S]``.
        a: new tokens.
        b: new tokens of another decoder.
        tolerance: largest margin of a tie, in logits.
    """
    if list(a) == list(b):
        return None
    common = min(len(a), len(b))
    position = next((i for i in range(common) if a[i] != b[i]), common)
    if position == common:
        return Difference(position=position, margin=math.inf, is_tie=False)
    prompt = torch.as_tensor(prompt_ids).flatten().tolist()
    device = target.get_input_embeddings().weight.device
    ids = torch.tensor([[*prompt, *a[:position]]], device=device)
    hidden = decoder_of(target)(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
    logits = target.get_output_embeddings()(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    margin = float(logits.max() - torch.minimum(logits[a[position]], logits[b[position]]))
    return Difference(position=position, margin=margin, is_tie=margin <= tolerance)


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """Outputs of several prompts, compared.

    Attributes:
        differences: one for each prompt, None where the outputs are the same.
    """

    differences: tuple[Difference | None, ...]

    @property
    def identical(self) -> int:
        """Prompts with the same output, token for token."""
        return sum(one is None for one in self.differences)

    @property
    def ties(self) -> int:
        """Prompts whose outputs part at a tie."""
        return sum(one is not None and one.is_tie for one in self.differences)

    @property
    def different(self) -> int:
        """Prompts whose outputs differ and should not."""
        return len(self.differences) - self.identical - self.ties

    def __str__(self) -> str:
        return (
            f"{self.identical} of {len(self.differences)} outputs identical, {self.ties} ties, "
            f"{self.different} different"
        )


def compare_outputs(
    target: Any,
    prompts: Sequence[Tensor | Sequence[int]],
    plain: Sequence[Decoded],
    speculative: Sequence[Decoded],
    *,
    tolerance: float = TIE_TOLERANCE,
) -> OutputComparison:
    """Compare greedy outputs, prompt by prompt (:func:`explain_difference`).

    Raises:
        DataError: not as many outputs as prompts.
    """
    if not len(prompts) == len(plain) == len(speculative):
        raise DataError(
            f"{len(prompts)} prompts, {len(plain)} plain outputs and {len(speculative)} speculative ones",
            fix="one of each, in the same order.",
        )
    return OutputComparison(
        differences=tuple(
            explain_difference(target, prompt, one.token_ids, other.token_ids, tolerance=tolerance)
            for prompt, one, other in zip(prompts, plain, speculative, strict=True)
        )
    )
