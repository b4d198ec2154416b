"""The file of the target's answers: one JSON object per line, and beside it what it was made with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tokennorm.errors import ConfigError, DataError

__all__ = ["Answer", "manifest_path", "open_manifest", "read_answers"]

Finish = Literal["stop", "length"]

# What each key of a manifest is called in a message about it.
MANIFEST_KEYS = {
    "target": "target model",
    "tokenizer": "tokenizer",
    "prompts": "set of prompts",
    "num_prompts": "number of prompts",
    "max_new_tokens": "max_new_tokens",
    "stop_token_ids": "stop tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "batch_size": "batch_size",
    "dtype": "precision of the target",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One prompt and what the target answered.

    Attributes:
        id: of the prompt.
        group: of the prompt.
        task: of the prompt.
        held_out: of the prompt: for evaluation only.
        messages: the chat, the answer (without its end token) as the last message.
        prompt_ids: what the target was given, the beginning of its turn included.
        answer_ids: what it wrote, with the end token where it wrote one.
        finish: ``stop`` when the last token is a stop token, ``length`` when it was cut at max_new_tokens.
    """

    id: str
    group: str
    task: str
    held_out: bool
    messages: tuple[dict[str, str], ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish: Finish

    def to_line(self) -> str:
        """Return the answer as it stands in the file, the line break included."""
        row = {
            "id": self.id,
            "group": self.group,
            "task": self.task,
            "held_out": self.held_out,
            "messages": list(self.messages),
            "prompt_ids": list(self.prompt_ids),
            "answer_ids": list(self.answer_ids),
            "finish": self.finish,
        }
        return json.dumps(row) + "\n"


def read_answers(path: str | os.PathLike[str]) -> list[Answer]:
    """Read a file that ``generate_answers`` wrote.

    Raises:
        DataError: the file is missing or empty, or a line is not an answer; the line is named.
    """
    path = Path(path)
    answers = parse_answers(path, _read(path))
    if not answers:
        raise DataError(f"{path} holds no answer", fix="generate them first")
    return answers


def parse_answers(path: Path, data: bytes) -> list[Answer]:
    """Parse the lines of a file; ``path`` is for the messages."""
    answers: list[Answer] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        answer = _parse(line, where)
        if answer.id in lines:
            raise DataError(
                f"{where}: the id {answer.id!r} stands in line {lines[answer.id]} already",
                why="its tokens would count twice",
                fix="remove one of the two lines",
            )
        lines[answer.id] = number
        answers.append(answer)
    return answers


def manifest_path(path: str | os.PathLike[str]) -> Path:
    """Where the manifest of an answers file is."""
    path = Path(path)
    return path.with_name(path.name + ".manifest.json")


def open_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a new file, or check that an existing file was made with the same.

    Raises:
        ConfigError: the file was made with something else; the differences are named.
        DataError: there are answers but no readable manifest.
    """
    file = manifest_path(path)
    if not file.exists():
        if path.exists() and path.stat().st_size:
            raise DataError(
                f"{path} is there, but its {file.name} is not",
                why="nothing says which model and settings its answers come from",
                fix="name another file, or remove this one",
            )
        # In one step: a manifest is whole or not there.
        draft = file.with_name(file.name + ".part")
        draft.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        draft.replace(file)
        return
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise DataError(f"{file} can't be read: {error}", fix=f"remove it and {path.name}") from error
    different = [
        f"{name}: {found.get(key)} there, {manifest[key]} here"
        for key, name in MANIFEST_KEYS.items()
        if found.get(key) != manifest[key]
    ]
    if different:
        raise ConfigError(
            f"{path} was begun with other settings:\n    " + "\n    ".join(different),
            why="one file would hold answers of two kinds",
            fix="use the settings it was begun with, or name another file",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"no file {path}", fix="generate the answers first") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error


def _parse(line: bytes, where: str) -> Answer:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where}: not JSON: {error}",
            fix="a last line that was cut is repaired by generating again; otherwise remove the line",
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: the row is a {type(row).__name__}, not an object")
    missing = [key for key in Answer.__dataclass_fields__ if key not in row]
    if missing:
        raise DataError(f"{where}: no {', '.join(missing)} (keys: {', '.join(row) or 'none'})")
    for key in ("id", "group", "task"):
        if not isinstance(row[key], str) or not row[key]:
            raise DataError(f"{where}: {key} is {row[key]!r}, not a text")
    if not isinstance(row["held_out"], bool):
        raise DataError(f"{where}: held_out is {row['held_out']!r}, not true or false")
    if row["finish"] not in get_args(Finish):
        raise DataError(f"{where}: finish is {row['finish']!r}, not one of {', '.join(get_args(Finish))}")
    for key in ("prompt_ids", "answer_ids"):
        _check_ids(row[key], key, where)
    _check_messages(row["messages"], where)
    return Answer(
        id=row["id"],
        group=row["group"],
        task=row["task"],
        held_out=row["held_out"],
        messages=tuple(row["messages"]),
        prompt_ids=tuple(row["prompt_ids"]),
        answer_ids=tuple(row["answer_ids"]),
        finish=row["finish"],
    )


def _check_ids(ids: Any, key: str, where: str) -> None:
    # type() and not isinstance(): true is an int of Python's.
    if not isinstance(ids, list) or not ids or any(type(token) is not int or token < 0 for token in ids):
        raise DataError(f"{where}: {key} is not a list of token ids")


def _check_messages(messages: Any, where: str) -> None:
    turns: Sequence[Any] = messages if isinstance(messages, list) else ()
    if len(turns) < 2 or any(
        not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("role", "content"))
        for turn in turns
    ):
        raise DataError(f"{where}: messages is not a chat of at least two messages with role and content")
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message is the {turns[-1]['role']}'s, not the assistant's")
