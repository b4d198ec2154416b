"""Chat templates that print the date: they render another text tomorrow, unless they are held to one day."""

from __future__ import annotations

import ast
import datetime
import functools
import re
from typing import Any

from tokennorm.errors import ConfigError

__all__ = ["can_hold_date", "read_date", "shows_date", "with_date"]

# transformers gives templates the function strftime_now(format).
_NAME = "strftime_now"
_LITERAL = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_CALL = re.compile(rf"{_NAME}\s*\(\s*({_LITERAL})\s*\)")
_ANY_CALL = re.compile(rf"{_NAME}\s*\(")


def shows_date(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template (one of them) prints the date."""
    return any(_ANY_CALL.search(template) for template in _templates(tokenizer))


def can_hold_date(tokenizer: Any) -> bool:
    """Whether :func:`with_date` reaches every place where the template prints the date."""
    return not any(_ANY_CALL.search(_CALL.sub("", template)) for template in _templates(tokenizer))


@functools.lru_cache(maxsize=16)
def with_date(template: str, date: str) -> str:
    """Return the template with the date (``YYYY-MM-DD``, at midnight) in place of ``strftime_now("FORMAT")``.

    A call whose format is no literal stays as it is.

    Raises:
        ConfigError: it is no date.
    """
    day = datetime.datetime.combine(read_date(date), datetime.time())

    def printed(call: re.Match[str]) -> str:
        # Jinja's literals are Python's; what repr() makes is one of both.
        return repr(day.strftime(ast.literal_eval(call[1])))

    return _CALL.sub(printed, template)


def read_date(text: str) -> datetime.date:
    """Return the date that ``YYYY-MM-DD`` names.

    Raises:
        ConfigError: it names none.
    """
    try:
        return datetime.date.fromisoformat(text)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the date {text!r} can't be read: {error}", fix="write it as 2026-12-31") from error


def _templates(tokenizer: Any) -> list[str]:
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        return [str(template) for template in found.values()]
    return [] if found is None else [str(found)]
