"""What a source gives: chats, or plain text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokennorm.data.conversation import Conversation
from tokennorm.errors import DataError

__all__ = ["Document", "TextDocument", "parse_row"]

# Keys of a row that change what the template renders: ignoring them would train on another text.
REFUSED_KEYS = ("functions", "documents")


@dataclass(frozen=True, kw_only=True)
class TextDocument:
    """Plain text: every token is supervised.

    Args:
        text: not empty.
        source: where it comes from, named in every error about it.

    Raises:
        DataError: no text, or text that no tokenizer can encode.
    """

    text: str
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            kind = "null" if self.text is None else f"a {type(self.text).__name__}"
            raise DataError(f"{self.source}: text is {kind}, not text")
        if not self.text.strip():
            raise DataError(f"{self.source}: the text is empty", fix="remove the row or the file")
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.source}: the text holds half a surrogate pair at character {error.start}",
                why="no tokenizer can encode it",
                fix="write the file as UTF-8 and check how the text was cut",
            ) from error


Document = Conversation | TextDocument


def parse_row(row: Mapping[str, Any], source: str) -> Document:
    """A row of a table or of a JSONL file: ``messages`` (and ``tools``), else ``text``; other keys are ignored.

    Raises:
        DataError: neither is there, or what is there is no chat and no text.
    """
    refused = [key for key in REFUSED_KEYS if row.get(key)]
    if refused:
        raise DataError(
            f"{source}: the row has {', '.join(refused)}, which tokennorm does not render",
            why="the model would be trained on a prompt without them",
        )
    if "messages" in row:
        return Conversation(messages=row["messages"], source=source, tools=row.get("tools"))
    if "text" in row:
        return TextDocument(text=row["text"], source=source)
    raise DataError(
        f"{source}: no key messages and no key text (keys: {', '.join(map(str, row)) or 'none'})",
        fix='write {"messages": [{"role": "user", "content": "..."}, ...]}, or {"text": "..."}',
    )
