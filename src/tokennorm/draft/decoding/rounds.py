"""What decoding came to: one round of drafting and verifying, and one decoded prompt."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Decoded", "Round"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One draft-and-verify round of speculative decoding.

    Attributes:
        proposed: drafted tokens that were verified, 0 to ``num_proposals``, up to the first stop token among them.
        accepted: how many of them were accepted; a stop token that was accepted ends the count.
        emitted: tokens that the round added to the output: the accepted ones and the target's own, cut by a stop
            token or by the length.
        ended: an accepted drafted token was a stop token; what would have come after it is unknown.
        confidence: confidence logits of the verified proposals (``proposed`` many), None without the head.
    """

    proposed: int
    accepted: int
    emitted: int
    ended: bool
    confidence: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The answer to one prompt, and where the time went (wall seconds).

    The first token comes from the prefill and belongs to no round, so ``len(token_ids)`` is 1 plus what the rounds
    emitted.

    Attributes:
        token_ids: the new tokens, the stop token included.
        rounds: one for each verification; empty for plain decoding.
        seconds: from the end of the prefill to the last token.
        prefill_seconds: before that: the prompt through the target, its context for the drafter, the first token.
        target_seconds: part of ``seconds``: the target's forward passes, and choosing or verifying tokens.
        draft_seconds: part of ``seconds``: drafting, and adding verified positions to the drafter's context.
    """

    token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    seconds: float
    prefill_seconds: float
    target_seconds: float
    draft_seconds: float

    @property
    def total_seconds(self) -> float:
        """With the prefill."""
        return self.prefill_seconds + self.seconds

    @property
    def other_seconds(self) -> float:
        """What is neither the target's nor the drafter's."""
        return max(self.seconds - self.target_seconds - self.draft_seconds, 0.0)
