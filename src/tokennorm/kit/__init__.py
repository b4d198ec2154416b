"""Accounting of one window: exact token counts, provisional losses, one rescale.

``TokenNormedLossKit`` is the way in. ``apply_chunked_token_loss_patch`` makes a Hugging Face causal LM return the
per-token losses that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokennorm.kit.averaging import measure_averaging
from tokennorm.kit.stats import TokenLossStats
from tokennorm.kit.token_loss import TokenNormedLossKit

if TYPE_CHECKING:
    from tokennorm.kit.patch import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch

__all__ = [
    "TokenLossStats",
    "TokenNormedLossKit",
    "apply_chunked_token_loss_patch",
    "measure_averaging",
    "remove_chunked_token_loss_patch",
]


def __getattr__(name: str) -> Any:
    """The patch is loaded when somebody asks for it: the accounting alone needs none of it."""
    if name in ("apply_chunked_token_loss_patch", "remove_chunked_token_loss_patch"):
        from tokennorm.kit import patch

        return getattr(patch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
