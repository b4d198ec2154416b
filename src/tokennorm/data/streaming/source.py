"""A source that is read row by row, as often as somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from tokennorm.data.hub import read_hub, read_saved, read_tables, used_columns
from tokennorm.data.jsonl import check_file
from tokennorm.data.locating import Located, locate
from tokennorm.data.streaming.row import StreamRow
from tokennorm.errors import DataError

__all__ = ["StreamSource"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HEAD_ROWS = 100


class StreamSource:
    """The rows of a source, read while they are asked for.

    Args:
        path: as for :func:`~tokennorm.data.read_source`. Tables and hub ids are streamed by the library
            ``datasets``; what ``save_to_disk`` wrote is mapped into memory.

    Raises:
        DataError: nothing there.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.where = str(path)
        self._located: Located = locate(self.where)
        if self._located.kind in ("jsonl", "text", "tables"):
            for file in self._located.files:
                check_file(file)
        self._table: Any = None

    def __iter__(self) -> Iterator[StreamRow]:
        """One pass over the rows, in the order in which they lie there.

        Raises:
            DataError: something can't be read.
        """
        if self._located.kind == "jsonl":
            return (row for file in self._located.files for row in _lines(file))
        if self._located.kind == "text":
            return (StreamRow(file.name, file) for file in self._located.files)
        return self._table_rows()

    def facts(self) -> dict[str, Any]:
        """What can be known of the content without reading it all: files, bytes, digest of the first rows."""
        digest, rows = b"", iter(self)
        for row in islice(rows, _HEAD_ROWS):
            digest = row.digest_after(digest)
        _close(rows)
        files = [
            file
            for path in self._located.files
            for file in ([path] if path.is_file() else sorted(path.rglob("*")))
            if file.is_file()
        ]
        known = {"files": len(files), "bytes": sum(file.stat().st_size for file in files)} if files else {}
        return {**known, "head": digest.hex()}

    def _table_rows(self) -> Iterator[StreamRow]:
        if self._table is None:
            self._table = used_columns(self._open_table())
        rows, number = iter(self._table), 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # the library raises many kinds: files, network, formats
                raise DataError(
                    f"{self.where}: row {number} can't be read: {type(error).__name__}: {error}"
                ) from error
            yield StreamRow(f"{self._located.name}:{number}", row)
            number += 1

    def _open_table(self) -> Any:
        found = self._located
        if found.kind == "hub":
            return read_hub(found.where, streaming=True)
        if found.kind == "saved":
            return read_saved(found.files[0], found.split)
        return read_tables(found.files, found.files[0].suffix.lower(), streaming=True)


def _lines(path: Path) -> Iterator[StreamRow]:
    try:
        with path.open("rb") as file:
            # Bytes are split at b"\n" alone: U+2028 and its like are legal inside JSON strings.
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                if content.strip():
                    yield StreamRow(f"{path.name}:{number}", content.rstrip(b"\r\n"))
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error


def _close(rows: Iterator[StreamRow]) -> None:
    close = getattr(rows, "close", None)
    if close is not None:
        close()
