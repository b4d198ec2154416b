"""What decoding one prompt in both ways came to, as far as a report needs it; and intervals over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft.decoding.compare import Difference
from tokennorm.draft.decoding.rounds import Decoded

__all__ = ["Interval", "PromptFigures", "bootstrap_interval"]

Interval = tuple[float, float]
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class PromptFigures:
    """One prompt, decoded plainly and speculatively. Seconds are wall seconds, as in ``Decoded``.

    Attributes:
        plain_tokens: new tokens of plain decoding.
        tokens: new tokens of speculative decoding; 1 of the prefill, the others of the rounds.
        identical: they are the same.
        tie: they are not, and part where the target's best two tokens are as good as equal.
        proposed: verified proposals of each round.
        accepted: accepted proposals of each round.
        ended: rounds (by number) that an accepted stop token cut.
        plain_prefill_seconds: of plain decoding.
        plain_seconds: of plain decoding, after the prefill.
        prefill_seconds: of speculative decoding.
        seconds: of speculative decoding, after the prefill.
        target_seconds: the target's part of it.
        draft_seconds: the drafter's part of it.
    """

    plain_tokens: int
    tokens: int
    identical: bool
    tie: bool
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    ended: tuple[int, ...]
    plain_prefill_seconds: float
    plain_seconds: float
    prefill_seconds: float
    seconds: float
    target_seconds: float
    draft_seconds: float

    @classmethod
    def of(cls, plain: Decoded, speculative: Decoded, difference: Difference | None = None) -> PromptFigures:
        """The figures of one prompt.

        Args:
            plain: from :func:`tokennorm.draft.plain_decode`.
            speculative: from :func:`tokennorm.draft.speculative_decode`.
            difference: from :func:`tokennorm.draft.explain_difference`, where the outputs differ.
        """
        rounds = speculative.rounds
        return cls(
            plain_tokens=len(plain.token_ids),
            tokens=len(speculative.token_ids),
            identical=plain.token_ids == speculative.token_ids,
            tie=difference is not None and difference.is_tie,
            proposed=tuple(one.proposed for one in rounds),
            accepted=tuple(one.accepted for one in rounds),
            ended=tuple(number for number, one in enumerate(rounds) if one.ended),
            plain_prefill_seconds=plain.prefill_seconds,
            plain_seconds=plain.seconds,
            prefill_seconds=speculative.prefill_seconds,
            seconds=speculative.seconds,
            target_seconds=speculative.target_seconds,
            draft_seconds=speculative.draft_seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PromptFigures:
        """From :meth:`to_dict`, by way of JSON."""
        fields: dict[str, Any] = {}
        for name, value in values.items():
            fields[name] = tuple(value) if isinstance(value, list) else value
        return cls(**fields)


def bootstrap_interval(
    columns: Sequence[Sequence[float]], ratio: Callable[[Tensor], Tensor], *, seed: int = 0
) -> Interval | None:
    """The middle 95 % of a ratio of sums when the prompts are drawn again with replacement.

    Rounds of one prompt are alike, so prompts are drawn and not rounds.

    Args:
        columns: for each sum, its part of each prompt.
        ratio: ``[number of sums, resamples] -> [resamples]``.
        seed: of the draws.

    Returns:
        Lower and upper end; None for fewer than two prompts.
    """
    values = torch.tensor(columns, dtype=torch.float64)
    count = values.shape[1]
    if count < 2:
        return None
    picks = torch.randint(count, (RESAMPLES, count), generator=torch.Generator().manual_seed(seed))
    draws = ratio(values[:, picks].sum(dim=2))
    draws = draws[draws.isfinite()]
    if not len(draws):
        return None
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
