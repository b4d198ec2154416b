"""One group of prompts: tokens per round, acceptance, and time.

Conventions, where a number could be counted in several ways:

- The first token of an answer comes from the prefill and belongs to no round.
- ``tau`` is the tokens emitted by rounds over the number of rounds: accepted ones and the target's own. The last
  round of an answer counts as it is, though the length or a stop token may have cut it; that can only lower tau.
- Acceptance at position k is conditional: accepted over reached, where reached means verified, with everything
  before it accepted. Survival at k is the share of all rounds that accepted more than k tokens; it sums to
  ``tau_drafted``.
- Speed-up is plain seconds per token over speculative seconds per token, on the same prompts: where outputs are
  identical, the ratio of seconds. The prefill is left out, unless the name says otherwise.
- Intervals are 95 % bootstrap intervals over prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.draft.decoding.compare import Difference
from tokennorm.draft.decoding.figures import Interval, PromptFigures, bootstrap_interval
from tokennorm.draft.decoding.rounds import Decoded
from tokennorm.errors import DataError

__all__ = ["DecodeGroup", "Pair"]

Pair = tuple[Decoded, Decoded] | tuple[Decoded, Decoded, Difference | None]
"""``(plain, speculative)``, with the difference behind it where they may differ."""


@dataclass(frozen=True, kw_only=True)
class DecodeGroup:
    """Prompts of one kind, each decoded plainly and speculatively.

    Attributes:
        name: of the group.
        prompts: their figures, at least one.
    """

    name: str
    prompts: tuple[PromptFigures, ...]

    def __post_init__(self) -> None:
        if not self.prompts:
            raise DataError(f"the group {self.name!r} has no prompts")

    @classmethod
    def of(cls, name: str, pairs: Iterable[Pair]) -> DecodeGroup:
        """A group from ``(plain, speculative)``, or ``(plain, speculative, difference)`` where they may differ."""
        figures = []
        for pair in pairs:
            plain, speculative, difference = pair if len(pair) == 3 else (*pair, None)
            figures.append(PromptFigures.of(plain, speculative, difference))
        return cls(name=name, prompts=tuple(figures))

    def _sum(self, attribute: str) -> float:
        return sum(getattr(one, attribute) for one in self.prompts)

    # -- tokens --------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """New tokens of speculative decoding."""
        return sum(one.tokens for one in self.prompts)

    @property
    def rounds(self) -> int:
        """Verifications."""
        return sum(len(one.proposed) for one in self.prompts)

    @property
    def identical(self) -> int:
        """Prompts whose two outputs are the same."""
        return sum(one.identical for one in self.prompts)

    @property
    def ties(self) -> int:
        """Prompts whose outputs part at a tie (:class:`tokennorm.draft.Difference`)."""
        return sum(one.tie for one in self.prompts)

    @property
    def different(self) -> int:
        """Prompts whose outputs differ otherwise; in sampling they all may."""
        return len(self.prompts) - self.identical - self.ties

    @property
    def tau(self) -> float | None:
        """Tokens per round, the target's own included; None without rounds."""
        return _over(self.tokens - len(self.prompts), self.rounds)

    @property
    def tau_interval(self) -> Interval | None:
        """Of :attr:`tau`."""
        columns = [[one.tokens - 1 for one in self.prompts], [len(one.proposed) for one in self.prompts]]
        return bootstrap_interval(columns, lambda sums: sums[0] / sums[1])

    @property
    def tau_drafted(self) -> float | None:
        """Accepted drafted tokens per round."""
        return _over(sum(sum(one.accepted) for one in self.prompts), self.rounds)

    @property
    def mean_verified(self) -> float | None:
        """Proposals verified per round."""
        return _over(sum(sum(one.proposed) for one in self.prompts), self.rounds)

    @property
    def accepted_lengths(self) -> tuple[int, ...]:
        """Rounds that accepted 0, 1, 2, ... drafted tokens."""
        counts = [0] * (self._most_proposed() + 1)
        for one in self.prompts:
            for accepted in one.accepted:
                counts[accepted] += 1
        return tuple(counts)

    @property
    def reached(self) -> tuple[int, ...]:
        """Rounds that verified proposal 0, 1, ... with everything before it accepted."""
        counts = [0] * self._most_proposed()
        for one in self.prompts:
            for number, (proposed, accepted) in enumerate(zip(one.proposed, one.accepted, strict=True)):
                # The first rejected one was reached too; after an accepted stop token nothing is known.
                known = accepted if number in one.ended else min(accepted + 1, proposed)
                for k in range(known):
                    counts[k] += 1
        return tuple(counts)

    @property
    def acceptance(self) -> tuple[float | None, ...]:
        """Accepted over reached, by position; None where none was reached."""
        lengths = self.accepted_lengths
        return tuple(_over(sum(lengths[k + 1 :]), reached) for k, reached in enumerate(self.reached))

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of all rounds that accepted more than 0, 1, ... drafted tokens."""
        lengths = self.accepted_lengths
        return tuple(sum(lengths[k + 1 :]) / self.rounds for k in range(len(lengths) - 1))

    def _most_proposed(self) -> int:
        return max((proposed for one in self.prompts for proposed in one.proposed), default=0)

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def speedup(self) -> float | None:
        """Plain over speculative seconds per token, after the prefill."""
        return self._speedup(self._time_columns(prefill=False))

    @property
    def speedup_interval(self) -> Interval | None:
        """Of :attr:`speedup`."""
        return bootstrap_interval(
            self._time_columns(prefill=False), lambda sums: sums[0] / sums[1] / (sums[2] / sums[3])
        )

    @property
    def speedup_with_prefill(self) -> float | None:
        """The same from the prompt to the last token."""
        return self._speedup(self._time_columns(prefill=True))

    def _time_columns(self, *, prefill: bool) -> list[list[float]]:
        """Plain seconds and tokens, speculative seconds and tokens, by prompt."""
        if prefill:
            return [
                [one.plain_prefill_seconds + one.plain_seconds for one in self.prompts],
                [one.plain_tokens for one in self.prompts],
                [one.prefill_seconds + one.seconds for one in self.prompts],
                [one.tokens for one in self.prompts],
            ]
        return [
            [one.plain_seconds for one in self.prompts],
            [one.plain_tokens - 1 for one in self.prompts],
            [one.seconds for one in self.prompts],
            [one.tokens - 1 for one in self.prompts],
        ]

    @staticmethod
    def _speedup(columns: Sequence[Sequence[float]]) -> float | None:
        plain_seconds, plain_tokens, seconds, tokens = (sum(column) for column in columns)
        return _over(plain_seconds * tokens, seconds * plain_tokens)

    @property
    def plain_tokens_per_second(self) -> float | None:
        """Of plain decoding, after the prefill."""
        return _over(self._sum("plain_tokens") - len(self.prompts), self._sum("plain_seconds"))

    @property
    def tokens_per_second(self) -> float | None:
        """Of speculative decoding, after the prefill."""
        return _over(self.tokens - len(self.prompts), self._sum("seconds"))

    @property
    def milliseconds_per_token(self) -> dict[str, float | None]:
        """After the prefill: ``plain``, and of speculative decoding ``target``, ``drafter`` and ``other``."""
        tokens = (self.tokens - len(self.prompts)) / 1000
        target, drafter = self._sum("target_seconds"), self._sum("draft_seconds")
        plain_tokens = (self._sum("plain_tokens") - len(self.prompts)) / 1000
        return {
            "plain": _over(self._sum("plain_seconds"), plain_tokens),
            "target": _over(target, tokens),
            "drafter": _over(drafter, tokens),
            "other": _over(max(self._sum("seconds") - target - drafter, 0.0), tokens),
        }

    @property
    def milliseconds_per_round(self) -> dict[str, float | None]:
        """The parts of a round: ``target`` (verification), ``drafter``."""
        rounds = self.rounds / 1000
        return {
            "target": _over(self._sum("target_seconds"), rounds),
            "drafter": _over(self._sum("draft_seconds"), rounds),
        }

    def summary(self) -> dict[str, Any]:
        """Every number of the report, for JSON."""
        names = (
            "tokens", "rounds", "identical", "ties", "different", "tau", "tau_interval", "tau_drafted",
            "mean_verified", "accepted_lengths", "reached", "acceptance", "survival", "speedup",
            "speedup_interval", "speedup_with_prefill", "plain_tokens_per_second", "tokens_per_second",
            "milliseconds_per_token", "milliseconds_per_round",
        )  # fmt: skip
        return {"prompts": len(self.prompts)} | {name: getattr(self, name) for name in names}


def _over(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
