"""Where documents come from: JSONL, plain text, Hugging Face data sets, files and folders of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.documents import Document, TextDocument
from tokennorm.data.hub import looks_like_an_id, parse_dataset, read_hub, read_saved, read_tables
from tokennorm.data.jsonl import parse_jsonl, read_text
from tokennorm.errors import DataError

__all__ = ["SourceRows", "read_source"]

TEXT_ENDINGS = (".txt", ".md", ".text")
TABLE_ENDINGS = (".parquet", ".csv", ".arrow")
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
    path, split = Path(where).expanduser(), None
    if not path.exists() and ":" in where:
        name, _, split = where.partition(":")
        path = Path(name).expanduser()
    if path.is_dir():
        return _parse_folder(path, split)
    if split is not None and path.is_file():
        raise DataError(f"{path} is one file, it has no split {split!r}", fix="name the file alone")
    if not path.exists() and looks_like_an_id(where):
        return parse_dataset(read_hub(where), where)
    if path.suffix.lower() in TEXT_ENDINGS:
        return _parse_each([path], _parse_text)
    if path.suffix.lower() in TABLE_ENDINGS:
        return parse_dataset(read_tables([path], path.suffix.lower()), path.name)
    return parse_jsonl(path)


def _parse_folder(folder: Path, split: str | None) -> Parsed:
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return parse_dataset(read_saved(folder, split), folder.name)
    found = {
        ending: files
        for ending in (".jsonl", ".txt", *TABLE_ENDINGS)
        if (files := sorted(file for file in folder.iterdir() if file.suffix.lower() == ending and file.is_file()))
    }
    if not found:
        raise DataError(
            f"the folder {folder} holds no data: no .jsonl, .txt, .parquet or .csv file, and nothing that "
            "save_to_disk wrote",
            fix="name the folder that the files lie in",
        )
    if len(found) > 1:
        counts = ", ".join(f"{len(files)} {ending}" for ending, files in found.items())
        raise DataError(
            f"the folder {folder} holds files of several kinds: {counts}",
            why="some would be left out silently",
            fix="put each kind into a folder of its own, and name both as a mixture",
        )
    ((ending, files),) = found.items()
    if split is not None:
        raise DataError(f"{folder} is a folder of {ending} files, it has no split {split!r}")
    if ending == ".jsonl":
        return _parse_each(files, parse_jsonl)
    if ending == ".txt":
        return _parse_each(files, _parse_text)
    return parse_dataset(read_tables(files, ending), folder.name)


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
