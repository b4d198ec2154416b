"""Decode reports as one picture of three panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokennorm.errors import MissingDependencyError

if TYPE_CHECKING:
    from tokennorm.draft.decoding.group import DecodeGroup
    from tokennorm.draft.decoding.tables import ReportComparison

__all__ = ["plot_comparison"]

Series = Sequence[tuple[str, "DecodeGroup"]]
PARTS = {"plain": "#9a9a9a", "target": "#4477aa", "drafter": "#ee7733", "other": "#ccbb44"}


def plot_comparison(comparison: ReportComparison, path: str | Path) -> None:
    """Draw acceptance by position, accepted lengths and time per token; the ending of ``path`` says the format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        # Without pyplot: no window system is asked for, and no figure is left open.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib", fix='install it: pip install "tokennorm[draft]"'
        ) from error
    groups = {group.name for report in comparison.reports.values() for group in report.groups}
    # All prompts together would hide the groups.
    series = [
        (", ".join(part for part in (name, title) if part), one)
        for name, title, one in comparison.series()
        if name in groups
    ]
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    colours = [f"C{number % 10}" for number in range(len(series))]
    _acceptance(left, series, colours)
    _lengths(middle, series, colours)
    _time(right, series)
    figure.savefig(path, dpi=110)


def _acceptance(axes: Any, series: Series, colours: Sequence[str]) -> None:
    for (label, one), colour in zip(series, colours, strict=True):
        places = range(1, len(one.acceptance) + 1)
        shares = [float("nan") if share is None else 100 * share for share in one.acceptance]
        axes.plot(places, shares, marker="o", color=colour, label=label)
        axes.plot(places, [100 * share for share in one.survival], linestyle="--", marker=".", color=colour)
    axes.plot([], [], color="black", label="accepted, of those reached")
    axes.plot([], [], color="black", linestyle="--", label="prefix accepted, of all rounds")
    most = max((len(one.acceptance) for _, one in series), default=1)
    axes.set(title="Acceptance by position", xlabel="proposal", ylabel="%", ylim=(0, 103))
    axes.set_xticks(range(1, most + 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _lengths(axes: Any, series: Series, colours: Sequence[str]) -> None:
    width = 0.8 / len(series)
    for number, ((label, one), colour) in enumerate(zip(series, colours, strict=True)):
        counts, rounds = one.accepted_lengths, max(one.rounds, 1)
        offset = (number - (len(series) - 1) / 2) * width
        tau = "-" if one.tau is None else f"{one.tau:.2f}"
        axes.bar(
            [length + offset for length in range(len(counts))],
            [100 * count / rounds for count in counts],
            width,
            color=colour,
            label=f"{label} (tau {tau})",
        )
    most = max(len(one.accepted_lengths) for _, one in series)
    axes.set(title="Accepted drafted tokens per round", xlabel="tokens", ylabel="% of rounds")
    axes.set_xticks(range(most))
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)


def _time(axes: Any, series: Series) -> None:
    labels: list[str] = []
    drawn = None
    for label, one in series:
        parts = {name: value or 0.0 for name, value in one.milliseconds_per_token.items()}
        # Drafters that were measured in one run share their plain decoding.
        if drawn != (one.name, parts["plain"]):
            axes.bar(len(labels), parts["plain"], color=PARTS["plain"])
            labels.append(f"{one.name}\nplain")
            drawn = (one.name, parts["plain"])
        bottom = 0.0
        for name in ("target", "drafter", "other"):
            axes.bar(len(labels), parts[name], bottom=bottom, color=PARTS[name])
            bottom += parts[name]
        if one.speedup is not None:
            axes.annotate(f"{one.speedup:.2f}x", (len(labels), bottom), ha="center", va="bottom", fontsize=8)
        labels.append(f"{label}\nspeculative" if label == one.name else label.replace(", ", "\n"))
    for name, colour in PARTS.items():
        axes.bar(0, 0, color=colour, label="target, plain" if name == "plain" else name)
    axes.set(title="Time per token after the prefill", ylabel="ms")
    axes.set_xticks(range(len(labels)), labels, fontsize=7, rotation=45 if len(labels) > 4 else 0)
    axes.margins(y=0.1)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
