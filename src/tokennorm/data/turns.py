"""Where each assistant turn stands in a rendered chat, whatever the template.

A chat template is a program: it may move, trim, replace or drop what it is given, and most do not say which
part the assistant writes. Three kinds of rendering answer that without knowing the template:

* the *prompt* of turn ``i`` (the messages before it, with the generation prompt) is what the model is given
  when it writes the turn. It must be a true prefix of the whole chat: the turn begins where it ends;
* the whole chat with the content of turn ``i`` replaced by a marker shows the text after the content;
* the messages up to ``i``, with the marker, show how much of that text belongs to the turn (its end token).

A turn that calls tools may have no content: there the marker takes the place of the last call's name
(:mod:`tokennorm.data.tool_turns`).

What can't be shown to be right is refused: a wrong mask trains silently.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokennorm.data.conversation import Message
from tokennorm.data.tool_turns import locate_tool_turn
from tokennorm.data.turn_text import (
    MARKER,
    Render,
    Turn,
    around_marker,
    check_content,
    end_token,
    lost,
    shows,
    squeezed,
    unmarkable,
)

__all__ = ["Render", "Turn", "assistant_turns"]


def assistant_turns(
    messages: Sequence[Message],
    render: Render,
    text: str,
    *,
    special_tokens: Sequence[str] = (),
    source: str,
    only: Collection[int] | None = None,
) -> list[Turn]:
    """Find the span of every assistant message in ``text``, the rendering of all messages.

    Args:
        messages: the chat.
        render: the template.
        text: ``render(messages)``.
        special_tokens: texts of the tokenizer's special tokens. The first one behind a content is its end token;
            what a template may add after it (a closing mark of the whole chat) is not the assistant's.
        source: named in errors.
        only: indices of the assistant messages to find; all of them by default. Of the others the template may
            drop what it likes: the model sees them as the template shows them.

    Raises:
        DataError: naming the message, when the template drops or changes a content, or renders the messages
            before an assistant turn in another way than when the model is asked to write that turn.
    """
    wanted = [
        i for i, message in enumerate(messages) if message["role"] == "assistant" and (only is None or i in only)
    ]
    shown = squeezed(text)
    for i, message in enumerate(messages):
        if (message["role"] != "assistant" or i in wanted) and not shows(shown, message["content"]):
            raise lost(i, message, source)
    turns: list[Turn] = []
    for i in wanted:
        if messages[i].get("tool_calls"):
            turn = locate_tool_turn(messages, i, render, text, special_tokens, source)
        else:
            turn = _locate(messages, i, render, text, special_tokens, source)
        if turns and turn.start < turns[-1].end:
            raise unmarkable(i, source, "its text begins before the preceding assistant turn ends")
        turns.append(turn)
    return turns


def _locate(
    messages: Sequence[Message], i: int, render: Render, text: str, special_tokens: Sequence[str], source: str
) -> Turn:
    marked: Message = {**messages[i], "content": MARKER}
    before, after = around_marker(render([*messages[:i], marked, *messages[i + 1 :]]), i, source)
    if not text.endswith(after):
        raise unmarkable(i, source, "the text that follows it depends on what it says")
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
        raise unmarkable(
            i,
            source,
            f"it does not begin with the generation prompt, which ends in {prompt[len(history) :][-40:]!r}",
            fix="give the tokenizer a chat template whose assistant turns begin with its generation prompt; where "
            "the prompt opens a reasoning part, an option of the template may switch that off",
        )
    else:
        raise unmarkable(i, source, "the messages before it are rendered differently once it follows them")
    if start > content_end:
        raise unmarkable(i, source, "the generation prompt reaches beyond it")

    # The beginning may be part of the generation prompt (an opened thought).
    begin = len(history) if text.startswith(history) else start
    check_content(messages, i, text[begin:content_end], source)

    is_last = i == len(messages) - 1
    tail = after if is_last else around_marker(render([*messages[:i], marked]), i, source)[1]
    tail = end_token(tail, special_tokens)
    end = content_end + len(tail) if after.startswith(tail) else content_end
    return Turn(message=i, start=start, content_end=content_end, end=end)
