"""What one round of drafting and verifying came to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Round"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One draft-and-verify round of speculative decoding.

    Attributes:
        proposed: drafted tokens that were verified, 0 to ``num_proposals``.
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
