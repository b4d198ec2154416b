"""What the confidence head said, and what became of the drafted prefixes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.draft.decoding.rounds import Round
from tokennorm.errors import ConfigError, DataError

__all__ = ["PrefixOutcomes"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefixOutcomes:
    """One row per round, one column per proposal: ``N`` rounds, ``P`` proposals.

    The event of row ``n`` and column ``k`` is "the drafted prefix up to and including proposal ``k`` was
    accepted". It is known for proposals that were verified, also after a rejection: the prefix did not survive. It
    is unknown for proposals that were not verified (a schedule stopped before them), and after an accepted end
    token.

    Leaving out what follows an *accepted* end token leaves out survivors alone, so that the observed survival of
    later proposals is a little too low: with an answer of a hundred tokens, by about a tenth of a percent. Rounds
    that count no proposal after the first drafted end token, accepted or not, don't have this bias.

    Attributes:
        confidence: ``[N, P]`` float64 logits; what stands in unobserved places is never read.
        survived: ``[N, P]`` bool; false where unobserved.
        observed: ``[N, P]`` bool; in every row a prefix.
        prompt: ``[N]`` int64, the number of the prompt that the round belongs to.

    Raises:
        DataError: shapes or dtypes that don't fit, an observed place after an unobserved one, a survivor after a
            rejection or in an unobserved place, an observed logit that is NaN or infinite.
    """

    confidence: Tensor
    survived: Tensor
    observed: Tensor
    prompt: Tensor

    def __post_init__(self) -> None:
        tensors = (self.confidence, self.survived, self.observed, self.prompt)
        shapes, dtypes = [list(x.shape) for x in tensors], [x.dtype for x in tensors]
        fits = self.confidence.ndim == 2 and shapes[1:] == [shapes[0], shapes[0], shapes[0][:1]]
        if not fits or dtypes != [torch.float64, torch.bool, torch.bool, torch.int64]:
            raise DataError(
                f"confidence, survived, observed and prompt have the shapes {shapes} and dtypes {dtypes}",
                fix="give [N, P] float64, [N, P] bool, [N, P] bool and [N] int64.",
            )
        survived, observed = self.survived, self.observed
        for name, wrong in (
            ("observed after an unobserved place", observed[:, 1:] & ~observed[:, :-1]),
            ("a survivor after a rejection", (survived & observed)[:, 1:] & ~survived[:, :-1]),
            ("a survivor in an unobserved place", survived & ~observed),
            ("a logit that is not finite", observed & ~self.confidence.isfinite()),
        ):
            if wrong.any():
                row = int(wrong.any(dim=1).nonzero()[0])
                raise DataError(
                    f"round {row} has {name} (of {int(wrong.any(dim=1).sum())} such rounds)",
                    why="outcomes of drafted prefixes can't look like this, so the metrics would mean nothing",
                )

    @classmethod
    def of(
        cls, rounds: Iterable[Round] | Iterable[Iterable[Round]], *, num_proposals: int | None = None
    ) -> PrefixOutcomes:
        """Read the outcomes off the rounds of a decoding.

        Args:
            rounds: rounds by prompt (``[decoded.rounds for decoded in ...]``), or plain rounds, each of which is
                then taken for a prompt of its own.
            num_proposals: columns; by default the largest number that was verified in any round.

        Raises:
            DataError: plain rounds among rounds by prompt, verified proposals without confidence logits, or
                numbers that contradict each other.
        """
        entries = list(rounds)
        plain = [isinstance(entry, Round) for entry in entries]
        if any(plain) and not all(plain):
            raise DataError(
                "plain rounds stand among lists of rounds",
                why="it is unclear which rounds belong to one prompt",
                fix="give a list of rounds, or a list of lists, one for each prompt.",
            )
        rows: list[tuple[int, Round]] = []
        for number, entry in enumerate(entries):
            rows += [(number, entry)] if isinstance(entry, Round) else [(number, each) for each in entry]
        width = max((one.proposed for _, one in rows), default=0) if num_proposals is None else num_proposals

        logits = [_checked_logits(one, row, width) for row, (_, one) in enumerate(rows)]
        padded = [[*values, *[0.0] * (width - len(values))] for values in logits]
        # Acceptance of an end token says nothing about the tokens drafted after it.
        known = torch.tensor([one.accepted if one.ended else one.proposed for _, one in rows], dtype=torch.int64)
        accepted = torch.tensor([one.accepted for _, one in rows], dtype=torch.int64)
        return cls(
            confidence=torch.tensor(padded, dtype=torch.float64).reshape(len(rows), width),
            survived=torch.arange(width) < accepted[:, None],
            observed=torch.arange(width) < known[:, None],
            prompt=torch.tensor([number for number, _ in rows], dtype=torch.int64),
        )

    @property
    def num_proposals(self) -> int:
        """``P``."""
        return self.confidence.shape[1]

    @property
    def num_rounds(self) -> int:
        """Rounds with at least one observed place."""
        return int(self.observed.any(dim=1).sum())

    @property
    def num_prompts(self) -> int:
        """Prompts with at least one such round."""
        return len(self.prompt[self.observed.any(dim=1)].unique())

    def select(self, rows: Tensor) -> PrefixOutcomes:
        """Return the rounds that ``rows`` (``[N]`` bool, or row numbers) picks."""
        return PrefixOutcomes(
            confidence=self.confidence[rows],
            survived=self.survived[rows],
            observed=self.observed[rows],
            prompt=self.prompt[rows],
        )

    def split(self, seed: int) -> tuple[PrefixOutcomes, PrefixOutcomes]:
        """Two halves of the prompts, drawn from ``seed``; the first has one more where their number is odd.

        Rounds of one prompt are alike, so they all go into the same half: a fit is not reported on text that it
        has seen.
        """
        prompts = self.prompt.unique()
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed))
        first = torch.isin(self.prompt, prompts[order[: (len(prompts) + 1) // 2]])
        return self.select(first), self.select(~first)

    def survival(self, temperatures: Iterable[float] | None = None) -> Tensor:
        """``[N, P]`` float64: ``prod_{j<=k} sigmoid(c_j / T_j)``, the estimate that the prefix survives.

        Source: the DSpark paper, arXiv 2607.05147. Zero where unobserved. ``T = 1`` by default.
        """
        return self.acceptance(temperatures).cumprod(dim=1)

    def acceptance(self, temperatures: Iterable[float] | None = None) -> Tensor:
        """``[N, P]`` float64: ``sigmoid(c_k / T_k)``, the estimate for a proposal whose prefix survived.

        Zero where unobserved. ``T = 1`` by default.

        Raises:
            ConfigError: the number of temperatures is not ``P``, or one is not positive and finite.
        """
        values = [1.0] * self.num_proposals if temperatures is None else [float(t) for t in temperatures]
        if len(values) != self.num_proposals or not all(0 < t < math.inf for t in values):
            raise ConfigError(
                f"temperatures {values} for {self.num_proposals} proposals",
                fix="give one positive, finite temperature for each proposal.",
            )
        probability = (self.confidence / torch.tensor(values, dtype=torch.float64)).sigmoid()
        return torch.where(self.observed, probability, 0)


def _checked_logits(one: Round, row: int, width: int) -> tuple[float, ...]:
    if not 0 <= one.accepted <= one.proposed <= width or (one.ended and one.accepted == 0):
        raise DataError(
            f"round {row}: {one.accepted} accepted of {one.proposed} verified, at most {width} proposals, "
            f"ended by a drafted end token: {one.ended}",
            why="these numbers contradict each other",
        )
    logits = () if one.confidence is None else one.confidence
    if len(logits) != one.proposed:
        raise DataError(
            f"round {row}: {one.proposed} proposals were verified, but there are {len(logits)} confidence logits",
            why="calibration compares what the confidence head said with what was accepted",
            fix="decode with a drafter that has a confidence head.",
        )
    return logits
