"""What the name of a source stands for: files and their kind, a saved data set, an id of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokennorm.data.hub import looks_like_an_id
from tokennorm.errors import DataError

__all__ = ["Located", "locate"]

TEXT_ENDINGS = (".txt", ".md", ".text")
TABLE_ENDINGS = (".parquet", ".csv", ".arrow")


@dataclass(frozen=True, kw_only=True)
class Located:
    """A source that was found.

    Attributes:
        kind: what its rows are read from.
        where: the source, as it was named.
        name: what the rows of a table are named after.
        files: the files, sorted by name; of ``saved`` the folder; none of ``hub``.
        split: of a saved data set, where one is named.
    """

    kind: Literal["jsonl", "text", "saved", "tables", "hub"]
    where: str
    name: str
    files: tuple[Path, ...] = ()
    split: str | None = None


def locate(where: str) -> Located:
    """Find a source; :func:`~tokennorm.data.read_source` lists what it can be. Nothing is read yet.

    Raises:
        DataError: a folder without data or with several kinds of it, or a split where there is none. A file that
            is not there is found when it is read.
    """
    path, split = Path(where).expanduser(), None
    if not path.exists() and ":" in where:
        name, _, split = where.partition(":")
        path = Path(name).expanduser()
    if path.is_dir():
        return _locate_folder(where, path, split)
    if split is not None and path.is_file():
        raise DataError(f"{path} is one file, it has no split {split!r}", fix="name the file alone")
    if not path.exists() and looks_like_an_id(where):
        return Located(kind="hub", where=where, name=where)
    ending = path.suffix.lower()
    kind = "text" if ending in TEXT_ENDINGS else "tables" if ending in TABLE_ENDINGS else "jsonl"
    return Located(kind=kind, where=where, name=path.name, files=(path,))


def _locate_folder(where: str, folder: Path, split: str | None) -> Located:
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return Located(kind="saved", where=where, name=folder.name, files=(folder,), split=split)
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
    kind = "jsonl" if ending == ".jsonl" else "text" if ending == ".txt" else "tables"
    return Located(kind=kind, where=where, name=folder.name, files=tuple(files))
