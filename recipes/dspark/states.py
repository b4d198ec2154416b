"""The target's hidden states on disk, for the training documents and the held-out ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokennorm.data import ChatDataset
from tokennorm.draft import CacheSpec, HiddenStateCache, fill_cache
from tokennorm.engine import Runtime, all_ranks_or_none
from tokennorm.recipes.dspark.config import CacheConfig

__all__ = ["cached_states"]


def cached_states(
    config: CacheConfig,
    folder: Path,
    documents: ChatDataset,
    *,
    target: Any,
    tokenizer: Any,
    layer_ids: tuple[int, ...],
    log_totals: bool,
    runtime: Runtime,
    say: Callable[[str], None],
) -> HiddenStateCache:
    """Fill the cache, or what is missing of it, on all ranks together, and open it.

    Raises:
        DataError: the folder holds the cache of another target, tokenizer, set of layers or of other documents.
        ConfigError: it does not fit on the disk.
    """
    samples = list(documents)
    spec = CacheSpec.of(
        target,
        tokenizer,
        layer_ids,
        samples,
        dtype=config.dtype,
        shard_tokens=config.shard_tokens,
        log_totals=log_totals,
    )

    def fill() -> None:
        fill_cache(
            target,
            samples,
            folder,
            spec,
            batch_tokens=config.batch_tokens,
            rank=runtime.rank,
            world_size=runtime.world_size,
            say=lambda line: say(f"{folder.name}: {line}"),
        )

    all_ranks_or_none(fill, runtime)
    return HiddenStateCache(folder, spec)
