"""Hidden states of the target on disk, so that training does not run the target again in every epoch.

A folder with a manifest and safetensors files of consecutive documents. Which documents a file holds follows from
their lengths alone, and a file appears complete or not at all; so a stopped run goes on with the first missing
file, and several processes can share the work.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.formats.files import readable_size, safetensors_module, save_tensors
from tokennorm.draft.states.capture import HiddenStateCapture
from tokennorm.draft.states.files import MANIFEST, plan_shards, read_manifest, shard_name, write_manifest
from tokennorm.draft.states.spec import CacheSpec, Document
from tokennorm.draft.states.totals import log_totals
from tokennorm.errors import ConfigError, DataError

__all__ = [
    "CachedDocument",
    "HiddenStateCache",
    "collate_log_totals",
    "collate_states",
    "describe_size",
    "fill_cache",
]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CachedDocument:
    """One document and its hidden states, in the cache's precision.

    Attributes:
        input_ids: ``[L]`` int64.
        supervised: ``[L]`` bool.
        features: ``[L, len(layer_ids) * D]``.
        last_hidden: ``[L, D]``, after the target's final norm.
        log_total: ``[L]`` float32, the log-sum-exp of the target's logits made of ``last_hidden``; NaN where a
            position teaches nothing. None where the cache has none.
    """

    input_ids: Tensor
    supervised: Tensor
    features: Tensor
    last_hidden: Tensor
    log_total: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]


def describe_size(spec: CacheSpec, num_tokens: int) -> str:
    """One line about the disk that a cache takes, for before it starts."""
    states = len(spec.layer_ids) + spec.stores_last
    return (
        f"{num_tokens:,} tokens x {states} hidden states of {spec.hidden_size} in {spec.dtype}: "
        f"{readable_size(spec.bytes_for(num_tokens))} ({readable_size(spec.bytes_for(1))} per token)"
    )


def fill_cache(
    target: nn.Module,
    documents: Sequence[Document],
    folder: Path | str,
    spec: CacheSpec,
    *,
    batch_tokens: int = 4096,
    rank: int = 0,
    world_size: int = 1,
    say: Say | None = None,
) -> None:
    """Run the target over the documents and keep their hidden states; go on where an earlier call stopped.

    Batches never cross files, so what a file holds does not depend on when a run was stopped.

    Args:
        target: in eval mode, on its device.
        documents: those of the spec.
        folder: made if it isn't there.
        spec: from :meth:`CacheSpec.of`.
        batch_tokens: most tokens of one forward pass, padding included (a longer document goes alone).
        rank: of this process; it makes every ``world_size``-th file.
        world_size: processes that share the work.
        say: receives one line before the work starts, and one per file.

    Raises:
        DataError: the folder holds the cache of something else.
        ConfigError: too little free space, or a folder that can't be written.
    """
    folder = Path(folder)
    lengths = [document.input_ids.shape[0] for document in documents]
    if len(lengths) != spec.num_documents or not lengths or min(lengths) == 0:
        raise DataError(
            f"{len(lengths)} documents for a cache of {spec.num_documents}, or an empty one among them"
        )
    shards = list(plan_shards(lengths, spec.shard_tokens))
    missing = [number for number in range(len(shards)) if not (folder / shard_name(number)).is_file()]
    _say(say, describe_size(spec, sum(lengths)))
    if len(missing) < len(shards):
        _say(say, f"{len(shards) - len(missing)} of {len(shards)} files are there already")
    _prepare(folder, spec, lengths, sum(sum(lengths[shards[number]]) for number in missing))
    capture = HiddenStateCapture(target, spec.layer_ids)
    for number in missing:
        if number % world_size != rank:
            continue
        part = shards[number]
        tensors = _capture_shard(capture, documents[part], spec, batch_tokens)
        save_tensors(folder / shard_name(number), tensors)
        _say(say, f"file {number + 1} of {len(shards)}: {sum(lengths[part]):,} tokens")


class HiddenStateCache(Sequence[CachedDocument]):
    """A finished cache, read document by document without loading files whole.

    Args:
        folder: as :func:`fill_cache` wrote it.
        spec: what it has to be made of; None takes it as it is.

    Raises:
        DataError: no cache, one of something else, or one that is not finished.
    """

    def __init__(self, folder: Path | str, spec: CacheSpec | None = None) -> None:
        self.folder = Path(folder)
        manifest = read_manifest(self.folder)
        self.spec = CacheSpec.from_dict(manifest["spec"])
        if spec is not None:
            spec.require(self.spec, self.folder)
        self.lengths: list[int] = manifest["lengths"]
        self._where = [
            (number, i - part.start)
            for number, part in enumerate(plan_shards(self.lengths, self.spec.shard_tokens))
            for i in range(part.start, part.stop)
        ]
        count = self._where[-1][0] + 1
        missing = [number for number in range(count) if not (self.folder / shard_name(number)).is_file()]
        if missing:
            raise DataError(
                f"the cache in {self.folder} is not finished: {len(missing)} of {count} files are missing",
                fix="run the same command again; it goes on where it stopped.",
            )
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: Any) -> Any:
        """One document; a slice gives a list."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, place = self._where[index]
        file = self._open(number)
        start, stop = (int(end) for end in file.get_slice("offsets")[place : place + 2])
        features = file.get_slice("features")[start:stop]
        spec = self.spec
        last = file.get_slice("last_hidden")[start:stop] if spec.stores_last else _last_of(features, spec)
        return CachedDocument(
            input_ids=file.get_slice("input_ids")[start:stop],
            supervised=file.get_slice("supervised")[start:stop],
            features=features,
            last_hidden=last,
            log_total=file.get_slice("log_total")[start:stop] if spec.log_totals else None,
        )

    def _open(self, number: int) -> Any:
        if number not in self._files:
            path = self.folder / shard_name(number)
            try:
                self._files[number] = safetensors_module().safe_open(path, framework="pt")
            except Exception as error:
                raise DataError(
                    f"{path} can't be read: {error}", fix="delete it and fill the cache again; only it is remade."
                ) from error
        return self._files[number]

    def __getstate__(self) -> dict[str, Any]:
        """Workers of a data loader open the files themselves."""
        return self.__dict__ | {"_files": {}}


def collate_log_totals(rows: Sequence[Sequence[CachedDocument]], row_length: int | None = None) -> Tensor | None:
    """``teacher_log_total`` ``[B, S]`` of rows of documents, NaN behind the last one; None without them."""
    width = row_length or max(sum(len(document) for document in row) for row in rows)
    padded = []
    for row in rows:
        totals = [document.log_total for document in row]
        kept = [total for total in totals if total is not None]
        if len(kept) < len(totals):
            return None
        joined = torch.cat(kept)
        padded.append(torch.nn.functional.pad(joined, (0, width - joined.shape[0]), value=torch.nan))
    return torch.stack(padded)


def collate_states(
    rows: Sequence[Sequence[CachedDocument]], row_length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Features ``[B, S, F]`` and teacher states ``[B, S, D]`` of rows of documents, 0 behind the last one.

    Args:
        rows: for each row its documents, in the order of the token ids.
        row_length: ``S``; the longest row by default.
    """
    width = row_length or max(sum(len(document) for document in row) for row in rows)

    def stack(name: str) -> Tensor:
        joined = [torch.cat([getattr(document, name) for document in row]) for row in rows]
        return torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[0])) for part in joined])

    return stack("features"), stack("last_hidden")


def _last_of(features: Tensor, spec: CacheSpec) -> Tensor:
    return features.split(spec.hidden_size, dim=1)[spec.layer_ids.index(spec.num_layers - 1)]


def _say(say: Say | None, line: str) -> None:
    if say is not None:
        say(line)


def _capture_shard(
    capture: HiddenStateCapture, documents: Sequence[Document], spec: CacheSpec, batch_tokens: int
) -> dict[str, Tensor]:
    lengths = [document.input_ids.shape[0] for document in documents]
    device = next(capture.target.parameters()).device
    features: dict[int, Tensor] = {}
    last: dict[int, Tensor] = {}
    for batch in _batches(lengths, batch_tokens):
        width = max(lengths[i] for i in batch)
        # Padded on the right: what comes later changes nothing in a causal model.
        ids = torch.stack(
            [torch.nn.functional.pad(documents[i].input_ids, (0, width - lengths[i])) for i in batch]
        )
        captured = capture(input_ids=ids.to(device))
        for row, i in enumerate(batch):
            features[i] = captured.features[row, : lengths[i]].to("cpu", spec.torch_dtype)
            if spec.stores_last:
                last[i] = captured.last_hidden[row, : lengths[i]].to("cpu", spec.torch_dtype)
    order = range(len(documents))
    tensors = {
        "offsets": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        "input_ids": torch.cat([documents[i].input_ids.to(torch.int64) for i in order]),
        "supervised": torch.cat([documents[i].supervised.to(torch.bool) for i in order]),
        "features": torch.cat([features[i] for i in order]),
    }
    if spec.stores_last:
        tensors["last_hidden"] = torch.cat([last[i] for i in order])
    if spec.log_totals:
        states = tensors["last_hidden"] if spec.stores_last else _last_of(tensors["features"], spec)
        tensors["log_total"] = log_totals(capture.target, states, _teaches(tensors))
    return tensors


def _teaches(tensors: dict[str, Tensor]) -> Tensor:
    """``[T]`` bool: the next token of the same document is supervised."""
    teaches = tensors["supervised"].roll(-1)
    teaches[tensors["offsets"][1:] - 1] = False
    return teaches


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Documents of similar length together, so that little is padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and lengths[batch[0]] * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _prepare(folder: Path, spec: CacheSpec, lengths: Sequence[int], missing_tokens: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The list before the look at the manifest: other ranks may start this cache in the same moment, and write
        # the manifest first.
        foreign = [path for path in folder.iterdir() if not path.name.startswith(".partial-")]
        if (folder / MANIFEST).is_file():
            spec.require(CacheSpec.from_dict(read_manifest(folder)["spec"]), folder)
        elif foreign:
            raise DataError(f"{folder} holds other files", fix="give a new folder.")
        free, needed = shutil.disk_usage(folder).free, spec.bytes_for(missing_tokens)
        if needed > free:
            raise ConfigError(
                f"the cache needs {readable_size(needed)} more, {folder} has {readable_size(free)} free",
                fix="cache in bfloat16, fewer documents or layers, or train online.",
            )
        if not (folder / MANIFEST).is_file():
            write_manifest(folder, spec, lengths)
    except OSError as error:
        raise ConfigError(f"the cache can't be written to {folder}: {error}") from error
