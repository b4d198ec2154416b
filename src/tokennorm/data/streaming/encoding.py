"""Rows encoded ahead, in the order in which they were drawn."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any

from tokennorm.data.encoding import DocumentEncoder, EncodedDocument, EncodeSettings
from tokennorm.data.streaming.reader import Drawn
from tokennorm.data.streaming.row import StreamRow
from tokennorm.data.workers import encode_part, start_worker, with_tensors
from tokennorm.errors import DataError

__all__ = ["RowEncoder", "encode_ahead"]

ROWS_PER_TASK = 32
TASKS_PER_WORKER = 2


class RowEncoder:
    """Parses and encodes rows; one that can't be used comes back with its error.

    Args:
        tokenizer: a Hugging Face tokenizer.
        settings: lengths and turns.
    """

    def __init__(self, tokenizer: Any, settings: EncodeSettings) -> None:
        self._encoder = DocumentEncoder(tokenizer, settings)

    def encode(self, row: StreamRow) -> EncodedDocument:
        """Encode one row.

        Raises:
            DataError: the tokenizer can't encode such rows at all.
        """
        try:
            document = row.parse()
        except DataError as error:
            return EncodedDocument(source=row.source, error=error)
        self._encoder.check([document])
        return self._encoder.encode(document)


def encode_ahead(
    rows: Iterator[Drawn],
    tokenizer: Any,
    settings: EncodeSettings,
    *,
    workers: int = 0,
    rows_per_task: int = ROWS_PER_TASK,
) -> Iterator[tuple[Drawn, EncodedDocument]]:
    """Each row and what it came to, in order; the same for any number of workers.

    Args:
        rows: may be endless.
        tokenizer: a Hugging Face tokenizer; each worker gets a copy.
        settings: lengths and turns.
        workers: processes that work on the next rows meanwhile, two tasks each; 0: a row is encoded when it is
            asked for. They are started afresh, and end with the iteration.
        rows_per_task: what a worker takes at a time.

    Raises:
        DataError: the tokenizer can't encode such rows at all, or a worker died.
    """
    if workers == 0:
        encoder = RowEncoder(tokenizer, settings)
        for drawn in rows:
            yield drawn, encoder.encode(drawn.row)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (RowEncoder, tokenizer, settings))
    tasks: deque[tuple[list[Drawn], Future[list[EncodedDocument]]]] = deque()
    try:
        while True:
            while len(tasks) < workers * TASKS_PER_WORKER and (part := list(islice(rows, rows_per_task))):
                tasks.append((part, pool.submit(encode_part, [drawn.row for drawn in part])))
            if not tasks:
                return
            part, future = tasks.popleft()
            yield from zip(part, map(with_tensors, future.result()), strict=True)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that encodes rows has died",
            why="mostly because the machine has no memory left for it",
            fix="use fewer workers, or none",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
