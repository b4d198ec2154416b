"""Documents encoded in worker processes, in the order in which they were given."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from tokennorm.data.documents import Document
from tokennorm.data.encoding import (
    DocumentEncoder,
    EncodedDocument,
    EncodeSettings,
    Progress,
    encode_documents,
)

__all__ = ["encode_in_workers", "encode_part", "start_worker", "with_tensors"]

DOCUMENTS_PER_TASK = 200

_encoder: Any = None


def encode_in_workers(
    documents: Sequence[Document],
    tokenizer: Any,
    settings: EncodeSettings,
    *,
    workers: int,
    progress: Progress | None = None,
    documents_per_task: int = DOCUMENTS_PER_TASK,
) -> list[EncodedDocument]:
    """Encode every document, in order; the result does not depend on the number of workers.

    Args:
        documents: at least one.
        tokenizer: a Hugging Face tokenizer; each worker gets a copy.
        settings: lengths and turns.
        workers: processes; 0 or 1: this one alone. They are started afresh (not forked: tokenizers have threads),
            so a script that calls this needs ``if __name__ == "__main__":``.
        progress: called with (done, total) now and then.
        documents_per_task: what a worker takes at a time.

    Raises:
        DataError: the tokenizer can't encode such documents at all.
    """
    tasks = [
        documents[start : start + documents_per_task] for start in range(0, len(documents), documents_per_task)
    ]
    workers = min(workers, len(tasks))
    if workers <= 1:
        return encode_documents(documents, tokenizer, settings, progress=progress)
    # Here, so that a tokenizer that can't do it at all is an error before any process is started.
    DocumentEncoder(tokenizer, settings).check(documents)
    encoded: list[EncodedDocument] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, start_worker, (DocumentEncoder, tokenizer, settings)) as pool:
        for part in pool.map(encode_part, tasks):
            encoded += [with_tensors(document) for document in part]
            if progress is not None:
                progress(len(encoded), len(documents))
    return encoded


def start_worker(kind: Callable[[Any, EncodeSettings], Any], tokenizer: Any, settings: EncodeSettings) -> None:
    """Make a process ready for :func:`encode_part`: one thread, and an encoder of this kind."""
    global _encoder
    torch.set_num_threads(1)
    _encoder = kind(tokenizer, settings)


def encode_part(documents: Sequence[Any]) -> list[EncodedDocument]:
    """Encode in a worker; :func:`with_tensors` makes of each what its encoder returned."""
    assert _encoder is not None
    # Arrays travel as bytes, tensors through shared memory, of which there may be little.
    return [_with_arrays(_encoder.encode(document)) for document in documents]


def _with_arrays(document: EncodedDocument) -> EncodedDocument:
    return _replaced(document, tuple((ids.numpy(), mask.numpy()) for ids, mask in document.pieces))


def with_tensors(document: EncodedDocument) -> EncodedDocument:
    """A document that came from a worker, as its encoder made it."""
    return _replaced(document, tuple((torch.tensor(ids), torch.tensor(mask)) for ids, mask in document.pieces))


def _replaced(document: EncodedDocument, pieces: Any) -> EncodedDocument:
    return EncodedDocument(
        source=document.source,
        pieces=pieces,
        truncated=document.truncated,
        lost=document.lost,
        without_end=document.without_end,
        special_text=document.special_text,
        error=document.error,
    )
