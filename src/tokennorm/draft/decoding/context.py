"""The drafter's context during decoding: room for all of it is taken once, so that a round copies only its own."""

from __future__ import annotations

import torch
from torch import Tensor

from tokennorm.draft.context import ContextKV
from tokennorm.draft.model import DraftModel

__all__ = ["GrowingContext"]


class GrowingContext:
    """Keys and values of the verified positions of one sequence.

    Args:
        drafter: whose context it is.
        capacity: most positions that it will hold.
    """

    def __init__(self, drafter: DraftModel, capacity: int) -> None:
        self._drafter = drafter
        self._capacity = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.length = 0

    def append(self, features: Tensor) -> None:
        """The target's hidden states of the next positions, ``[1, T, len(target_layer_ids) * D]``."""
        end = self.length + features.shape[1]
        positions = torch.arange(self.length, end, device=features.device).unsqueeze(0)
        new = self._drafter.context(features, positions)
        if not self._keys:
            self._keys = [self._room(part) for part in new.keys]
            self._values = [self._room(part) for part in new.values]
        for room, part in zip((*self._keys, *self._values), (*new.keys, *new.values), strict=True):
            room[:, :, self.length : end] = part
        self.length = end

    def view(self) -> ContextKV:
        """All of it so far."""
        return ContextKV(
            keys=tuple(part[:, :, : self.length] for part in self._keys),
            values=tuple(part[:, :, : self.length] for part in self._values),
        )

    def _room(self, part: Tensor) -> Tensor:
        return part.new_empty((*part.shape[:2], self._capacity, part.shape[3]))
