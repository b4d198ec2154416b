"""A chat as tokennorm reads it: validated once, where it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.errors import DataError

__all__ = ["ROLES", "Conversation", "Message"]

Message = dict[str, str]

ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message can have. Only ``assistant`` messages are supervised."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order, and where they come from.

    Args:
        messages: at least one ``{"role": ..., "content": ...}``, with text in every content and at least one
            assistant message. Other keys are refused rather than ignored: a ``weight`` or ``tool_calls`` that
            was dropped silently would train something other than the data says.
        source: where it comes from (``file.jsonl:12``), named in every error about it.

    Raises:
        DataError: naming the source, the message and what is wrong with it.
    """

    messages: tuple[Message, ...]
    source: str

    def __init__(self, *, messages: Sequence[Mapping[str, Any]], source: str) -> None:
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "messages", _validated(messages, source))

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each message."""
        return tuple(message["role"] for message in self.messages)


def _validated(messages: Any, source: str) -> tuple[Message, ...]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise DataError(
            f"{source}: messages is {_kind(messages)}, not a list of messages",
            fix='write "messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]',
        )
    if not messages:
        raise DataError(f"{source}: the list of messages is empty", fix="remove the row or fill it")
    checked = tuple(_validated_message(message, f"{source}: message {i}") for i, message in enumerate(messages))
    if all(message["role"] != "assistant" for message in checked):
        raise DataError(
            f"{source}: no assistant message among {len(checked)} (roles: "
            f"{', '.join(message['role'] for message in checked)})",
            why="only assistant messages are trained on, so this conversation can't contribute anything",
            fix="add the assistant's answer or remove the row",
        )
    return checked


def _validated_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {_kind(message)}, not an object with role and content")
    missing = [key for key in ("role", "content") if key not in message]
    if missing:
        raise DataError(
            f"{where} has no {' and no '.join(missing)} (keys: {', '.join(map(str, message)) or 'none'})"
        )
    unknown = sorted(str(key) for key in message if key not in ("role", "content"))
    if unknown:
        raise DataError(
            f"{where} has keys that tokennorm does not read: {', '.join(unknown)}",
            why="training as if they were not there could mean something other than the data says",
            fix="keep only role and content in each message",
        )
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise DataError(
            f"{where} has the role {role!r}",
            fix=f"use one of {', '.join(ROLES)}; the chat template translates them into the model's own names",
        )
    if not isinstance(content, str):
        raise DataError(f"{where} ({role}) has {_kind(content)} as content, not text")
    if not content.strip():
        raise DataError(f"{where} ({role}) is empty", fix="remove the message or the row")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} ({role}) holds half a surrogate pair at character {error.start}: {content[error.start]!r}",
            why="no tokenizer can encode it",
            fix="write the file as UTF-8 and check how the text was cut",
        ) from error
    return {"role": role, "content": content}


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
