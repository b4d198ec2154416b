"""Pure numerics on tensors: the terms of an objective, and per-token cross-entropy from a head."""

from tokennorm.loss.chunks import default_chunk_size
from tokennorm.loss.label_checks import raise_pending_label_errors
from tokennorm.loss.linear_ce import linear_cross_entropy
from tokennorm.loss.row_math import LogitTransform
from tokennorm.loss.terms import LossTerm, RatioSum, merge_ratios, merge_terms, reduce_ratios

__all__ = [
    "LogitTransform",
    "LossTerm",
    "RatioSum",
    "default_chunk_size",
    "linear_cross_entropy",
    "merge_ratios",
    "merge_terms",
    "raise_pending_label_errors",
    "reduce_ratios",
]
