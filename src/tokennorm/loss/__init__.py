"""Pure numerics on tensors: terms of an objective, and per-token cross-entropy from hidden states and a head."""

from tokennorm.loss.terms import LossTerm, RatioSum, merge_ratios, merge_terms, reduce_ratios

__all__ = [
    "LossTerm",
    "RatioSum",
    "merge_ratios",
    "merge_terms",
    "reduce_ratios",
]
