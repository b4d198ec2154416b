"""A chat as tokennorm reads it: validated once, where it is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.data.tools import checked_tool_calls, checked_tools
from tokennorm.errors import DataError

__all__ = ["ROLES", "Conversation", "Message"]

Message = dict[str, Any]
"""``role`` and ``content`` (text), and what :class:`Conversation` allows beside them."""

ROLES = ("system", "user", "assistant", "tool")
"""The roles that a message can have. Only ``assistant`` messages are supervised."""

_KEYS = {
    "assistant": ("role", "content", "tool_calls", "reasoning_content"),
    "tool": ("role", "content", "name", "tool_call_id"),
}


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in order, the tools that they may call, and where they come from.

    Args:
        messages: at least one ``{"role": ..., "content": ...}``, with text in every content and at least one
            assistant message. An assistant message may have ``tool_calls`` (then its content may be missing) and
            ``reasoning_content``, a tool's message the ``name`` and ``tool_call_id`` of the call that it answers.
            Other keys are refused rather than ignored: a ``weight`` that was dropped silently would train
            something other than the data says. A key whose value is null counts as missing.
        tools: JSON schemas of the tools, given to the chat template.
        source: where it comes from (``file.jsonl:12``), named in every error about it.

    Raises:
        DataError: naming the source, the message and what is wrong with it.
    """

    messages: tuple[Message, ...]
    source: str
    tools: tuple[dict[str, Any], ...] | None

    def __init__(self, *, messages: Sequence[Mapping[str, Any]], source: str, tools: Any = None) -> None:
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "messages", _validated(messages, source))
        object.__setattr__(self, "tools", checked_tools(tools, source))

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
    role = message.get("role")
    # An empty list of calls is what a table's column holds for messages without any.
    calls = checked_tool_calls(message.get("tool_calls"), where) if role == "assistant" else []
    content = message.get("content")
    if calls and content is None:
        content = ""
    missing = [key for key in ("role", "content") if key not in message and not (key == "content" and calls)]
    if missing:
        raise DataError(
            f"{where} has no {' and no '.join(missing)} (keys: {', '.join(map(str, message)) or 'none'})"
        )
    if role not in ROLES:
        raise DataError(
            f"{where} has the role {role!r}",
            fix=f"use one of {', '.join(ROLES)}; the chat template translates them into the model's own names",
        )
    allowed = _KEYS.get(role, ("role", "content"))
    unknown = sorted(str(key) for key, value in message.items() if key not in allowed and _says_something(value))
    if unknown:
        raise DataError(
            f"{where} has keys that tokennorm does not read: {', '.join(unknown)}",
            why="training as if they were not there could mean something other than the data says",
            fix=f"keep only {', '.join(allowed)} in the messages of this role",
        )
    _check_text(content, f"{where} ({role})", may_be_empty=bool(calls))
    checked: Message = {"role": role, "content": content}
    for key in ("reasoning_content", "name", "tool_call_id"):
        if key in allowed and message.get(key) is not None:
            _check_text(message[key], f"{where} ({role}): {key}", may_be_empty=True)
            checked[key] = message[key]
    if calls:
        checked["tool_calls"] = calls
    return checked


def _says_something(value: Any) -> bool:
    """Tables fill the keys that a message does not have with null or an empty list."""
    return value is not None and value != []


def _check_text(text: Any, where: str, *, may_be_empty: bool) -> None:
    if not isinstance(text, str):
        raise DataError(f"{where} has {_kind(text)} as content, not text")
    if not text.strip() and not may_be_empty:
        raise DataError(f"{where} is empty", fix="remove the message or the row")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half a surrogate pair at character {error.start}: {text[error.start]!r}",
            why="no tokenizer can encode it",
            fix="write the file as UTF-8 and check how the text was cut",
        ) from error


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
