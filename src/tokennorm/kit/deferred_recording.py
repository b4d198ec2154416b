"""What a model did to logits that have not been computed, in a form that a chunked loss can take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["Recording", "RowOperation"]

RowOperation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What was done to the logits, in the order: vocabulary slice, scale and softcap, rows.

    The three kinds commute, so each is kept on its own.

    Attributes:
        rows: reshapes and slices of the leading dims; each also fits the hidden states, which share these dims.
        scale: a in ``a * logits``, or in ``softcap * tanh(a * logits)``.
        softcap: b in ``b * tanh(a * logits)``, or None without a tanh.
        first, last: the slice ``[first, last)`` of the vocabulary.
        dtype: what the model believes the logits to be; losses are computed in float32 or wider whatever it says.
    """

    rows: tuple[RowOperation, ...] = ()
    scale: float = 1.0
    softcap: float | None = None
    first: int = 0
    last: int
    dtype: torch.dtype

    def times(self, factor: float) -> Recording | None:
        """Multiply by a number; None if that can't be written down."""
        if factor == 0.0 or not math.isfinite(factor):
            return None
        if self.softcap is None:
            return replace(self, scale=self.scale * factor)
        return replace(self, softcap=self.softcap * factor)

    def tanh(self) -> Recording | None:
        """Apply tanh; None for a second one."""
        return replace(self, softcap=1.0) if self.softcap is None else None

    def on_rows(self, operation: RowOperation) -> Recording:
        """Reshape or slice the leading dims."""
        return replace(self, rows=(*self.rows, operation))

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Replay the row operations on hidden states or on logits ``[..., D or V]``."""
        for operation in self.rows:
            tensor = operation(tensor)
        return tensor

    def replay(self, logits: Tensor) -> Tensor:
        """Replay everything on the head's real output."""
        logits = self.rows_of(logits).to(torch.promote_types(logits.dtype, self.dtype))
        if (self.first, self.last) != (0, logits.shape[-1]):
            logits = logits[..., self.first : self.last]
        return self.transform(logits).to(self.dtype)

    def transform(self, logits: Tensor) -> Tensor:
        """Replay scale and softcap alone."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits)
