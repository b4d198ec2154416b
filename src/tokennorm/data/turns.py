"""Where each assistant turn stands in a rendered chat, whatever the template.

A chat template is a program: it may move, trim, replace or drop what it is given, and most do not say which
part the assistant writes. Three kinds of rendering answer that without knowing the template:

* the *prompt* of turn ``i`` (the messages before it, with the generation prompt) is what the model is given
  when it writes the turn. It must be a true prefix of the whole chat: the turn begins where it ends;
* the whole chat with the content of turn ``i`` replaced by a marker shows the text after the content;
* the messages up to ``i``, with the marker, show how much of that text belongs to the turn (its end token).

What can't be shown to be right is refused: a wrong mask trains silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokennorm.data.conversation import Message
from tokennorm.errors import DataError

__all__ = ["Render", "Turn", "assistant_turns"]

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
        content_end: end of the content.
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


def assistant_turns(
    messages: Sequence[Message], render: Render, text: str, *, special_tokens: Sequence[str] = (), source: str
) -> list[Turn]:
    """Find the span of every assistant message in ``text``, the rendering of all messages.

    Args:
        messages: the chat.
        render: the template.
        text: ``render(messages)``.
        special_tokens: texts of the tokenizer's special tokens. The first one behind a content is its end token;
            what a template may add after it (a closing mark of the whole chat) is not the assistant's.
        source: named in errors.

    Raises:
        DataError: naming the message, when the template drops or changes a content, or renders the messages
            before an assistant turn in another way than when the model is asked to write that turn.
    """
    shown = _squeezed(text)
    for i, message in enumerate(messages):
        if _squeezed(message["content"]) not in shown:
            raise _lost(i, message, source)
    turns: list[Turn] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn = _locate(messages, i, render, text, special_tokens, source)
        if turns and turn.start < turns[-1].end:
            raise _unmarkable(i, source, "its text begins before the preceding assistant turn ends")
        turns.append(turn)
    return turns


def _locate(
    messages: Sequence[Message], i: int, render: Render, text: str, special_tokens: Sequence[str], source: str
) -> Turn:
    marked: Message = {**messages[i], "content": MARKER}
    before, after = _around_marker(render([*messages[:i], marked, *messages[i + 1 :]]), i, source)
    if not text.endswith(after):
        raise _unmarkable(i, source, "the text that follows it depends on what it says")
    content_end = len(text) - len(after)

    history = render(messages[:i]) if i else ""
    prompt = render(messages[:i], add_generation_prompt=True) if i else ""
    if prompt != history and text.startswith(prompt):
        start = len(prompt)
    elif text.startswith(before) and before.startswith(prompt):
        # No generation prompt to go by: nothing comes before the turn, or the template ignores the flag
        # ("[INST] question [/INST]" is prompt enough). The turn begins at its content.
        start = len(before)
    elif text.startswith(history) and prompt != history:
        raise _unmarkable(
            i,
            source,
            f"it does not begin with the generation prompt, which ends in {prompt[len(history) :][-40:]!r}",
            fix="give the tokenizer a chat template whose assistant turns begin with its generation prompt; where "
            "the prompt opens a reasoning part, an option of the template may switch that off",
        )
    else:
        raise _unmarkable(i, source, "the messages before it are rendered differently once it follows them")
    if start > content_end:
        raise _unmarkable(i, source, "the generation prompt reaches beyond it")

    # The content has to be in its own turn, not only somewhere in the chat. Its beginning may be part of the
    # generation prompt (an opened thought).
    begin = len(history) if text.startswith(history) else start
    if _squeezed(messages[i]["content"]) not in _squeezed(text[begin:content_end]):
        raise _lost(i, messages[i], source)

    is_last = i == len(messages) - 1
    tail = after if is_last else _around_marker(render([*messages[:i], marked]), i, source)[1]
    tail = _end_token(tail, special_tokens)
    end = content_end + len(tail) if after.startswith(tail) else content_end
    return Turn(message=i, start=start, content_end=content_end, end=end)


def _end_token(tail: str, special_tokens: Sequence[str]) -> str:
    """What the assistant writes of a turn's tail: up to its first special token, else all visible text."""
    ends = [(at, at + len(token)) for token in special_tokens if (at := tail.find(token)) >= 0]
    # Of two tokens that begin at one place the longer one is meant: the tokenizer reads it so.
    return tail[: min(ends, key=lambda span: (span[0], -span[1]))[1]] if ends else tail.rstrip()


def _around_marker(text: str, i: int, source: str) -> tuple[str, str]:
    before, marker, after = text.partition(MARKER)
    if not marker or MARKER in after:
        how = "more than once" if marker else "not at all"
        raise _unmarkable(i, source, f"the template shows its content {how}")
    return before, after


def _squeezed(text: str) -> str:
    """Without white space, which templates trim and re-flow."""
    return "".join(text.split())


def _unmarkable(i: int, source: str, reason: str, fix: str | None = None) -> DataError:
    return DataError(
        f"{source}: can't tell which tokens of message {i} (assistant) the model writes: {reason}",
        why="a wrong loss mask trains on the prompt, or not on the answer, and nothing would show it",
        fix=fix
        or "split the chat so that this turn is the last of its own row, or give the tokenizer a chat template "
        "that renders earlier messages the same way whatever follows",
    )


def _lost(i: int, message: Message, source: str) -> DataError:
    return DataError(
        f"{source}: the chat template drops or changes the content of message {i} ({message['role']}, "
        f"{len(message['content']):,} characters, beginning {message['content'][:40]!r})",
        why="the model would be trained on something other than the data says",
        fix="where the template drops the reasoning of earlier turns, make each such turn the last of its own "
        "row; where it has no place for a role, remove those messages",
    )
