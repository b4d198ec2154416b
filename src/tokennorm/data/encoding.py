"""Documents through the tokenizer: chats rendered and masked, plain text cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tokennorm.data.chat import ChatEncoder, EncodedChat
from tokennorm.data.conversation import Conversation
from tokennorm.data.documents import Document, TextDocument
from tokennorm.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DocumentEncoder", "EncodeSettings", "EncodedDocument", "Progress", "encode_documents"]

Progress = Callable[[int, int], None]
"""Called with (done, total) conversations."""


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """How documents become samples; with the tokenizer and the documents it decides every token and mask.

    Attributes:
        max_length: most tokens of a sample.
        turns: ``all``: a chat is one sample. ``each``: every assistant turn is the last of a sample of its own.
        template_options: variables for the chat template.
        date: the day (``YYYY-MM-DD``) that a template which prints the date shows; None: today.
    """

    max_length: int
    turns: Literal["all", "each"] = "all"
    template_options: Mapping[str, Any] = field(default_factory=dict)
    date: str | None = None

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise DataError(
                f"max_length is {self.max_length} tokens",
                why="a token is predicted from the one before it, so a sample needs two",
                fix="give max_length at least 2, usually hundreds",
            )
        if self.turns not in ("all", "each"):
            raise ConfigError(f"turns is {self.turns!r}", fix="use all or each")


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedDocument:
    """What one document came to.

    Attributes:
        source: where it comes from.
        pieces: the samples, none longer than ``max_length`` and each with a supervised token: ids [L] int64 and
            mask [L] bool.
        truncated: samples that lost their tail.
        lost: supervised tokens cut off.
        without_end: a turn has no end token.
        special_text: a message spells out a special token.
        error: why it can't be used, else None.
    """

    source: str
    pieces: tuple[tuple[Tensor, Tensor], ...] = ()
    truncated: int = 0
    lost: int = 0
    without_end: bool = False
    special_text: bool = False
    error: DataError | None = None


class DocumentEncoder:
    """Encodes chats and plain text with one tokenizer.

    A chat keeps its first ``max_length`` tokens. Plain text gets the special tokens that the tokenizer adds by
    itself and an end token behind it (where the tokenizer has one), and is cut into pieces of ``max_length``. Each
    piece begins with the last token of the one before, so that every token but the first of the text is predicted
    exactly once.

    Args:
        tokenizer: a Hugging Face tokenizer; for chats a fast one with a chat template.
        settings: lengths and turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: EncodeSettings) -> None:
        self._tokenizer, self._settings = tokenizer, settings
        self._chats: ChatEncoder | None = None

    def check(self, documents: Iterable[Document]) -> None:
        """Refuse a tokenizer that can't encode these documents at all, before the first one.

        Raises:
            DataError: there are chats, and the tokenizer has no chat template or no offsets.
        """
        if any(isinstance(document, Conversation) for document in documents):
            self._chat_encoder()

    def encode(self, document: Document) -> EncodedDocument:
        """Encode one document; one that can't be used comes back with its error."""
        try:
            if isinstance(document, TextDocument):
                return self._encode_text(document)
            return self._encode_chat(document)
        except DataError as error:
            return EncodedDocument(source=document.source, error=error)

    def _chat_encoder(self) -> ChatEncoder:
        if self._chats is None:
            settings = self._settings
            self._chats = ChatEncoder(
                self._tokenizer, template_options=settings.template_options, date=settings.date
            )
        return self._chats

    def _encode_chat(self, chat: Conversation) -> EncodedDocument:
        encoder = self._chat_encoder()
        if self._settings.turns == "all":
            found = [encoder.encode(chat)]
        else:
            found = [
                encoder.encode(
                    Conversation(messages=chat.messages[: i + 1], tools=chat.tools, source=chat.source),
                    only_last_turn=True,
                )
                for i, role in enumerate(chat.roles)
                if role == "assistant"
            ]
        cut = [_head(one, self._settings.max_length) for one in found]
        return EncodedDocument(
            source=chat.source,
            pieces=tuple(piece for piece, _ in cut if int(piece[1][1:].sum())),
            truncated=sum(
                piece[0].shape[0] < len(one.input_ids) and bool(piece[1][1:].any())
                for (piece, _), one in zip(cut, found, strict=True)
            ),
            lost=sum(lost for _, lost in cut),
            without_end=any(one.num_turns_without_end for one in found),
            special_text=any(one.has_special_text for one in found),
        )

    def _encode_text(self, document: TextDocument) -> EncodedDocument:
        ids: list[int] = self._tokenizer(document.text, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
        end = self._tokenizer.eos_token_id
        if isinstance(end, int) and (not ids or ids[-1] != end):
            ids = [*ids, end]
        if len(ids) < 2:
            raise DataError(
                f"{document.source}: the text is {len(ids)} token long", why="nothing predicts its first token"
            )
        length = self._settings.max_length
        pieces = []
        for start in range(0, len(ids) - 1, length - 1):
            piece = torch.tensor(ids[start : start + length], dtype=torch.int64)
            pieces.append((piece, torch.ones_like(piece, dtype=torch.bool)))
        return EncodedDocument(source=document.source, pieces=tuple(pieces))


def encode_documents(
    documents: Sequence[Document],
    tokenizer: PreTrainedTokenizerBase,
    settings: EncodeSettings,
    *,
    progress: Progress | None = None,
) -> list[EncodedDocument]:
    """Encode every document, in order.

    Raises:
        DataError: the tokenizer can't encode such documents at all.
    """
    encoder = DocumentEncoder(tokenizer, settings)
    encoder.check(documents)
    encoded = []
    for done, document in enumerate(documents):
        if progress is not None and done % 50 == 0:
            progress(done, len(documents))
        encoded.append(encoder.encode(document))
    if progress is not None:
        progress(len(documents), len(documents))
    return encoded


def _head(chat: EncodedChat, length: int) -> tuple[tuple[Tensor, Tensor], int]:
    """The first tokens of a chat, and how many supervised ones are cut off."""
    ids = torch.tensor(chat.input_ids[:length], dtype=torch.int64)
    supervised = torch.tensor(chat.supervised[:length], dtype=torch.bool)
    return (ids, supervised), sum(chat.supervised[1:]) - int(supervised[1:].sum())
