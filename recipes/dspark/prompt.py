"""A question to the target, and the hashes that decide which part it belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["Prompt", "hash_percent", "text_hash"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question to the target.

    Attributes:
        id: unique; of the embedded prompts a hash of the text, so that it stays when others come and go.
        group: ``structured``, ``free_form`` or what a user's file says; results are reported by it.
        task: kind of prompt inside the group.
        text: of the last user message.
        held_out: for evaluation only.
        context: messages before the last one, as (role, content).
    """

    id: str
    group: str
    task: str
    text: str
    held_out: bool
    context: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat that the target answers."""
        turns = (*self.context, ("user", self.text))
        return [{"role": role, "content": content} for role, content in turns]


def text_hash(text: str) -> str:
    """12 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def hash_percent(text: str) -> float:
    """A number from 0 to below 100 that depends on the text alone, evenly spread over texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 * 100
