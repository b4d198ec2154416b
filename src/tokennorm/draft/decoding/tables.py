"""Decode reports as tables, one or several side by side: before and after training, with and without a head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokennorm.draft.decoding.figures import Interval
from tokennorm.draft.decoding.group import DecodeGroup
from tokennorm.draft.decoding.report import DecodeReport
from tokennorm.errors import DataError

__all__ = ["ReportComparison", "compare_reports"]

Table = list[list[str]]


@dataclass(frozen=True, kw_only=True)
class ReportComparison:
    """Several reports on the same groups.

    Attributes:
        reports: by name; the name "" is not printed.
    """

    reports: Mapping[str, DecodeReport]

    def __post_init__(self) -> None:
        if not self.reports or not all(report.groups for report in self.reports.values()):
            raise DataError("nothing to compare: no reports, or one without groups")

    def series(self) -> Iterator[tuple[str, str, DecodeGroup]]:
        """``(group, report, figures)``, group by group; last all prompts together, if there are several groups."""
        names = list(dict.fromkeys(group.name for report in self.reports.values() for group in report.groups))
        for name in names:
            for title, report in self.reports.items():
                for group in report.groups:
                    if group.name == name:
                        yield name, title, group
        if len(names) > 1:
            for title, report in self.reports.items():
                yield report.overall.name, title, report.overall

    def table(self) -> str:
        """Text of fixed width."""
        return "\n\n".join(f"{title}\n{_fixed_width(table)}" for title, table in self._tables())

    def markdown(self) -> str:
        """The same in Markdown."""
        return "\n\n".join(f"**{title}**\n\n{_markdown(table)}" for title, table in self._tables())

    def plot(self, path: str | Path) -> None:
        """Three panels: acceptance by position, accepted lengths, time per token. Needs matplotlib.

        Raises:
            MissingDependencyError: it is not installed.
        """
        from tokennorm.draft.decoding.plot import plot_comparison

        plot_comparison(self, path)

    def _tables(self) -> Iterator[tuple[str, Table]]:
        rows = list(self.series())
        named = any(title for _, title, _ in rows)
        label = ["prompts of", *(["drafter"] if named else [])]

        def labels(group: str, title: str) -> list[str]:
            return [group, *([title] if named else [])]

        yield (
            "Tokens per round (the target's own included; 95 % intervals over prompts)",
            [
                [*label, "prompts", "tokens", "rounds", "tau", "interval", "drafted", "verified"],
                *(
                    [
                        *labels(group, title),
                        str(len(one.prompts)),
                        str(one.tokens),
                        str(one.rounds),
                        _number(one.tau),
                        _interval(one.tau_interval),
                        _number(one.tau_drafted),
                        _number(one.mean_verified),
                    ]
                    for group, title, one in rows
                ),
            ],
        )
        positions = max(len(one.acceptance) for _, _, one in rows)
        numbers = [str(k + 1) for k in range(positions)]
        yield (
            "Acceptance by position (of those reached), and the share of rounds that got past it",
            [
                [*label, "", *numbers],
                *(
                    [*labels(group, title), what, *(_percent(values, k) for k in range(positions))]
                    for group, title, one in rows
                    for what, values in (("accepted", one.acceptance), ("survived", one.survival))
                ),
            ],
        )
        yield (
            "Speed (after the prefill, unless it says so)",
            [
                [*label, "plain tok/s", "tok/s", "speed-up", "interval", "with prefill", "same output", "ties"],
                *(
                    [
                        *labels(group, title),
                        _number(one.plain_tokens_per_second, 1),
                        _number(one.tokens_per_second, 1),
                        _number(one.speedup),
                        _interval(one.speedup_interval),
                        _number(one.speedup_with_prefill),
                        f"{one.identical} of {len(one.prompts)}",
                        str(one.ties),
                    ]
                    for group, title, one in rows
                ),
            ],
        )
        yield (
            "Milliseconds",
            [
                [
                    *label,
                    "plain/token",
                    "target/token",
                    "drafter/token",
                    "other/token",
                    "verify/round",
                    "draft/round",
                ],
                *(
                    [
                        *labels(group, title),
                        *(_number(value, 1) for value in one.milliseconds_per_token.values()),
                        *(_number(value, 1) for value in one.milliseconds_per_round.values()),
                    ]
                    for group, title, one in rows
                ),
            ],
        )


def compare_reports(reports: Mapping[str, DecodeReport]) -> ReportComparison:
    """Reports side by side, such as ``{"untrained": before, "trained": after}``: ``table()``, ``markdown()``,
    ``plot(path)``.

    Raises:
        DataError: none, or one without groups.
    """
    return ReportComparison(reports=dict(reports))


def _fixed_width(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    left = _left_columns(table)
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _markdown(table: Table) -> str:
    left = _left_columns(table)
    rule = [":--" if column < left else "--:" for column in range(len(table[0]))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (table[0], rule, *table[1:]))


def _left_columns(table: Table) -> int:
    """Words to the left, numbers to the right."""
    return 1 + sum(name in ("drafter", "") for name in table[0])


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(value: Interval | None) -> str:
    return "-" if value is None else f"{value[0]:.2f} to {value[1]:.2f}"


def _percent(values: tuple[float | None, ...], k: int) -> str:
    value = values[k] if k < len(values) else None
    return "-" if value is None else f"{100 * value:.1f} %"
