"""Accounting of one window: exact token counts, provisional losses, one rescale.

``TokenNormedLossKit`` is the way in. ``apply_chunked_token_loss_patch`` makes a Hugging Face causal LM return the
per-token losses that it needs; ``use_varlen_attention`` lets packed rows attend inside their documents only.
"""

from tokennorm.kit.averaging import measure_averaging
from tokennorm.kit.guard import GuardVerdict, PerTokenLossGuard
from tokennorm.kit.patch import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch
from tokennorm.kit.stats import TokenLossStats
from tokennorm.kit.token_loss import TokenNormedLossKit
from tokennorm.kit.varlen_setup import use_varlen_attention

__all__ = [
    "GuardVerdict",
    "PerTokenLossGuard",
    "TokenLossStats",
    "TokenNormedLossKit",
    "apply_chunked_token_loss_patch",
    "measure_averaging",
    "remove_chunked_token_loss_patch",
    "use_varlen_attention",
]
