"""Encoded documents on disk, found again by their content."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokennorm.data.documents import Document, TextDocument
from tokennorm.data.encoding import EncodedDocument, EncodeSettings, Progress
from tokennorm.data.template_date import can_hold_date, shows_date
from tokennorm.data.workers import encode_in_workers
from tokennorm.errors import DataError

__all__ = [
    "cache_folder",
    "cache_key",
    "default_cache_folder",
    "encode_cached",
    "encoding_fingerprint",
    "load_encoded",
    "save_encoded",
]

# Raise it when the same documents would be encoded in another way.
ENCODING_VERSION = 1


def cache_folder() -> Path:
    """Folder of what can be made again: ``$TOKENNORM_CACHE``, else ``tokennorm`` in the user's cache."""
    if own := os.environ.get("TOKENNORM_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tokennorm"


def default_cache_folder() -> Path:
    """Where encoded documents are kept: ``encoded`` in :func:`cache_folder`."""
    return cache_folder() / "encoded"


def encode_cached(
    documents: Sequence[Document],
    tokenizer: Any,
    settings: EncodeSettings,
    *,
    folder: Path | None,
    workers: int = 0,
    progress: Progress | None = None,
) -> list[EncodedDocument]:
    """Encode documents, or find them encoded: the same documents, tokenizer, template and settings.

    Several processes may call it together: one encodes, the others wait and read. A damaged file is encoded again.

    Args:
        documents: at least one.
        tokenizer: a Hugging Face tokenizer.
        settings: lengths and turns.
        folder: of the cache; None: no cache.
        workers: processes that encode; 0: this one alone.
        progress: called with (done, total) now and then.

    Raises:
        DataError: the tokenizer can't encode such documents at all.
    """
    if folder is None:
        return encode_in_workers(documents, tokenizer, settings, workers=workers, progress=progress)
    path = folder / f"{cache_key(documents, tokenizer, settings)}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _warn(f"no cache of encoded data in {folder}: {error}")
        return encode_in_workers(documents, tokenizer, settings, workers=workers, progress=progress)
    with _locked(path.with_suffix(".lock")):
        if (found := load_encoded(path)) is not None:
            return found
        encoded = encode_in_workers(documents, tokenizer, settings, workers=workers, progress=progress)
        try:
            save_encoded(path, encoded)
        except OSError as error:
            _warn(f"the encoded data could not be kept in {path}: {error}")
    return encoded


def cache_key(documents: Sequence[Document], tokenizer: Any, settings: EncodeSettings) -> str:
    """Hash of all that decides the tokens and masks of these documents, and of the names that they carry."""
    what = {
        **_encoding_facts(tokenizer, settings),
        "libraries": [_version("transformers"), _version("tokenizers")],
        "day": _day(tokenizer, settings),
    }
    digest = hashlib.sha256(_canonical(what).encode())
    for document in documents:
        content: Any = (
            [document.source, document.text]
            if isinstance(document, TextDocument)
            else [document.source, list(document.messages), document.tools]
        )
        digest.update(_canonical(content).encode() + b"\n")
    return digest.hexdigest()[:32]


def encoding_fingerprint(tokenizer: Any, settings: EncodeSettings) -> str:
    """Hash of tokenizer, template and settings: what makes tokens and masks of documents not read yet."""
    facts, day = _encoding_facts(tokenizer, settings), _day(tokenizer, settings)
    # Left out where it decides nothing, as it always was.
    facts |= {} if day is None else {"day": day}
    return hashlib.sha256(_canonical(facts).encode()).hexdigest()[:16]


def save_encoded(path: Path, encoded: Sequence[EncodedDocument]) -> None:
    """Write the documents completely or not at all.

    Raises:
        OSError: the disk is full or can't be written.
    """
    from safetensors.torch import save

    pieces = [piece for document in encoded for piece in document.pieces]
    facts = [
        [
            document.source,
            len(document.pieces),
            document.truncated,
            document.lost,
            document.without_end,
            document.special_text,
            None if (error := document.error) is None else [error.what, error.why, error.fix],
        ]
        for document in encoded
    ]
    tensors = {
        "ids": torch.cat([torch.empty(0, dtype=torch.int32), *(ids.to(torch.int32) for ids, _ in pieces)]),
        "supervised": torch.cat([torch.empty(0, dtype=torch.bool), *(mask for _, mask in pieces)]),
        "lengths": torch.tensor([len(ids) for ids, _ in pieces], dtype=torch.int64),
        "facts": torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8),
    }
    tensors["digest"] = _digest(tensors)
    # The same folder, so that the last step is a rename.
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}-", delete=False) as file:
        try:
            file.write(save(tensors))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise


def load_encoded(path: Path) -> list[EncodedDocument] | None:
    """Read what :func:`save_encoded` wrote; None where there is nothing, or nothing that can be trusted."""
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
    except FileNotFoundError:
        return None
    except Exception as error:  # cut off, another format, unreadable
        _warn(f"{path} can't be read and is made again: {type(error).__name__}: {error}")
        return None
    if "digest" not in tensors or not torch.equal(tensors.pop("digest"), _digest(tensors)):
        _warn(f"{path} is damaged and is made again")
        return None
    lengths: list[int] = tensors["lengths"].tolist()
    # Clones, so that no sample holds on to the whole file.
    ids = iter([part.to(torch.int64) for part in tensors["ids"].split(lengths)])
    masks = iter([part.clone() for part in tensors["supervised"].split(lengths)])
    return [
        EncodedDocument(
            source=source,
            pieces=tuple((next(ids), next(masks)) for _ in range(count)),
            truncated=truncated,
            lost=lost,
            without_end=without_end,
            special_text=special,
            error=None if error is None else DataError(error[0], why=error[1], fix=error[2]),
        )
        for source, count, truncated, lost, without_end, special, error in json.loads(
            tensors["facts"].numpy().tobytes()
        )
    ]


def _encoding_facts(tokenizer: Any, settings: EncodeSettings) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "version": ENCODING_VERSION,
        "tokenizer": backend.to_str() if backend is not None else repr(tokenizer),
        "special": [str(tokenizer.special_tokens_map), tokenizer.eos_token_id],
        "template": getattr(tokenizer, "chat_template", None),
        "settings": [settings.max_length, settings.turns, _canonical(dict(settings.template_options))],
    }


def _day(tokenizer: Any, settings: EncodeSettings) -> str | None:
    """The day that the template shows, None when it shows none."""
    if not shows_date(tokenizer):
        return None
    # What can't be held to a date shows today's beside it.
    today = None if settings.date is not None and can_hold_date(tokenizer) else time.strftime("%Y-%m-%d")
    return " ".join(day for day in (settings.date, today) if day is not None)


def _digest(tensors: dict[str, Tensor]) -> Tensor:
    digest = hashlib.sha256()
    for name in ("ids", "supervised", "lengths", "facts"):
        tensor = tensors.get(name, torch.empty(0))
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time, where the file system can lock; else all work, and the last one's file stays."""
    try:
        import fcntl
    except ImportError:  # not on this system
        yield
        return
    with path.open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)
