"""Cross-entropy of a block of logit rows, and its gradient, in place.

Everything here sees dense float32 or float64 rows that are all supervised: masking happened before.

With ``u = transform(z)`` the logits of one row, ``lse = logsumexp(u)``, ``q = softmax(u)``, label ``y``, smoothing
``s`` and z-loss coefficient ``c``:

    loss   = (1 - s) * (lse - u[y]) + s * (lse - mean(u)) + c * lse^2
    dloss/du = q * (1 + 2 c lse) - (1 - s) * onehot(y) - s / V
    dloss/dz = dloss/du * du/dz
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tokennorm.errors import LossUsageError

__all__ = ["STATS", "LogitTransform", "RowLoss", "RowOutput"]

STATS = ("log_prob", "entropy", "is_top1")


@dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """What a model does to its logits between the head and the softmax.

    ``u = softcap * tanh(scale * z / softcap)``, or ``u = scale * z`` without a softcap. It covers division by a
    ``logits_scaling``, multiplication by a ``logit_scale``, and soft-capping.

    Raises:
        LossUsageError: a scale or softcap that is zero or not finite.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("scale", self.scale), ("softcap", self.softcap)):
            if value is not None and (not math.isfinite(value) or value == 0):
                raise LossUsageError(f"the {name} of a logit transform is {value}; it must be finite and not zero")

    @property
    def is_identity(self) -> bool:
        """Whether the logits reach the softmax as they are."""
        return self.scale == 1.0 and self.softcap is None

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply the transform to a tensor of logits, out of place."""
        scaled = logits * self.scale if self.scale != 1.0 else logits
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


@dataclass(frozen=True)
class RowOutput:
    """Per-row results of a block: ``loss`` with z-loss and smoothing in it, the z part alone, and statistics."""

    loss: Tensor
    z: Tensor | None = None
    stats: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RowLoss:
    """The loss of one row as a function of its logits (the definition is at the top of this file)."""

    transform: LogitTransform = LogitTransform()
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    stats: Sequence[str] = ()

    def __call__(
        self, logits: Tensor, labels: Tensor, *, with_gradient: bool, row_factor: Tensor | None = None
    ) -> RowOutput:
        """Compute the block's losses; overwrite ``logits`` with the gradient, or with scratch.

        Args:
            logits: ``[B, V]`` float32 or float64, destroyed.
            labels: ``[B]`` int64, all inside the vocabulary.
            with_gradient: leave ``row_factor * dloss/dz`` in ``logits``.
            row_factor: ``[B]`` factor of each row's gradient (not of the returned loss); None is 1.
        """
        column = labels.unsqueeze(1)
        slope = self._apply_transform(logits, with_gradient=with_gradient)
        picked = logits.gather(1, column).squeeze(1)
        maximum = logits.amax(dim=1, keepdim=True)
        stats: dict[str, Tensor] = {}
        if "is_top1" in self.stats:
            stats["is_top1"] = logits.argmax(dim=1) == labels
        # Every later use of the logits is relative to the row's maximum, so shift once, in place.
        logits.sub_(maximum)
        mean_shifted = logits.mean(dim=1) if self.label_smoothing else None
        weighted = logits.exp().mul_(logits).sum(dim=1) if "entropy" in self.stats else None
        logits.exp_()
        total = logits.sum(dim=1)
        log_total = total.log()
        maximum = maximum.squeeze(1)
        lse = log_total + maximum

        loss = log_total - (picked - maximum)
        if "log_prob" in self.stats:
            stats["log_prob"] = -loss
        if weighted is not None:
            stats["entropy"] = log_total - weighted / total
        if mean_shifted is not None:
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * (log_total - mean_shifted)
        z = None
        if self.z_loss:
            z = self.z_loss * lse.square()
            loss = loss + z
        if with_gradient:
            self._to_gradient(logits, column, total, lse, row_factor)
            if slope is not None:
                logits.mul_(slope)
        return RowOutput(loss, z, stats)

    def _apply_transform(self, logits: Tensor, *, with_gradient: bool) -> Tensor | None:
        """Transform in place; return du/dz where it is not the constant ``scale``."""
        scale, softcap = self.transform.scale, self.transform.softcap
        if softcap is None:
            if scale != 1.0:
                logits.mul_(scale)
            return None
        logits.mul_(scale / softcap).tanh_()
        slope = logits.square().neg_().add_(1.0).mul_(scale) if with_gradient else None
        logits.mul_(softcap)
        return slope

    def _to_gradient(
        self, exponentials: Tensor, column: Tensor, total: Tensor, lse: Tensor, row_factor: Tensor | None
    ) -> None:
        """Turn ``exp(u - max)`` into the row's gradient, in place: one multiplication and one scatter."""
        outer = self.transform.scale if self.transform.softcap is None else 1.0
        factor = torch.full_like(total, outer) if row_factor is None else row_factor * outer
        softmax_factor = factor / total
        if self.z_loss:
            softmax_factor = softmax_factor * (1 + 2 * self.z_loss * lse)
        exponentials.mul_(softmax_factor.unsqueeze(1))
        exponentials.scatter_add_(1, column, ((self.label_smoothing - 1) * factor).unsqueeze(1))
        if self.label_smoothing:
            exponentials.sub_((factor * (self.label_smoothing / exponentials.shape[1])).unsqueeze(1))
