"""Greedy or sampled: how tokens are chosen from logits, and how drafted ones are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.draft.decoding.request import Request
from tokennorm.draft.decoding.sampling import draw, probabilities, verify_greedy, verify_sampled
from tokennorm.draft.model import DraftModel

__all__ = ["GreedyRule", "RoundRule", "Rule", "SamplingRule", "make_rule"]


class RoundRule:
    """One greedy round.

    Attributes:
        choose: for ``propose(choose=...)``; None: the likeliest.
    """

    choose: Callable[[Tensor, int], Tensor] | None = None

    def verify(self, logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafted tokens are accepted, ``[1]``, and the target's own after them, ``[1]``.

        Args:
            logits: ``[P + 1, V]``, the target's at the drafted places and after them.
            drafted: ``[P]`` in the target's vocabulary.
        """
        return verify_greedy(logits.argmax(dim=-1).unsqueeze(0), drafted.unsqueeze(0))


class _SampledRound(RoundRule):
    def __init__(self, rule: SamplingRule, drafter: DraftModel, limit: int) -> None:
        self._temperature = rule.temperature
        self._drafter = drafter
        self._limit = limit
        # One call for all numbers of the round: to draw each proposal, to accept each, and to draw the last token.
        self._uniforms = rule.uniforms(2 * limit + 1, drafter.fc.weight.device)
        self._drawn_from: list[Tensor] = []
        self.choose = self._choose

    def _choose(self, scores: Tensor, number: int) -> Tensor:
        chances = probabilities(scores, self._temperature)
        self._drawn_from.append(chances)
        return draw(chances, self._uniforms[number : number + 1])

    def verify(self, logits: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        target = probabilities(logits, self._temperature).unsqueeze(0)
        count, limit = drafted.shape[0], self._limit
        drafter = target.new_zeros((1, count, target.shape[-1]))
        if count:
            chances = torch.stack(self._drawn_from, dim=1).to(target.dtype)
            if self._drafter.d2t is None:
                drafter = chances
            else:
                ids = self._drafter.target_ids(torch.arange(chances.shape[-1], device=chances.device))
                drafter.index_copy_(2, ids, chances)
        return verify_sampled(
            target, drafter, drafted.unsqueeze(0), self._uniforms[limit : limit + count][None], self._uniforms[-1:]
        )


class GreedyRule:
    """The likeliest token; of equal ones the first."""

    def choose(self, logits: Tensor) -> Tensor:
        """``[1, V]`` to the next token ``[1]``."""
        return logits.argmax(dim=-1)

    def round(self, drafter: DraftModel, limit: int) -> RoundRule:
        """A round of at most ``limit`` proposals."""
        del drafter, limit
        return RoundRule()


@dataclass(frozen=True, kw_only=True)
class SamplingRule(GreedyRule):
    """Tokens drawn from ``softmax(logits / temperature)``.

    Attributes:
        temperature: above 0.
        generator: None: torch's own of the CPU.
    """

    temperature: float
    generator: torch.Generator | None

    def uniforms(self, count: int, device: torch.device) -> Tensor:
        """``[count]`` float64 in [0, 1)."""
        source = torch.device("cpu") if self.generator is None else self.generator.device
        return torch.rand(count, dtype=torch.float64, generator=self.generator, device=source).to(device)

    def choose(self, logits: Tensor) -> Tensor:
        """``[1, V]`` to the next token ``[1]``."""
        return draw(probabilities(logits, self.temperature), self.uniforms(1, logits.device))

    def round(self, drafter: DraftModel, limit: int) -> RoundRule:
        """A round of at most ``limit`` proposals."""
        return _SampledRound(self, drafter, limit)


Rule = GreedyRule


def make_rule(request: Request) -> Rule:
    """The rule of a temperature."""
    if request.temperature == 0:
        return GreedyRule()
    return SamplingRule(temperature=request.temperature, generator=request.generator)
