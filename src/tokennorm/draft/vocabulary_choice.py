"""Which tokens a drafter with a reduced vocabulary proposes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tokennorm.draft.vocabulary import DraftVocabulary
from tokennorm.errors import ConfigError

__all__ = ["frequent_tokens"]


def frequent_tokens(token_ids: Iterable[Tensor], *, size: int, target_size: int) -> DraftVocabulary:
    """The most frequent tokens of some text; ties, and tokens that do not occur, in the order of their ids.

    Tokenizers learnt by merging number their tokens by frequency, so small ids are a good guess about text that
    was not counted.

    Args:
        token_ids: integer tensors of any shape, such as the answers' tokens.
        size: of the drafter's vocabulary.
        target_size: of the target's.

    Raises:
        ConfigError: a size that does not fit, or a token outside the target's vocabulary.
    """
    if not 0 < size <= target_size:
        raise ConfigError(f"a vocabulary of {size} of {target_size} tokens", fix=f"give 1 to {target_size}.")
    counts = torch.zeros(target_size, dtype=torch.int64)
    for ids in token_ids:
        flat = ids.reshape(-1).to("cpu", torch.int64)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < target_size:
            raise ConfigError(
                f"token ids run from {int(flat.min())} to {int(flat.max())}, the target has {target_size} tokens"
            )
        counts += torch.bincount(flat, minlength=target_size)
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values, target_size)
