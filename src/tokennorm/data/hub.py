"""Data sets of the library ``datasets``: from the hub, from ``save_to_disk``, from tables on disk."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokennorm.data.documents import Document, parse_row
from tokennorm.errors import DataError, MissingDependencyError

__all__ = [
    "looks_like_an_id",
    "parse_dataset",
    "parse_table_row",
    "read_hub",
    "read_saved",
    "read_tables",
    "used_columns",
]

_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")
_FILE_ENDINGS = (".json", ".jsonl", ".txt", ".md", ".parquet", ".csv", ".arrow")
_KEYS = ("messages", "tools", "text", "functions", "documents")


def looks_like_an_id(text: str) -> bool:
    """Whether ``text`` can be an id of the hub: ``owner/name``, ``owner/name:split`` or ``...:config:split``."""
    name = text.partition(":")[0]
    return _ID.fullmatch(text) is not None and not name.startswith(".") and not name.endswith(_FILE_ENDINGS)


def read_hub(identifier: str, *, streaming: bool = False) -> Any:
    """Load one split of a data set of the hub; ``streaming``: rows are fetched when asked for.

    Raises:
        DataError: no such data set, configuration or split, or no connection.
    """
    datasets = _library()
    name, *rest = identifier.split(":")
    config, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else "train")
    try:
        return datasets.load_dataset(name, config, split=split, **_streamed(streaming))
    except Exception as error:  # the library raises many kinds: files, network, values
        raise DataError(
            f"can't load {name} (configuration {config or 'default'}, split {split}) from the Hugging Face hub: "
            f"{_first_line(error)}",
            why=f"there is no local file or folder {identifier!r}, so the hub was asked",
            fix="check the id and the connection, name configuration and split as owner/name:configuration:split, "
            "or name a local file or folder",
        ) from error


def read_saved(folder: Path, split: str | None) -> Any:
    """Load what ``save_to_disk`` wrote; of several splits the named one, by default ``train``.

    Raises:
        DataError: damaged, or without that split.
    """
    datasets = _library()
    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"can't load the data set in {folder}: {_first_line(error)}") from error
    if isinstance(found, Mapping):
        wanted = split or "train"
        if wanted not in found:
            raise DataError(
                f"the data set in {folder} has no split {wanted!r} (splits: {', '.join(found)})",
                fix=f"name one of them: {folder}:{next(iter(found), 'SPLIT')}",
            )
        return found[wanted]
    if split is not None:
        raise DataError(f"the data set in {folder} is one split, not {split!r}", fix=f"name {folder} alone")
    return found


def read_tables(files: Sequence[Path], ending: str, *, streaming: bool = False) -> Any:
    """Load ``.parquet``, ``.csv`` or ``.arrow`` files as one data set; ``streaming``: they are read row by row.

    Raises:
        DataError: damaged, or with different columns.
    """
    datasets = _library()
    try:
        return datasets.load_dataset(
            ending.lstrip("."), data_files=[str(file) for file in files], split="train", **_streamed(streaming)
        )
    except Exception as error:
        raise DataError(f"can't load {files[0]} as a table: {_first_line(error)}") from error


def parse_dataset(dataset: Iterable[Mapping[str, Any]], name: str) -> tuple[list[Document], list[DataError]]:
    """Documents of the rows, and an error for each bad one, named ``<name>:<row>`` from 0."""
    documents: list[Document] = []
    errors: list[DataError] = []
    for number, row in enumerate(used_columns(dataset)):
        try:
            documents.append(parse_table_row(row, f"{name}:{number}"))
        except DataError as error:
            errors.append(error)
    return documents, errors


def used_columns(dataset: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The rows without the columns that nothing is made of: images, for instance, would be decoded for nothing."""
    columns = getattr(dataset, "column_names", None)
    if columns is None or not hasattr(dataset, "select_columns"):
        return dataset
    used = [column for column in columns if column in _KEYS]
    return dataset.select_columns(used) if used else dataset  # pyright: ignore[reportAttributeAccessIssue]


def parse_table_row(row: Mapping[str, Any], source: str) -> Document:
    """A row of a table; what a table can't hold is refused.

    Raises:
        DataError: as for a JSONL row, or tools and arguments in columns that fill missing keys with null.
    """
    if isinstance(row.get("messages"), list | tuple):
        for index, message in enumerate(row["messages"]):
            if isinstance(message, Mapping) and _has_null_keys(message.get("tool_calls"), inside="arguments"):
                raise _filled(f"{source}: message {index}: the arguments of a tool call")
    if _has_null_keys(row.get("tools"), inside=None):
        raise _filled(f"{source}: tools")
    return parse_row(row, source)


def _has_null_keys(value: Any, *, inside: str | None) -> bool:
    """Whether an object in ``value`` (below the key ``inside``) has a key whose value is null."""
    if isinstance(value, Mapping):
        return any(
            (inside is None and item is None) or _has_null_keys(item, inside=None if key == inside else inside)
            for key, item in value.items()
        )
    return isinstance(value, list | tuple) and any(_has_null_keys(item, inside=inside) for item in value)


def _filled(what: str) -> DataError:
    return DataError(
        f"{what} hold keys whose value is null",
        why="a table gives every row the keys of all rows, and null for those that the row does not have; they "
        "would be rendered as if the data said so",
        fix="store tools and arguments as JSON text (json.dumps) in the table",
    )


def _streamed(streaming: bool) -> dict[str, bool]:
    return {"streaming": True} if streaming else {}


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingDependencyError(
            "Hugging Face data sets need the library datasets", fix='install it: pip install "tokennorm[data]"'
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
