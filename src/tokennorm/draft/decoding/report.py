"""What speculative decoding gained, by group of prompts: numbers, JSON, tables and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.draft.decoding.compare import Difference
from tokennorm.draft.decoding.figures import PromptFigures
from tokennorm.draft.decoding.group import DecodeGroup, Pair
from tokennorm.draft.decoding.rounds import Decoded
from tokennorm.errors import DataError

__all__ = ["DecodeReport"]

Row = tuple[str, Decoded, Decoded] | tuple[str, Decoded, Decoded, Difference | None]
ALL = "all"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class DecodeReport:
    """One drafter on groups of prompts.

    Attributes:
        groups: in the order of the tables.
    """

    groups: tuple[DecodeGroup, ...]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> DecodeReport:
        """From ``(group, plain, speculative)``, or with the difference as a fourth, prompt by prompt."""
        groups: dict[str, list[Pair]] = {}
        for row in rows:
            name, plain, speculative, difference = row if len(row) == 4 else (*row, None)
            groups.setdefault(name, []).append((plain, speculative, difference))
        return cls(groups=tuple(DecodeGroup.of(name, pairs) for name, pairs in groups.items()))

    @property
    def overall(self) -> DecodeGroup:
        """All prompts as one group."""
        return DecodeGroup(name=ALL, prompts=tuple(one for group in self.groups for one in group.prompts))

    def group(self, name: str) -> DecodeGroup:
        """The group of that name.

        Raises:
            DataError: there is none.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise DataError(
            f"no group {name!r} in the report", fix=f"one of {', '.join(group.name for group in self.groups)}."
        )

    def to_json(self) -> str:
        """Everything: the figures of each prompt, and what follows from them."""
        groups = [
            {"name": group.name, "summary": group.summary(), "prompts": [one.to_dict() for one in group.prompts]}
            for group in self.groups
        ]
        return json.dumps({"format": _FORMAT, "groups": groups}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> DecodeReport:
        """From :meth:`to_json`; summaries are computed anew.

        Raises:
            DataError: not a report.
        """
        try:
            values = json.loads(text)
            if values["format"] != _FORMAT:
                raise DataError(f"a decode report of format {values['format']}, this version reads {_FORMAT}")
            return cls(
                groups=tuple(
                    DecodeGroup(
                        name=group["name"], prompts=tuple(PromptFigures.from_dict(one) for one in group["prompts"])
                    )
                    for group in values["groups"]
                )
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise DataError(f"this is no decode report: {error!r}", fix="pass what to_json() wrote.") from error

    def table(self) -> str:
        """The tables as text of fixed width."""
        return self._alone().table()

    def markdown(self) -> str:
        """The tables in Markdown."""
        return self._alone().markdown()

    def plot(self, path: str | Path) -> None:
        """Three panels: acceptance by position, accepted lengths, time per token. Needs matplotlib.

        Raises:
            MissingDependencyError: it is not installed.
        """
        self._alone().plot(path)

    def _alone(self) -> Any:
        from tokennorm.draft.decoding.tables import ReportComparison

        return ReportComparison(reports={"": self})
