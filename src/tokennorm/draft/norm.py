"""RMSNorm in float32, whatever the states are (float64 stays)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``.

    Unlike torch's own it takes states and weight of different dtypes, as autocast makes them.

    Args:
        size: width of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """``[..., size]`` in the dtype of ``states``."""
        wide = torch.promote_types(states.dtype, torch.float32)
        normed = F.rms_norm(states.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return normed.to(states.dtype)

    def extra_repr(self) -> str:
        """Width and eps."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
