"""Chats from a JSONL file: one ``{"messages": [...]}`` per line."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from tokennorm.data.conversation import Conversation
from tokennorm.errors import DataError

__all__ = ["read_jsonl"]

SHOWN_ERRORS = 5
# Keys of a row that change what the template renders: ignoring them would train on another text.
REFUSED_KEYS = ("tools", "functions", "documents")


def read_jsonl(path: str | PathLike[str]) -> list[Conversation]:
    """Read every conversation of a UTF-8 file; blank lines are skipped.

    A bad row is an error here, before any other work: the message lists the first few with their line numbers.
    Keys of a row other than ``messages`` (an id, a source) are ignored, except ``tools``, ``functions`` and
    ``documents``, which would change the rendered chat.

    Returns:
        The conversations in the order of the file; ``source`` is ``<file name>:<line>``.

    Raises:
        DataError: the file is missing, unreadable or holds no row, or any row is bad.
    """
    path = Path(path)
    conversations: list[Conversation] = []
    errors: list[DataError] = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            conversations.append(_parse(line, f"{path.name}:{number}"))
        except DataError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        shown = [f"  {error.what}" for error in errors[:SHOWN_ERRORS]]
        if len(errors) > SHOWN_ERRORS:
            shown.append(f"  and {len(errors) - SHOWN_ERRORS} more")
        raise DataError(
            f"{len(errors)} bad rows of {len(errors) + len(conversations)} in {path}:\n" + "\n".join(shown),
            why=errors[0].why,
            fix=errors[0].fix or "correct or remove these rows",
        )
    if not conversations:
        raise DataError(
            f"{path} holds no row",
            fix='write one {"messages": [{"role": "user", "content": "..."}, ...]} per line',
        )
    return conversations


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise DataError(f"no file {path}", fix="check the path; a relative one starts at the working folder")
    if not path.is_file():
        raise DataError(f"{path} is not a file", fix="name one JSONL file")
    try:
        # utf-8-sig: a byte-order mark that some editors write is no part of the first row.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name}:{line}: not UTF-8 ({error.reason})", fix="save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error
    # Not splitlines(): U+2028 and its like are legal inside JSON strings.
    return text.split("\n")


def _parse(line: str, source: str) -> Conversation:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{source}: not JSON: {error.msg} at column {error.colno}", fix="write one JSON object per line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{source}: the row is a {type(row).__name__}, not an object", fix="one JSON object per line"
        )
    refused = [key for key in REFUSED_KEYS if row.get(key)]
    if refused:
        raise DataError(
            f"{source}: the row has {', '.join(refused)}, which tokennorm does not render",
            why="the model would be trained on a prompt without them",
        )
    if "messages" not in row:
        raise DataError(
            f"{source}: no key messages (keys: {', '.join(row) or 'none'})",
            fix='write {"messages": [{"role": "user", "content": "..."}, ...]} on each line',
        )
    return Conversation(messages=row["messages"], source=source)
