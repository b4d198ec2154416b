"""How many proposals are worth verifying: decided proposal by proposal, before each is made.

Proposal k is verified while ``prod_{j <= k} sigmoid(c_j / T_j)``, the estimated probability that all proposals up
to it will be accepted, is at least the threshold.

This stays lossless. The confidence ``c_k`` is made of the hidden state of slot k, which knows the context and the
anchor alone (the other slots hold mask tokens), and of the token before the proposal. So whether proposal k is
verified is settled before ``x_k`` is drawn, by what is already known then. Whichever way it goes, the token that
ends up at that place has the target's distribution: from accepting or replacing ``x_k``, or from the target alone.
A rule that looked at ``x_k`` itself, or at a later proposal, would lose that: dropping a drafted token because of
what it is shifts the distribution of what stands there in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tokennorm.errors import ConfigError

__all__ = ["VerificationSchedule"]


@dataclass(frozen=True, kw_only=True)
class VerificationSchedule:
    """When to stop proposing.

    Attributes:
        threshold: least estimated probability that the prefix survives, in [0, 1]; 0: confidence is not asked.
        max_proposals: at most so many per round; None: all that the block has. 0 decodes plainly.
        sts_temperatures: ``T_k`` by position, from calibration; None: all 1.
    """

    threshold: float = 0.0
    max_proposals: int | None = None
    sts_temperatures: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold is {self.threshold}", fix="a probability, from 0 to 1.")
        if self.max_proposals is not None and self.max_proposals < 0:
            raise ConfigError(f"max_proposals is {self.max_proposals}", fix="0 or more, or None.")
        if self.sts_temperatures is not None:
            object.__setattr__(self, "sts_temperatures", tuple(float(t) for t in self.sts_temperatures))
            if not all(math.isfinite(t) and t > 0 for t in self.sts_temperatures):
                raise ConfigError(f"sts_temperatures are {list(self.sts_temperatures)}", fix="positive numbers.")

    def check(self, num_proposals: int, *, has_confidence: bool) -> None:
        """Whether a drafter can follow it.

        Raises:
            ConfigError: a threshold without a confidence head, or fewer temperatures than proposals.
        """
        if self.threshold > 0 and not has_confidence:
            raise ConfigError(
                f"a threshold of {self.threshold}, and the drafter has no confidence head",
                fix="threshold=0.0 with max_proposals, or a drafter with enable_confidence_head.",
            )
        temperatures = self.sts_temperatures
        if temperatures is not None and len(temperatures) < self.limit(num_proposals):
            raise ConfigError(
                f"{len(temperatures)} sts_temperatures for {self.limit(num_proposals)} proposals",
                fix="one for each position, fitted with this drafter.",
            )

    def limit(self, num_proposals: int) -> int:
        """Most proposals in a round."""
        return num_proposals if self.max_proposals is None else min(num_proposals, self.max_proposals)

    def start(self) -> Callable[[Tensor, int], bool] | None:
        """The rule of one round, for ``propose(keep_going=...)``; None where confidence is not asked.

        It reads each confidence on the host: on an accelerator, one wait per proposal.
        """
        if self.threshold == 0:
            return None
        survival = 1.0
        temperatures = self.sts_temperatures

        def keep_going(confidence: Tensor, number: int) -> bool:
            nonlocal survival
            logit = confidence.item() / (1.0 if temperatures is None else temperatures[number])
            survival *= _sigmoid(logit)
            return survival >= self.threshold

        return keep_going


def _sigmoid(logit: float) -> float:
    # exp of a large number overflows.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit))
