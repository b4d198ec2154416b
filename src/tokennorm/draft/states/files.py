"""The files of a cache: which documents each holds, and the manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokennorm.draft.formats.files import partial_path
from tokennorm.draft.states.spec import CacheSpec
from tokennorm.errors import DataError

__all__ = ["MANIFEST", "plan_shards", "read_manifest", "shard_name", "write_manifest"]

MANIFEST = "manifest.json"
FORMAT = 1


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> Iterator[slice]:
    """Consecutive documents of at most ``shard_tokens`` tokens (one longer document is a file of its own)."""
    start = tokens = 0
    for i, length in enumerate(lengths):
        if i > start and tokens + length > shard_tokens:
            yield slice(start, i)
            start, tokens = i, 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))


def shard_name(number: int) -> str:
    """Of the file with this number."""
    return f"states-{number:05d}.safetensors"


def write_manifest(folder: Path, spec: CacheSpec, lengths: Sequence[int]) -> None:
    """What the cache is made of, and how long its documents are."""
    text = json.dumps({"format": FORMAT, "spec": spec.to_dict(), "lengths": list(lengths)}, indent=1)
    partial = partial_path(folder / MANIFEST)
    partial.write_text(text)
    partial.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """``spec`` and ``lengths``.

    Raises:
        DataError: there is none that this version reads.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} holds no cache of hidden states: {error}") from error
    if found != FORMAT:
        raise DataError(f"the cache in {folder} has format {found}, this version reads {FORMAT}")
    return manifest
