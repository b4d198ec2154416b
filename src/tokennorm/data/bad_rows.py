"""Rows that can't be used: an error, or left out and counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokennorm.errors import ConfigError, DataError

__all__ = ["BadRows", "list_errors"]

SHOWN_ERRORS = 5


@dataclass(frozen=True, kw_only=True)
class BadRows:
    """What becomes of rows that can't be read, rendered or masked.

    Attributes:
        action: ``error``: the first few are named and nothing is trained. ``skip``: they are left out, counted
            and reported, unless they are too many.
        max_share: with ``skip``, the largest share of bad rows that is let pass, 0 to 1.
    """

    action: Literal["error", "skip"] = "error"
    max_share: float = 0.01

    def __post_init__(self) -> None:
        if self.action not in ("error", "skip"):
            raise ConfigError(f"bad rows: the action is {self.action!r}", fix="use error or skip")
        if not 0 <= self.max_share <= 1:
            raise ConfigError(f"bad rows: the largest share is {self.max_share}", fix="give a number in [0, 1]")

    def settle(self, errors: Sequence[DataError], total: int, where: str) -> None:
        """Raise if these bad rows of ``total`` in ``where`` can't be let pass.

        Raises:
            DataError: the only bad row's own error, or one that lists the first few with file and line.
        """
        if not errors or (self.action == "skip" and len(errors) <= self.max_share * total):
            return
        if len(errors) == 1 and self.action == "error":
            raise errors[0]
        allowed = f", more than the share {self.max_share:g} that is let pass" if self.action == "skip" else ""
        raise DataError(
            f"{len(errors)} bad rows of {total} in {where}{allowed}:\n" + list_errors(errors),
            why=errors[0].why,
            fix=errors[0].fix or "correct or remove these rows",
        )

    def report(self, errors: Sequence[DataError], total: int, where: str) -> list[str]:
        """A sentence about the rows that were left out; none if there was none."""
        if not errors:
            return []
        return [f"{len(errors):,} bad rows of {total:,} in {where} are left out:\n{list_errors(errors)}"]


def list_errors(errors: Sequence[DataError]) -> str:
    """The first few errors, a line each, and how many more there are."""
    shown = [f"  {error.what}" for error in errors[:SHOWN_ERRORS]]
    if len(errors) > SHOWN_ERRORS:
        shown.append(f"  and {len(errors) - SHOWN_ERRORS} more")
    return "\n".join(shown)
