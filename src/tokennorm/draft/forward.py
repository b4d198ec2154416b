"""What one training forward of a drafter hands to the fused objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["DraftForward"]


@dataclass(frozen=True, kw_only=True)
class DraftForward:
    """One training forward, ready for the fused objective.

    Attributes:
        hidden: ``[B, A, K, D]`` after the final norm.
        head: ``[V_d, D]``, the drafter's head.
        latents: ``[B, A, K, r]`` of the Markov head, teacher-forced; None without one.
        markov_weight: ``[V_d, r]``, its ``W2``.
        confidence: ``[B, A, K]`` logits; None without a confidence head.
    """

    hidden: Tensor
    head: Tensor
    latents: Tensor | None = None
    markov_weight: Tensor | None = None
    confidence: Tensor | None = None

    def objective_arguments(self) -> dict[str, Any]:
        """Keywords for :func:`tokennorm.draft.dspark_objective`; plan, teacher and weights are the caller's."""
        return {
            "hidden": self.hidden,
            "head": self.head,
            "latents": self.latents,
            "markov_weight": self.markov_weight,
            "confidence": self.confidence,
        }

    def logits(self) -> Tensor:
        """``[B, A, K, V_d]``, all of them; for tests and small models."""
        logits = self.hidden @ self.head.t()
        if self.latents is not None and self.markov_weight is not None:
            logits = logits + self.latents @ self.markov_weight.t()
        return logits
