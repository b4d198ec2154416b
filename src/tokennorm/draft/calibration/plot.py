"""Reliability diagrams of a confidence head, before and after temperature scaling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokennorm.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from tokennorm.draft.calibration.result import CalibrationResult

__all__ = ["plot_calibration"]

_STYLES = (("before", "#d55e00", "s"), ("after", "#0072b2", "o"))
_COLUMNS = 4
_LARGEST_MARKER = 90.0


def plot_calibration(result: CalibrationResult, path: str | Path) -> None:
    """Draw one panel for each proposal (observed frequency over mean estimate), and one with the ECE by proposal.

    The area of a marker shows how many rounds are in its bin. The dotted line is the ECE of chance alone.

    Args:
        result: of :func:`~tokennorm.draft.calibration.result.calibrate`.
        path: of the image; its ending says the format.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        ConfigError: the file can't be written, or its ending is no image format.
    """
    try:
        # A figure without pyplot: no window, and no global state that a notebook of the user's would share.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib", fix='install it: pip install "tokennorm[draft]"'
        ) from error

    panels = len(result.temperatures) + 1
    columns = min(_COLUMNS, panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(3.1 * columns, 3.1 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for k, axis in enumerate(axes[: panels - 1]):
        _reliability(axis, result, k)
    _errors(axes[panels - 1], result)
    for axis in axes:
        axis.tick_params(labelsize="x-small")
    for axis in axes[panels:]:
        axis.set_axis_off()
    figure.suptitle(f"Survival of the drafted prefix: {result.held_rounds} held-out rounds", fontsize="medium")
    try:
        figure.savefig(Path(path), dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be written: {error}") from error


def _reliability(axis: Any, result: CalibrationResult, k: int) -> None:
    axis.plot([0, 1], [0, 1], color="0.6", linewidth=1)
    for report, (name, colour, marker) in zip((result.before, result.after), _STYLES, strict=True):
        bins = report.positions[k].reliability()
        if not bins:
            continue
        predicted, frequency, counts = zip(*bins, strict=True)
        sizes = [max(6.0, _LARGEST_MARKER * count / max(counts)) for count in counts]
        axis.plot(predicted, frequency, color=colour, linewidth=0.8, alpha=0.6)
        axis.scatter(predicted, frequency, s=sizes, color=colour, marker=marker, alpha=0.7, label=name)
    axis.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), aspect="equal")
    axis.set_title(f"proposal {k + 1}, T = {result.temperatures[k]:.2f}", fontsize="small")
    axis.set_xlabel("estimated", fontsize="small")
    axis.set_ylabel("survived", fontsize="small")


def _errors(axis: Any, result: CalibrationResult) -> None:
    numbers = [k + 1 for k in range(len(result.temperatures))]

    def percent(report: Any, attribute: str) -> list[float]:
        values = [getattr(each, attribute) for each in report.positions]
        return [float("nan") if value is None else 100 * value for value in values]

    for report, (name, colour, marker) in zip((result.before, result.after), _STYLES, strict=True):
        axis.plot(numbers, percent(report, "ece"), color=colour, marker=marker, label=name)
    axis.plot(numbers, percent(result.after, "ece_floor"), color="0.4", linestyle=":", label="chance alone")
    axis.set_ylim(bottom=0)
    axis.set_xticks(numbers)
    axis.set_title("calibration error", fontsize="small")
    axis.set_xlabel("proposal", fontsize="small")
    axis.set_ylabel("ECE, %", fontsize="small")
    axis.legend(fontsize="x-small")
