"""The span of an assistant turn, and what finding one needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokennorm.data.conversation import Message
from tokennorm.data.tools import argument_texts
from tokennorm.errors import DataError

__all__ = [
    "MARKER",
    "Render",
    "Turn",
    "around_marker",
    "check_content",
    "end_token",
    "lost",
    "shows",
    "squeezed",
    "unmarkable",
]

# Letters and digits only: survives trimming, escaping and splitting at tags.
MARKER = "TokenNormContentMarker7319"


class Render(Protocol):
    """Messages -> text; raises DataError where the template refuses them."""

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render the messages, with the beginning of an assistant turn where asked for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Character span of what the assistant writes in one turn.

    Attributes:
        message: index of the message.
        start: where the generation prompt ends.
        content_end: end of the content and of the tool calls.
        end: end of the end token, where the template has one; ``content_end`` otherwise. White space that the
            template puts behind the end token lies outside.
    """

    message: int
    start: int
    content_end: int
    end: int

    @property
    def has_end_token(self) -> bool:
        """Whether the template closes the turn with something that the assistant must learn to write."""
        return self.end > self.content_end


def check_content(messages: Sequence[Message], i: int, shown: str, source: str) -> None:
    """All that message ``i`` says has to be in its own turn, not only somewhere in the chat.

    Args:
        messages: the chat.
        i: index of the message.
        shown: the text of the turn.
        source: named in the error.

    Raises:
        DataError: the template drops or changes content, reasoning, or a call's name or arguments.
    """
    message, shown = messages[i], squeezed(shown)
    if not shows(shown, message["content"]):
        raise lost(i, message, source)
    if not shows(shown, message.get("reasoning_content") or ""):
        raise lost(i, message, source, part="reasoning_content", text=message["reasoning_content"])
    for call in message.get("tool_calls", ()):
        function = call["function"]
        for ways in ((function["name"],), *argument_texts(function["arguments"])):
            if not any(squeezed(way) in shown for way in ways):
                raise lost(i, message, source, part=f"call of {function['name']}", text=ways[0])


def shows(shown: str, text: str) -> bool:
    """Whether the text stands in the rendering, as it is or as a JSON string (what a tool returned)."""
    return squeezed(text) in shown or squeezed(json.dumps(text, ensure_ascii=False)[1:-1]) in shown


def end_token(tail: str, special_tokens: Sequence[str]) -> str:
    """What the assistant writes of a turn's tail: up to its first special token, else all visible text."""
    ends = [(at, at + len(token)) for token in special_tokens if (at := tail.find(token)) >= 0]
    # Of two tokens that begin at one place the longer one is meant: the tokenizer reads it so.
    return tail[: min(ends, key=lambda span: (span[0], -span[1]))[1]] if ends else tail.rstrip()


def around_marker(text: str, i: int, source: str) -> tuple[str, str]:
    """The text before and after the marker, which must be there once."""
    before, marker, after = text.partition(MARKER)
    if not marker or MARKER in after:
        how = "more than once" if marker else "not at all"
        raise unmarkable(i, source, f"the template shows its content {how}")
    return before, after


def squeezed(text: str) -> str:
    """Without white space, which templates trim and re-flow."""
    return "".join(text.split())


def unmarkable(i: int, source: str, reason: str, fix: str | None = None) -> DataError:
    """The error for a turn whose tokens can't be told."""
    return DataError(
        f"{source}: can't tell which tokens of message {i} (assistant) the model writes: {reason}",
        why="a wrong loss mask trains on the prompt, or not on the answer, and nothing would show it",
        fix=fix
        or "split the chat so that this turn is the last of its own row, or give the tokenizer a chat template "
        "that renders earlier messages the same way whatever follows",
    )


def lost(i: int, message: Message, source: str, *, part: str = "content", text: str | None = None) -> DataError:
    """The error for a message, or a part of it, that the template does not show."""
    text = str(message["content"]) if text is None else text
    return DataError(
        f"{source}: the chat template drops or changes the {part} of message {i} ({message['role']}, "
        f"{len(text):,} characters, beginning {text[:40]!r})",
        why="the model would be trained on something other than the data says",
        fix="where the template drops the reasoning of earlier turns, make each such turn the last of its own "
        "row (turns: each does it); where it has no place for a role or for tools, remove those messages",
    )
