"""A chat through the tokenizer's template: token ids and which of them the assistant writes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokennorm.data.conversation import Conversation, Message
from tokennorm.data.template_date import read_date, with_date
from tokennorm.data.tools import tool_name, with_name
from tokennorm.data.turn_text import MARKER
from tokennorm.data.turns import Turn, assistant_turns
from tokennorm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ChatEncoder", "EncodedChat"]

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, kw_only=True)
class EncodedChat:
    """One rendered chat.

    Attributes:
        input_ids: the tokens of the whole chat, L of them.
        supervised: L booleans: the assistant writes this token (its end token included).
        num_turns: assistant turns.
        num_turns_without_end: those that the template closes with no end token, so that nothing teaches the
            model to stop there.
        has_special_text: a message spells out one of the tokenizer's special tokens (``<|im_end|>``), which is
            read as that token and so looks like the end of a turn.
    """

    input_ids: list[int]
    supervised: list[bool]
    num_turns: int
    num_turns_without_end: int
    has_special_text: bool


class ChatEncoder:
    """Encodes conversations with a tokenizer's own chat template.

    The template's text is tokenised as a whole, without special tokens added (a template writes its own BOS),
    so the ids are those of ``apply_chat_template``. A token is supervised when its first visible character
    belongs to an assistant turn, see :mod:`tokennorm.data.turns`. Where the template has a ``{% generation %}``
    block, only what the block encloses, and the end token, is supervised, and the block is checked against the
    turns.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        template_options: variables passed to the template (``enable_thinking=False``).
        date: the day (``YYYY-MM-DD``) that a template which prints the date shows; None: today.

    Raises:
        ConfigError: ``date`` is none.
        DataError: the tokenizer has no chat template, or can't report the offsets of its tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_options: Mapping[str, Any] | None = None,
        date: str | None = None,
    ) -> None:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"the tokenizer {name} has no chat template",
                why="it says how roles and turns become tokens",
                fix="use an instruction-tuned model's tokenizer, or set tokenizer.chat_template",
            )
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"the tokenizer {name} ({type(tokenizer).__name__}) does not report the offsets of its tokens",
                why="the loss mask is made from where each token stands in the text",
                fix="load the fast version (AutoTokenizer.from_pretrained(..., use_fast=True))",
            )
        self.tokenizer = tokenizer
        self._options, self._date = dict(template_options or {}), date
        if date is not None:
            read_date(date)
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # several named templates and no default
            raise DataError(f"the tokenizer {name} has no default chat template: {error}") from error
        self._special_tokens = tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special and token.content
        )
        self._has_generation_block = GENERATION_BLOCK.search(template) is not None

    def encode(self, conversation: Conversation, *, only_last_turn: bool = False) -> EncodedChat:
        """Encode one conversation.

        Args:
            conversation: the chat, with its tools.
            only_last_turn: supervise the last assistant message alone; the template may drop or change the
                earlier ones.

        Raises:
            DataError: the template refuses the conversation, drops or changes a message or a tool, or does not
                allow a certain answer to which tokens the assistant writes.
        """
        source = conversation.source

        def render(messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
            return self._render(messages, conversation, add_generation_prompt)

        text = render(conversation.messages)
        self._check_tools(conversation)
        last = max(i for i, role in enumerate(conversation.roles) if role == "assistant")
        turns = assistant_turns(
            conversation.messages,
            render,
            text,
            special_tokens=self._special_tokens,
            source=source,
            only=(last,) if only_last_turn else None,
        )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        input_ids: list[int] = encoded["input_ids"]  # pyright: ignore[reportAssignmentType]
        offsets: list[tuple[int, int]] = encoded["offset_mapping"]  # pyright: ignore[reportAssignmentType]
        owners = _owners(text, offsets, turns)
        if self._has_generation_block:
            block = self._generation_mask(conversation, len(input_ids))
            supervised = _inside_block(block, owners, offsets, turns, None if only_last_turn else source)
        else:
            supervised = [owner is not None for owner in owners]
        return EncodedChat(
            input_ids=input_ids,
            supervised=supervised,
            num_turns=len(turns),
            num_turns_without_end=sum(not turn.has_end_token for turn in turns),
            has_special_text=any(
                token in message["content"] for message in conversation.messages for token in self._special_tokens
            ),
        )

    def _check_tools(self, conversation: Conversation) -> None:
        """Every tool has to stand in the prompt, under a name that occurs nowhere else in it."""
        if conversation.tools is None:
            return
        marks = [f"{MARKER}Tool{i}End" for i in range(len(conversation.tools))]
        renamed = [with_name(tool, mark) for tool, mark in zip(conversation.tools, marks, strict=True)]
        text = self._render(conversation.messages, conversation, False, tools=renamed)
        for tool, mark in zip(conversation.tools, marks, strict=True):
            if mark not in text:
                raise DataError(
                    f"{conversation.source}: the chat template does not show the tool {tool_name(tool)!r}",
                    why="the model would learn to call tools that its prompt does not offer",
                    fix="use a model whose chat template knows tools, or remove tools from the data",
                )

    def _render(
        self,
        messages: Sequence[Message],
        chat: Conversation,
        add_generation_prompt: bool,
        *,
        tools: list[Any] | None = None,
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools or _tool_list(chat),
                chat_template=self._template(chat),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except Exception as error:  # whatever a template raises, jinja's own errors and Python's alike
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{chat.source}: the chat template refuses the roles [{roles}]: {type(error).__name__}: {error}",
                fix="change the order of the messages, or remove roles that the template does not know",
            ) from error
        assert isinstance(text, str)
        return text

    def _template(self, chat: Conversation) -> str | None:
        """The template to render with; None: the tokenizer's own."""
        if self._date is None:
            return None
        # There may be one for chats with tools.
        return with_date(self.tokenizer.get_chat_template(tools=_tool_list(chat)), self._date)

    def _generation_mask(self, conversation: Conversation, length: int) -> list[bool]:
        encoded = self.tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=_tool_list(conversation),
            chat_template=self._template(conversation),
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
            **self._options,
        )
        mask = [bool(value) for value in encoded["assistant_masks"]]  # pyright: ignore[reportCallIssue, reportArgumentType]
        if len(mask) != length:
            raise DataError(
                f"{conversation.source}: the chat is {length} tokens long, but {len(mask)} with its "
                "{% generation %} blocks tracked",
                why="the two must be the same text",
                fix="correct the chat template",
            )
        return mask


def _tool_list(conversation: Conversation) -> list[Any] | None:
    return None if conversation.tools is None else list(conversation.tools)


def _owners(text: str, offsets: Sequence[tuple[int, int]], turns: Sequence[Turn]) -> list[int | None]:
    """For each token, the index of the turn that it belongs to.

    A token can straddle a boundary. It belongs to where its first visible character stands: " Paris" after
    "Assistant: " is the answer's, ".\n" at the end is too, a "\n\n" that begins in the header is not.
    Tokenizers disagree on whether leading white space is inside a token's offsets; this rule does not care.
    """
    owners: list[int | None] = []
    k = 0
    for start, end in offsets:
        piece = text[start:end]
        anchor = start + len(piece) - len(piece.lstrip()) if not piece.isspace() else start
        while k < len(turns) and anchor >= turns[k].end:
            k += 1
        inside = k < len(turns) and turns[k].start <= anchor
        # A token without text (a word-start mark) belongs to a turn only strictly inside it.
        if start == end and inside:
            inside = turns[k].start < anchor
        owners.append(k if inside else None)
    return owners


def _inside_block(
    block: Sequence[bool],
    owners: Sequence[int | None],
    offsets: Sequence[tuple[int, int]],
    turns: Sequence[Turn],
    source: str | None,
) -> list[bool]:
    """Narrow the turns to the template's own marks; a turn that is marked at all keeps its end token.

    With a ``source`` the marks are checked; without one some turns are left out on purpose, and their marks
    belong to none.
    """
    if source is not None:
        _check_block(block, owners, source)
    marked = {owner for owner, inside in zip(owners, block, strict=True) if inside and owner is not None}
    return [
        owner is not None and (inside or (owner in marked and offset[0] >= turns[owner].content_end))
        for owner, inside, offset in zip(owners, block, offsets, strict=True)
    ]


def _check_block(block: Sequence[bool], owners: Sequence[int | None], source: str) -> None:
    """Every run of marked tokens must touch an assistant turn (its header or last newline may be in it too)."""
    start = None
    for i, inside in enumerate([*block, False]):
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            if all(owner is None for owner in owners[start:i]):
                raise DataError(
                    f"{source}: the chat template's {{% generation %}} block marks tokens {start} to {i - 1}, "
                    "which belong to no assistant message",
                    why="they would be trained on as if the assistant had written them",
                    fix="correct the chat template",
                )
            start = None
