"""A user's own prompts, from a JSONL file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokennorm.data import Conversation
from tokennorm.errors import ConfigError, DataError
from tokennorm.recipes.dspark.prompt import Prompt, hash_percent, text_hash

__all__ = ["read_prompts"]

REFUSED_KEYS = ("tools", "functions", "documents")
SHOWN_ERRORS = 5
OWN_GROUP = "own"


@dataclass(frozen=True)
class _Row:
    where: str
    prompt: Prompt
    says_part: bool


def read_prompts(
    path: str | os.PathLike[str],
    *,
    held_out_fraction: float = 0.1,
    say: Callable[[str], None] | None = None,
) -> list[Prompt]:
    """Read a UTF-8 file of prompts, one JSON object per line; blank lines are skipped.

    A line has ``"prompt": text`` or ``"messages": [...]``. Of a chat, what follows the last user message is left
    out: the target answers anew. Optional: ``id``, ``group`` (results are reported by it; "own" by default),
    ``task`` and ``held_out``. Other keys are ignored, except ``tools``, ``functions`` and ``documents``, which
    would change what the target is given.

    Where no line says ``held_out``, a hash of each prompt decides, at least one is held out and one is not. Where
    one does, a line without it is for training. A prompt that is there twice counts once.

    Args:
        path: of the file.
        held_out_fraction: about how many are held out, from 0 to below 1; 0 for none.
        say: gets a line about repeated prompts.

    Raises:
        ConfigError: the fraction is out of range.
        DataError: the file can't be read or holds no prompt, or lines are bad; the first few are named.
    """
    if not 0 <= held_out_fraction < 1:
        raise ConfigError(f"held_out_fraction is {held_out_fraction}", fix="from 0 to below 1")
    path = Path(path)
    rows: list[_Row] = []
    errors: list[DataError] = []
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                rows.append(_parse(line, f"{path.name}:{number}"))
            except DataError as error:
                errors.append(error)
    if errors:
        _raise(errors, path)
    if not rows:
        raise DataError(f"{path} holds no prompt", fix='write one {"prompt": "..."} per line')
    prompts = _without_repeats(rows, say or (lambda _: None))
    if not any(row.says_part for row in rows):
        prompts = _split(prompts, held_out_fraction)
    return prompts


def _lines(path: Path) -> list[str]:
    try:
        # utf-8-sig: a byte-order mark that some editors write is no part of the first line.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise DataError(
            f"no file {path}", fix="check the path; a relative one starts at the working folder"
        ) from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path.name}:{line}: not UTF-8 ({error.reason})", fix="save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror}") from error
    # Not splitlines(): U+2028 and its like are legal inside JSON strings.
    return text.split("\n")


def _parse(line: str, where: str) -> _Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON: {error.msg} at column {error.colno}", fix="write one JSON object per line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: the row is a {type(row).__name__}, not an object")
    if refused := [key for key in REFUSED_KEYS if row.get(key)]:
        raise DataError(
            f"{where}: the row has {', '.join(refused)}, which tokennorm does not render",
            why="the target would answer a prompt without them",
        )
    if ("prompt" in row) is ("messages" in row):
        raise DataError(
            f"{where}: {'both prompt and messages' if 'prompt' in row else 'neither prompt nor messages'} "
            f"(keys: {', '.join(row) or 'none'})",
            fix='write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
        )
    chat = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
    turns = _question(chat, where)
    names = {key: row[key] for key in ("id", "group", "task") if key in row}
    for key, value in names.items():
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: {key} is {value!r}, not a text")
    held_out = row.get("held_out", False)
    if not isinstance(held_out, bool):
        raise DataError(f"{where}: held_out is {held_out!r}, not true or false")
    group = names.get("group", OWN_GROUP)
    prompt = Prompt(
        id=names.get("id") or f"{group}-{text_hash(json.dumps(turns))}",
        group=group,
        task=names.get("task", group),
        text=turns[-1][1],
        held_out=held_out,
        context=turns[:-1],
    )
    return _Row(where, prompt, "held_out" in row)


def _question(chat: Any, where: str) -> tuple[tuple[str, str], ...]:
    """The messages up to the last one of the user."""
    # An answer to come makes the chat whole, so that the rules for chats hold here too.
    whole = [*chat, {"role": "assistant", "content": "-"}] if isinstance(chat, list) and chat else chat
    messages = Conversation(messages=whole, source=where).messages
    beyond = sorted({key for message in messages for key in message} - {"role", "content"})
    if beyond:
        raise DataError(
            f"{where}: a message has {', '.join(beyond)}, which a prompt does not hold",
            fix="keep only role and content in each message",
        )
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise DataError(f"{where}: no message of the user", fix="the target answers the last user message")
    return tuple((message["role"], message["content"]) for message in messages[: last + 1])


def _raise(errors: list[DataError], path: Path) -> None:
    if len(errors) == 1:
        raise errors[0]
    shown = [f"  {error.what}" for error in errors[:SHOWN_ERRORS]]
    if len(errors) > SHOWN_ERRORS:
        shown.append(f"  and {len(errors) - SHOWN_ERRORS} more")
    raise DataError(
        f"{len(errors)} bad lines in {path}:\n" + "\n".join(shown), fix=errors[0].fix or "correct or remove them"
    )


def _without_repeats(rows: list[_Row], say: Callable[[str], None]) -> list[Prompt]:
    by_id: dict[str, _Row] = {}
    by_chat: dict[object, _Row] = {}
    kept: list[Prompt] = []
    for row in rows:
        prompt = row.prompt
        chat = (prompt.context, prompt.text)
        if (first := by_chat.setdefault(chat, row)) is not row:
            if first.prompt.held_out is not prompt.held_out:
                raise DataError(
                    f"{row.where}: the prompt of {first.where}, once held out and once not",
                    why="what is held out must not be trained on",
                    fix="remove one of the two lines",
                )
            continue
        if (first := by_id.setdefault(prompt.id, row)) is not row:
            raise DataError(
                f"{row.where}: the id {prompt.id!r} is that of {first.where}", fix="make the ids unique"
            )
        kept.append(prompt)
    if len(kept) < len(rows):
        say(f"{len(rows) - len(kept):,} of {len(rows):,} prompts repeat others and were left out")
    return kept


def _split(prompts: list[Prompt], fraction: float) -> list[Prompt]:
    if fraction == 0:
        return prompts
    if len(prompts) == 1:
        raise DataError(
            "one prompt can't be both trained on and held out", fix="add prompts, or hold none out (fraction 0)"
        )
    # Of the chat and not of the id: another name does not change the part.
    order = [hash_percent(json.dumps([*prompt.context, prompt.text])) for prompt in prompts]
    lowest, highest = order.index(min(order)), order.index(max(order))
    return [
        replace(prompt, held_out=index == lowest or (number < fraction * 100 and index != highest))
        for index, (prompt, number) in enumerate(zip(prompts, order, strict=True))
    ]
