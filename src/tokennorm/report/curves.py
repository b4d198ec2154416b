"""From the lines of runs to the curves of a page: which there are, and how many points each gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokennorm.report.runs import Record, Run, num_refused, number

__all__ = ["COLOURS", "Curve", "Panel", "Point", "panels"]

# Points of a curve; more are merged, so that a page of a week's run opens at once.
POINTS = 300
# Colours of the page's style; a ninth curve has the first one's again.
COLOURS = 8

# What has a panel of its own, or is no measurement.
_KNOWN = frozenset(
    (
        *("step", "loss", "grad_norm", "lr", "effective_tokens", "total_tokens", "seconds"),
        *("refused", "skipped", "mfu", "memory_bytes", "data_wait"),
    )
)
_SOURCE = re.compile(r"^(?:loss|source)/")


@dataclass(frozen=True, kw_only=True)
class Point:
    """Neighbouring lines of a run: their mean, least and greatest value; all None where none is a number."""

    x: float
    mean: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line of a panel.

    Attributes:
        label: for the legend.
        colour: index into the page's colours.
        points: from left to right.
        style: ``line``, ``dashed``, or ``dots``: a line with a dot at each point.
        missing: places (x) of values that are null: a loss that was NaN or infinite.
    """

    label: str
    colour: int
    points: tuple[Point, ...]
    style: str = "line"
    missing: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot: what is drawn, against what."""

    title: str
    curves: tuple[Curve, ...]
    unit: str = ""
    x_label: str = "step"
    from_zero: bool = False
    logarithmic: bool = False


def panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the panels that the lines of these runs have values for."""
    several = len(runs) > 1
    made = [
        Panel(title="Loss", unit="nats per supervised token", curves=_loss(runs, several)),
        Panel(
            title="Held-out loss over supervised tokens",
            unit="nats per supervised token",
            x_label="supervised tokens trained on",
            curves=tuple(
                _held_out(run, index, _name(run, "held-out", several), over_tokens=True)
                for index, run in _all(runs)
            ),
        ),
        _simple(runs, "Gradient norm", "before clipping", "grad_norm", logarithmic=True),
        _simple(runs, "Learning rate", "", "lr", from_zero=True),
        Panel(title="Tokens per step", unit="all ranks", from_zero=True, curves=_tokens(runs, several)),
        _by_time(runs, "Throughput", "tokens per second, padding not counted", "all tokens", "total_tokens"),
        _simple(runs, "MFU", "part of the device's peak", "mfu", from_zero=True),
        _simple(runs, "Memory", "GiB, of the rank that takes most", "memory_bytes", scale=2**-30, from_zero=True),
        _by_time(runs, "Waiting for data", "part of the step", "data wait", "data_wait"),
        Panel(
            title="Kept out of the training",
            unit="so far: refused micro-batches, windows without a step",
            from_zero=True,
            curves=_kept_out(runs, several),
        ),
    ]
    made += _by_name(runs, several)
    shown = []
    for panel in made:
        curves = tuple(curve for curve in panel.curves if any(point.mean is not None for point in curve.points))
        if curves:
            shown.append(Panel(**{**panel.__dict__, "curves": curves}))
    return shown


def _all(runs: Sequence[Run]) -> Iterator[tuple[int, Run]]:
    return iter(enumerate(runs))


def _name(run: Run, what: str, several: bool) -> str:
    return f"{run.name}: {what}" if several else what


def _of(name: str, scale: float = 1.0) -> Callable[[Record], float | None]:
    def value(record: Record) -> float | None:
        found = number(record.get(name))
        return None if found is None else found * scale

    return value


_step = _of("step")


def _curve(
    records: Sequence[Record],
    value: Callable[[Record], float | None],
    colour: int,
    label: str,
    *,
    weight: Callable[[Record], float | None] | None = None,
    x: Callable[[Record], float | None] = _step,
    style: str = "line",
    name: str = "",
) -> Curve:
    """Merge the lines into at most POINTS points; ``weight`` makes the mean of ratios the ratio of the sums."""
    points, missing = [], []
    size = max(1, -(-len(records) // POINTS))
    for start in range(0, len(records), size):
        part = records[start : start + size]
        pairs = [(value(one), 1.0 if weight is None else weight(one) or 0.0) for one in part]
        pairs = [(found, share) for found, share in pairs if found is not None]
        total = sum(share for _, share in pairs)
        values = [found for found, _ in pairs]
        mean = sum(found * share for found, share in pairs) / total if total else sum(values) / max(len(values), 1)
        place = x(part[-1]) or 0.0
        points.append(
            Point(x=place, mean=mean, low=min(values), high=max(values))
            if values
            else Point(x=place, mean=None, low=None, high=None)
        )
        # Null where there should be a number: what a NaN or an infinity looks like in JSON.
        missing += [
            x(one) or 0.0 for one in part if name is not None and name in one and number(one[name]) is None
        ]
    return Curve(label=label, colour=colour, points=tuple(points), style=style, missing=tuple(missing))


def _loss(runs: Sequence[Run], several: bool) -> tuple[Curve, ...]:
    curves = []
    for index, run in _all(runs):
        colour = index if several else 0
        curves.append(
            _curve(
                run.steps,
                _of("loss"),
                colour,
                _name(run, "training", several),
                weight=_of("effective_tokens"),
                name="loss",
            )
        )
        curves.append(_held_out(run, index if several else 1, _name(run, "held-out", several)))
    return tuple(curves)


def _held_out(run: Run, colour: int, label: str, *, over_tokens: bool = False) -> Curve:
    seen, tokens = {0: 0.0}, 0.0
    for record in run.steps:
        tokens += number(record.get("effective_tokens")) or 0.0
        seen[record["step"]] = tokens
    place = (lambda one: seen.get(one["step"], tokens)) if over_tokens else _step
    return _curve(run.evals, _of("eval_loss"), colour, label, x=place, style="dots", name="eval_loss")


def _tokens(runs: Sequence[Run], several: bool) -> tuple[Curve, ...]:
    return tuple(
        _curve(
            run.steps,
            _of(name),
            index if several else place,
            _name(run, label, several),
            style="dashed" if several and place else "line",
        )
        for index, run in _all(runs)
        for place, (name, label) in enumerate((("total_tokens", "total"), ("effective_tokens", "supervised")))
    )


def _kept_out(runs: Sequence[Run], several: bool) -> tuple[Curve, ...]:
    curves = []
    for index, run in _all(runs):
        refused = skipped = 0
        lines: list[Record] = []
        for record in sorted((*run.steps, *run.skips), key=lambda one: one["step"]):
            refused += num_refused(record)
            skipped += bool(record.get("skipped"))
            lines.append({"step": record["step"], "refused": refused, "skipped": skipped})
        for place, (name, label) in enumerate(
            (("refused", "refused micro-batches"), ("skipped", "windows skipped"))
        ):
            if lines and lines[-1][name]:
                style = "dashed" if several and place else "line"
                colour = index if several else place
                curves.append(_curve(lines, _of(name), colour, _name(run, label, several), style=style))
    return tuple(curves)


def _simple(
    runs: Sequence[Run],
    title: str,
    unit: str,
    name: str,
    *,
    scale: float = 1.0,
    from_zero: bool = False,
    logarithmic: bool = False,
) -> Panel:
    curves = tuple(
        _curve(run.steps, _of(name, scale), index, _name(run, title.lower(), len(runs) > 1), name=name)
        for index, run in _all(runs)
    )
    return Panel(title=title, unit=unit, curves=curves, from_zero=from_zero, logarithmic=logarithmic)


def _by_time(runs: Sequence[Run], title: str, unit: str, label: str, name: str) -> Panel:
    """Something per second; the mean of several steps is their sum over their time."""

    def value(record: Record) -> float | None:
        amount, seconds = number(record.get(name)), number(record.get("seconds"))
        return None if amount is None or not seconds else amount / seconds

    curves = tuple(
        _curve(run.steps, value, index, _name(run, label, len(runs) > 1), weight=_of("seconds"))
        for index, run in _all(runs)
    )
    return Panel(title=title, unit=unit, curves=curves, from_zero=True)


def _by_name(runs: Sequence[Run], several: bool) -> list[Panel]:
    """Losses per source and whatever else the lines hold; numbered metrics of a kind share a panel."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        for records, prefix in ((run.steps, ""), (run.evals, "eval_")):
            for name in dict.fromkeys(name for one in records for name in one):
                bare = name.removeprefix(prefix)
                if not name.startswith(prefix) or bare in _KNOWN:
                    continue
                group = "Loss by source" if _SOURCE.match(bare) else re.sub(r"_\d+$", "", bare)
                # One run: all of a group in one panel. Several: a panel for each name, a colour for each run.
                members = groups.setdefault(bare if several else group, [])
                if bare not in members:
                    members.append(bare)
    made = []
    for group, names in sorted(groups.items(), key=lambda item: ("source" not in item[0].lower(), item[0])):
        curves = []
        for index, run in _all(runs):
            for place, bare in enumerate(names):
                colour = index if several else place
                curves.append(_curve(run.steps, _of(bare), colour, _name(run, _label(bare), several), name=bare))
                name = f"eval_{bare}"
                held_out = _name(run, f"{_label(bare)}, held-out", several)
                curves.append(_curve(run.evals, _of(name), colour, held_out, style="dots", name=name))
        made.append(Panel(title=group, curves=tuple(curves)))
    return made


def _label(name: str) -> str:
    return _SOURCE.sub("", name)
