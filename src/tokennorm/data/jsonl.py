"""Rows of a JSONL file: one ``{"messages": [...]}`` or ``{"text": ...}`` per line."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from tokennorm.data.bad_rows import BadRows
from tokennorm.data.conversation import Conversation
from tokennorm.data.documents import Document, parse_row
from tokennorm.errors import DataError

__all__ = ["check_file", "parse_jsonl", "parse_line", "read_jsonl", "read_text"]


def read_jsonl(path: str | PathLike[str]) -> list[Conversation]:
    """Read every conversation of a UTF-8 file; blank lines are skipped.

    A bad row is an error here, before any other work: the message lists the first few with their line numbers.
    Keys of a row other than ``messages`` and ``tools`` (an id, a source) are ignored, except ``functions`` and
    ``documents``, which would change the rendered chat.

    Returns:
        The conversations in the order of the file; ``source`` is ``<file name>:<line>``.

    Raises:
        DataError: the file is missing, unreadable or holds no row, or any row is bad or is not a chat.
    """
    documents, errors = parse_jsonl(path)
    chats = [document for document in documents if isinstance(document, Conversation)]
    errors += [
        DataError(f"{document.source}: the row is plain text, a chat is needed here", fix='give it "messages"')
        for document in documents
        if not isinstance(document, Conversation)
    ]
    BadRows().settle(errors, len(errors) + len(chats), str(path))
    return chats


def parse_jsonl(path: str | PathLike[str]) -> tuple[list[Document], list[DataError]]:
    """Read every row of a UTF-8 file: the good ones, and an error with file and line for each bad one.

    Raises:
        DataError: the file is missing, unreadable or holds no row.
    """
    path = Path(path)
    documents: list[Document] = []
    errors: list[DataError] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            documents.append(parse_line(line, f"{path.name}:{number}"))
        except DataError as error:
            errors.append(error)
    if not documents and not errors:
        raise DataError(
            f"{path} holds no row",
            fix='write one {"messages": [{"role": "user", "content": "..."}, ...]} per line',
        )
    return documents, errors


def check_file(path: Path) -> None:
    """Check that a file is there.

    Raises:
        DataError: it is missing, or no file.
    """
    if not path.exists():
        raise DataError(f"no file {path}", fix="check the path; a relative one starts at the working folder")
    if not path.is_file():
        raise DataError(f"{path} is not a file", fix="name one file")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        DataError: missing, no file, or not UTF-8; the line is named.
    """
    check_file(path)
    try:
        # utf-8-sig: a byte-order mark that some editors write is no part of the first row.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name}:{line}: not UTF-8 ({error.reason})", fix="save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error


def _lines(path: Path) -> list[str]:
    # Not splitlines(): U+2028 and its like are legal inside JSON strings.
    return read_text(path).split("\n")


def parse_line(line: str, source: str) -> Document:
    """The document of one line.

    Raises:
        DataError: no JSON object, or no chat and no text in it.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{source}: not JSON: {error.msg} at column {error.colno}", fix="write one JSON object per line"
        ) from error
    except RecursionError as error:
        raise DataError(f"{source}: JSON that is nested too deeply") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{source}: the row is a {type(row).__name__}, not an object", fix="one JSON object per line"
        )
    return parse_row(row, source)
