"""Rounds of a head whose calibration is known."""

from __future__ import annotations

import torch

from tokennorm.draft.calibration.outcomes import PrefixOutcomes
from tokennorm.draft.decoding.rounds import Round


def known_rounds(
    *,
    rounds: int,
    proposals: int = 4,
    scale: float = 1.0,
    end: float = 0.0,
    cut: bool = False,
    seed: int = 0,
) -> list[Round]:
    """Proposals are accepted with probability ``sigmoid(z)``; the head says ``scale * z``: right at ``T = scale``.

    With probability ``end`` a drafted token is an end token; ``cut``: nothing is proposed after the first of them.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (rounds, proposals)
    # What a round shares (how easy its text is) and what each proposal has of its own.
    z = 0.7 + 1.1 * torch.randn((rounds, 1), generator=generator, dtype=torch.float64)
    z = z + 1.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    accepted = torch.rand(shape, generator=generator, dtype=torch.float64) < z.sigmoid()
    is_end = torch.rand(shape, generator=generator) < end
    made = []
    for logits, good, ends in zip((scale * z).tolist(), accepted.tolist(), is_end.tolist(), strict=True):
        proposed = ends.index(True) + 1 if cut and any(ends) else proposals
        count, ended = 0, False
        while count < proposed and good[count] and not ended:
            ended = ends[count]
            count += 1
        emitted = count if ended else count + 1
        made.append(
            Round(
                proposed=proposed,
                accepted=count,
                emitted=emitted,
                ended=ended,
                confidence=tuple(logits[:proposed]),
            )
        )
    return made


def by_prompt(rounds: list[Round], size: int = 20) -> list[list[Round]]:
    """Consecutive rounds as prompts."""
    return [rounds[i : i + size] for i in range(0, len(rounds), size)]


def known_outcomes(**settings) -> PrefixOutcomes:
    return PrefixOutcomes.of(known_rounds(**settings))
