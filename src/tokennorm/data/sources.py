"""Where documents come from: JSONL, plain text, Hugging Face data sets, files and folders of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.documents import Document, TextDocument
from tokennorm.data.hub import parse_dataset, read_hub, read_saved, read_tables
from tokennorm.data.jsonl import parse_jsonl, read_text
from tokennorm.data.locating import locate
from tokennorm.errors import DataError

__all__ = ["SourceRows", "read_source"]

Parsed = tuple[list[Document], list[DataError]]


@dataclass(frozen=True, kw_only=True)
class SourceRows:
    """The documents of one source, in its order, and the errors of rows that were left out.

    Attributes:
        documents: at least one.
        errors: one for each bad row that :class:`~tokennorm.data.BadRows` let pass.
        where: the source, as it was named.
    """

    documents: list[Document]
    errors: list[DataError]
    where: str

    @property
    def num_rows(self) -> int:
        """Rows of the source, bad ones included."""
        return len(self.documents) + len(self.errors)


def read_source(path: str | PathLike[str], *, bad_rows: BadRows | None = None) -> SourceRows:
    """Read all documents of a source.

    Args:
        path: one of

            * a ``.jsonl`` file, or a folder with some (all of them, sorted by name): chats (``messages``, and
              ``tools`` where there are any) or ``text``;
            * a ``.txt`` or ``.md`` file, or a folder with ``.txt`` files: each file is one document;
            * a folder written by ``datasets``' ``save_to_disk``, or one with ``.parquet`` or ``.csv`` files;
            * an id of the Hugging Face hub, ``owner/name``.

            The last two may end in ``:split`` or ``:configuration:split``; the split is ``train`` by default.
        bad_rows: what becomes of rows that can't be read; by default they are an error.

    Raises:
        DataError: nothing there, nothing readable, or too many bad rows.
        MissingDependencyError: a source that needs the library ``datasets``.
    """
    bad_rows = bad_rows or BadRows()
    where = str(path)
    documents, errors = _parse(where)
    bad_rows.settle(errors, len(documents) + len(errors), where)
    if not documents:
        raise DataError(f"{where} holds no row that can be used", fix="give it at least one chat or text")
    return SourceRows(documents=documents, errors=errors, where=where)


def _parse(where: str) -> Parsed:
    found = locate(where)
    if found.kind == "hub":
        return parse_dataset(read_hub(where), found.name)
    if found.kind == "saved":
        return parse_dataset(read_saved(found.files[0], found.split), found.name)
    if found.kind == "tables":
        return parse_dataset(read_tables(found.files, found.files[0].suffix.lower()), found.name)
    return _parse_each(found.files, _parse_text if found.kind == "text" else parse_jsonl)


def _parse_each(files: Sequence[Path], parse: Callable[[Path], Parsed]) -> Parsed:
    documents: list[Document] = []
    errors: list[DataError] = []
    for file in files:
        good, bad = parse(file)
        documents += good
        errors += bad
    return documents, errors


def _parse_text(path: Path) -> Parsed:
    text = read_text(path)
    try:
        return [TextDocument(text=text, source=path.name)], []
    except DataError as error:
        return [], [error]
