"""One row of a source that is streamed, as it lies there: not parsed yet."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.data.documents import Document, TextDocument
from tokennorm.data.hub import parse_table_row
from tokennorm.data.jsonl import parse_line, read_text
from tokennorm.errors import DataError

__all__ = ["StreamRow"]

# Of a text file: a whole book need not be read to see that it is another one.
HEAD_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class StreamRow:
    """A row and where it comes from. It travels to worker processes.

    Attributes:
        source: file and line, named in every error about it.
        content: the bytes of a JSON line, the path of a text file, or a row of a table.
    """

    source: str
    content: bytes | Path | Mapping[str, Any]

    def parse(self) -> Document:
        """The chat or text.

        Raises:
            DataError: there is none in it.
        """
        if isinstance(self.content, bytes):
            try:
                line = self.content.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{self.source}: not UTF-8 ({error.reason})", fix="save the file as UTF-8"
                ) from error
            return parse_line(line, self.source)
        if isinstance(self.content, Path):
            return TextDocument(text=read_text(self.content), source=self.source)
        return parse_table_row(self.content, self.source)

    def digest_after(self, before: bytes) -> bytes:
        """Digest of this row and all before it, 16 bytes. Of a text file its name, size and head count."""
        digest = hashlib.blake2b(before, digest_size=16)
        if isinstance(self.content, bytes):
            digest.update(self.content)
        elif isinstance(self.content, Path):
            digest.update(f"{self.content.name} {self.content.stat().st_size} ".encode())
            with self.content.open("rb") as file:
                digest.update(file.read(HEAD_BYTES))
        else:
            digest.update(json.dumps(self.content, sort_keys=True, default=str).encode())
        return digest.digest()
