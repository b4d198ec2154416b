"""Tensors on disk in the format of ``torch.distributed.checkpoint``: each rank writes its own part.

A sharded tensor (DTensor) is written by the ranks that hold it; one that every rank has is written once. Reading
puts the parts together again for whatever split there is now.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tokennorm.engine.distributed import Runtime

__all__ = [
    "CheckpointException",
    "Description",
    "describe",
    "load_tensors",
    "own_files",
    "read_index",
    "save_tensors",
]

_INDEX = ".metadata"

Description = tuple[tuple[int, ...], torch.dtype]
"""Shape of the whole tensor, and dtype."""


def describe(tensor: Tensor) -> Description:
    """Return the shape, over all ranks, and the dtype of a tensor."""
    return tuple(tensor.shape), tensor.dtype


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, runtime: Runtime) -> None:
    """Write this rank's part, unsynced (:func:`own_files`); every rank calls it with the same names.

    Raises:
        CheckpointException: on all ranks, when one could not write; ``failures`` holds each rank's error.
    """
    with warnings.catch_warnings():
        # One process without a group is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            dict(tensors),
            # It would sync before its own buffer is written out; who calls does it afterwards.
            storage_writer=FileSystemWriter(folder, sync_files=False),
            process_group=runtime.group,
            no_dist=runtime.world_size == 1,
        )


def own_files(folder: Path, runtime: Runtime) -> list[Path]:
    """Return the files that this rank wrote; the index is rank 0's."""
    return [*folder.glob(f"__{runtime.rank}_*"), *([folder / _INDEX] if runtime.is_main else [])]


def read_index(folder: Path) -> dict[str, Description]:
    """Return name -> shape and dtype of every tensor in a checkpoint."""
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, runtime: Runtime) -> None:
    """Fill ``tensors`` in place, each rank its own part; every rank calls it with the same names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            dict(tensors),
            storage_reader=_Reader(folder),
            process_group=runtime.group,
            no_dist=runtime.world_size == 1,
        )


class _Reader(FileSystemReader):
    """Reads the index without running what it may contain: it is a pickle, and a checkpoint may be foreign."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (Path(self.path) / _INDEX).open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp_metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    """Knows the plain classes of an index and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__:
            found = getattr(dcp_metadata, name, None)
            if isinstance(found, type) and (hasattr(found, "__dataclass_fields__") or issubclass(found, Enum)):
                return found
        elif module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        elif (module, name) in _PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the index of a checkpoint has no business with {module}.{name}")


_PLAIN = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
