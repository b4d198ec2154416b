"""The tables of the page: what came of each run, its configuration, and where it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from tokennorm.report.curves import COLOURS, Curve
from tokennorm.report.runs import Record, Run, num_refused, number

__all__ = ["configuration", "legend", "provenance", "summary"]

_MISSING = "not there"


def summary(runs: Sequence[Run]) -> str:
    """One column per run: steps, losses, tokens, time, and what was kept out."""
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("Steps", _progress),
        ("Held-out loss, first to last", _held_out),
        ("Lowest held-out loss", _best),
        ("Training loss, last", lambda run: _shown(_last(run.steps, "loss"), ".4f")),
        ("Supervised tokens", lambda run: f"{_total(run.steps, 'effective_tokens'):,.0f}"),
        ("All tokens", lambda run: f"{_total(run.steps, 'total_tokens'):,.0f}"),
        ("Time in steps", lambda run: _duration(_total((*run.steps, *run.skips), "seconds"))),
        ("Tokens per second", _rate),
        ("Memory, most", _memory),
        (
            "Micro-batches refused",
            lambda run: str(_refused((*run.steps, *run.skips))),
        ),
        ("Windows skipped", lambda run: _skips(run.skips)),
        ("Lines that can't be read", lambda run: str(run.unreadable) if run.unreadable else ""),
    ]
    cells = [(label, [value(run) for run in runs]) for label, value in rows]
    return _table(runs, [(label, values) for label, values in cells if any(values)])


def provenance(runs: Sequence[Run]) -> str:
    """One column per run: command, start, versions, git state, from ``run.json``."""
    flat = [_flatten(_git_first(run.facts)) for run in runs]
    return _compared(runs, flat)


def configuration(runs: Sequence[Run]) -> str:
    """One column per run; of several runs, the values that differ come first and are marked."""
    return _compared(runs, [_flatten(run.config) for run in runs])


def _compared(runs: Sequence[Run], flat: Sequence[Mapping[str, str]]) -> str:
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = [(name, [one.get(name, _MISSING) for one in flat]) for name in names]
    if not rows:
        return "<p>Nothing was written down.</p>"
    differing = [row for row in rows if len(set(row[1])) > 1]
    same = [row for row in rows if len(set(row[1])) == 1]
    if len(runs) == 1:
        return f"<details><summary>{len(same)} values</summary>{_table(runs, same)}</details>"
    marked = _table(runs, differing, mark=True) if differing else "<p>No value differs.</p>"
    if not same:
        return marked
    return (
        f"{marked}<details><summary>{len(same)} values that all runs share</summary>{_table(runs, same)}</details>"
    )


def _git_first(facts: Record) -> Record:
    """The git state as words, and the configuration's copy of the data settings left out."""
    git = facts.get("git")
    shown = {name: value for name, value in facts.items() if name not in ("git", "data")}
    if isinstance(git, dict):
        state = "with changes that are not committed" if git.get("modified") else "as committed"
        shown["git"] = f"{git.get('commit')}, {state}"
    command = facts.get("command")
    if isinstance(command, list):
        shown["command"] = " ".join(map(str, command))
    return shown


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        flat: dict[str, str] = {}
        for name, item in value.items():
            flat.update(_flatten(item, f"{prefix}.{name}" if prefix else str(name)))
        return flat
    if isinstance(value, dict) and not prefix:
        return {}
    return {prefix: value if isinstance(value, str) else json.dumps(value)}


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]], *, mark: bool = False) -> str:
    head = ""
    if len(runs) > 1:
        names = "".join(
            f'<th><span class="key c{i % 8}"></span>{escape(run.name)}</th>' for i, run in enumerate(runs)
        )
        head = f"<thead><tr><th></th>{names}</tr></thead>"
    style = ' class="differs"' if mark else ""
    body = "".join(
        f'<tr{style}><th scope="row">{escape(label)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in values)
        + "</tr>"
        for label, values in rows
    )
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def legend(curves: Sequence[Curve]) -> str:
    """A coloured key and a name for each curve, and the last value."""
    entries = []
    for curve in curves:
        last = next((point.mean for point in reversed(curve.points) if point.mean is not None), None)
        value = "" if last is None else f" <b>{last:.4g}</b>"
        broken = f' <span class="bad">{len(curve.missing)} not finite</span>' if curve.missing else ""
        dashed = " dashed" if curve.style == "dashed" else " dots" if curve.style == "dots" else ""
        key = f'<span class="key c{curve.colour % COLOURS}{dashed}"></span>'
        entries.append(f"<li>{key}{escape(curve.label)}{value}{broken}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _progress(run: Run) -> str:
    done = run.steps[-1]["step"] if run.steps else max((one["step"] for one in run.evals), default=0)
    planned = run.facts.get("total_steps")
    return f"{done:,} of {planned:,}" if isinstance(planned, int) else f"{done:,}"


def _held_out(run: Run) -> str:
    losses = [loss for one in run.evals if (loss := number(one.get("eval_loss"))) is not None]
    return "" if not losses else f"{losses[0]:.4f}" if len(losses) == 1 else f"{losses[0]:.4f} → {losses[-1]:.4f}"


def _best(run: Run) -> str:
    losses = [(loss, one["step"]) for one in run.evals if (loss := number(one.get("eval_loss"))) is not None]
    return f"{min(losses)[0]:.4f} at step {min(losses)[1]:,}" if losses else ""


def _rate(run: Run) -> str:
    seconds = _total(run.steps, "seconds")
    return f"{_total(run.steps, 'total_tokens') / seconds:,.0f}" if seconds else ""


def _memory(run: Run) -> str:
    peak = max((number(one.get("memory_bytes")) or 0.0 for one in run.steps), default=0.0)
    return f"{peak / 2**30:.2f} GiB" if peak else ""


def _refused(records: Sequence[Record]) -> int:
    return sum(map(num_refused, records))


def _skips(skips: Sequence[Record]) -> str:
    reasons: dict[str, int] = {}
    for one in skips:
        reason = str(one["skipped"])
        reasons[reason] = reasons.get(reason, 0) + 1
    return ", ".join(f"{count} ({reason})" for reason, count in reasons.items()) or "0"


def _last(records: Sequence[Record], name: str) -> float | None:
    return number(records[-1].get(name)) if records else None


def _total(records: Sequence[Record], name: str) -> float:
    return sum(number(one.get(name)) or 0.0 for one in records)


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    if not seconds:
        return ""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {round(seconds) % 60:02d} s"
