"""Where an assistant turn that calls tools stands in a rendered chat."""

from __future__ import annotations

from collections.abc import Sequence

from tokennorm.data.conversation import Message
from tokennorm.data.turn_text import MARKER, Render, Turn, around_marker, check_content, end_token, unmarkable
from tokennorm.errors import DataError

__all__ = ["locate_tool_turn"]


def locate_tool_turn(
    messages: Sequence[Message], i: int, render: Render, text: str, special_tokens: Sequence[str], source: str
) -> Turn:
    """Find the span of message ``i``, which has tool calls and perhaps content, in ``text``.

    The name of the last call is replaced by a marker: what the template writes before it must stand in ``text``
    before the true name, and what it writes behind it, with ``i`` as the last message, ends the turn. The end
    token is the one that closes a turn without calls.

    Raises:
        DataError: as for :func:`~tokennorm.data.assistant_turns`.
    """
    message = messages[i]
    name = message["tool_calls"][-1]["function"]["name"]
    renamed = _with_last_name(message, MARKER)
    before, found, _ = render([*messages[:i], renamed, *messages[i + 1 :]]).partition(MARKER)
    if not found:
        raise unmarkable(i, source, "the template does not show its tool calls")
    if not text.startswith(before + name):
        raise unmarkable(i, source, "the text before its last tool call depends on the call's name")
    history = render(messages[:i]) if i else ""
    start = _start(messages, i, render, text, history, source)
    at = len(before) + len(name)
    if start > len(before):
        raise unmarkable(i, source, "the generation prompt reaches beyond it")
    tail = around_marker(render([*messages[:i], renamed]), i, source)[1]
    calls, closing = _split_tail(messages, i, render, tail, special_tokens, source)
    if not text.startswith(calls + closing, at):
        raise unmarkable(i, source, "the text that follows its last tool call is rendered differently later")
    content_end = at + len(calls)
    begin = len(history) if text.startswith(history) else start
    check_content(messages, i, text[begin:content_end], source)
    return Turn(message=i, start=start, content_end=content_end, end=content_end + len(closing))


def _start(messages: Sequence[Message], i: int, render: Render, text: str, history: str, source: str) -> int:
    prompt = render(messages[:i], add_generation_prompt=True) if i else ""
    if prompt != history and text.startswith(prompt):
        return len(prompt)
    header = _plain_rendering(messages, i, render, source)
    if prompt == history and header is not None and text.startswith(header[0]):
        # The template ignores the flag: the turn begins where a content would.
        return len(header[0])
    if (
        prompt == history
        and text.startswith(history)
        and (header is None or not header[0][len(history) :].strip())
    ):
        return len(history)
    raise unmarkable(i, source, "it does not begin with the generation prompt")


def _split_tail(
    messages: Sequence[Message], i: int, render: Render, tail: str, special_tokens: Sequence[str], source: str
) -> tuple[str, str]:
    """What is behind the last call's name, as the rest of the call and the end token of the turn."""
    plain = _plain_rendering(messages, i, render, source)
    if plain is not None:
        closing = end_token(plain[1], special_tokens)
        if closing and tail.endswith(plain[1]):
            return tail[: len(tail) - len(plain[1])], closing
    ends = [(at, token) for token in special_tokens if (at := tail.find(token)) >= 0]
    if len(ends) == 1 and tail.count(ends[0][1]) == 1 and not tail[ends[0][0] + len(ends[0][1]) :].strip():
        return tail[: ends[0][0]], ends[0][1]
    raise unmarkable(
        i,
        source,
        "its tool calls end in another way than an answer does, so that its end token can't be told",
        fix="remove the rows with tool calls, or give the tokenizer a chat template that ends every assistant "
        "turn with the same token",
    )


def _plain_rendering(messages: Sequence[Message], i: int, render: Render, source: str) -> tuple[str, str] | None:
    """The text around the content of a turn without calls in the place of ``i``; None if that is refused."""
    without = {key: value for key, value in messages[i].items() if key != "tool_calls"}
    try:
        return around_marker(render([*messages[:i], {**without, "content": MARKER}]), i, source)
    except DataError:
        return None


def _with_last_name(message: Message, name: str) -> Message:
    *others, last = message["tool_calls"]
    return {**message, "tool_calls": [*others, {**last, "function": {**last["function"], "name": name}}]}
