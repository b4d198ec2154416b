"""Keys and values of the context: what a draft layer needs of the target's hidden states, and all it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokennorm.errors import LossUsageError

__all__ = ["ContextKV"]


@dataclass(frozen=True, kw_only=True)
class ContextKV:
    """Keys and values per draft layer, each ``[B, num_key_value_heads, T, head_dim]``.

    Keys are normalised and rotated already. They depend on nothing but the target's hidden state at their own
    position, so a decoder computes each of them once and keeps them.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def length(self) -> int:
        """Context positions, ``T``."""
        return self.keys[0].shape[2]

    def extended(self, other: ContextKV) -> ContextKV:
        """This context, and ``other`` after it."""
        if len(other.keys) != len(self.keys):
            raise LossUsageError(f"contexts of {len(self.keys)} and {len(other.keys)} layers can't be joined")
        return ContextKV(
            keys=tuple(torch.cat(pair, dim=2) for pair in zip(self.keys, other.keys, strict=True)),
            values=tuple(torch.cat(pair, dim=2) for pair in zip(self.values, other.values, strict=True)),
        )

    def cropped(self, length: int) -> ContextKV:
        """Its first ``length`` positions (a view)."""
        return ContextKV(
            keys=tuple(part[:, :, :length] for part in self.keys),
            values=tuple(part[:, :, :length] for part in self.values),
        )

    def rows(self, index: Tensor) -> ContextKV:
        """The rows ``index`` ``[B']`` of the batch."""
        return ContextKV(
            keys=tuple(part.index_select(0, index) for part in self.keys),
            values=tuple(part.index_select(0, index) for part in self.values),
        )
