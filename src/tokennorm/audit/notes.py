"""Remarks that are no verdict: what the audit changed or left out, and logged numbers that are off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokennorm.audit.evidence import Evidence
from tokennorm.audit.jobs import Description
from tokennorm.audit.reference import WindowKey
from tokennorm.audit.report import LayoutReport

__all__ = ["make_notes"]

_LOGGED = 1e-3


def make_notes(
    description: Description,
    reports: Sequence[LayoutReport],
    evidence: Mapping[WindowKey, Evidence],
    *,
    own_clipping: float | None,
) -> tuple[str, ...]:
    """All remarks for a report.

    Args:
        description: of the model.
        reports: of the layouts.
        evidence: of the windows.
        own_clipping: the norm to which the loop clips with code of its own.
    """
    notes = []
    if description.dropout:
        notes.append("dropout modules were set to p = 0, in the loop and in the reference")
    if not any(report.packed for report in reports) and not description.takes_positions:
        notes.append("no packed layouts: the model's forward takes no position_ids, so it can't isolate documents")
    if own_clipping is not None:
        notes.append(f"the loop clips gradients to a norm of {own_clipping:.4g} with code of its own")
    notes += _logged(reports)
    if any(e.extras for e in evidence.values()):
        notes.append(
            "the auxiliary loss is no sum over tokens: its reference keeps the loop's own micro-batches, "
            "weighted as declared"
        )
    changed = sorted({key for e in evidence.values() for key in e.changed_keys})
    if changed:
        notes.append(f"the step changed its micro-batches ({', '.join(changed)}); the reference has the originals")
    missing = sorted({name for e in evidence.values() for name in e.missing})
    if missing:
        notes.append(
            f"no gradient at the optimizer's step: {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}"
        )
    broken = [e for e in evidence.values() if not e.finite]
    if broken:
        where = sorted({f"{e.ranks} ranks x {e.layout.micro_batches}, {e.layout.name}" for e in broken})
        notes.append(f"gradients are not finite in: {'; '.join(where)}")
    disagreement = max((e.disagreement for e in evidence.values() if not e.ranks_agree), default=0.0)
    if disagreement:
        notes.append(f"ranks step with different gradients (relative difference up to {disagreement:.2g})")
    return tuple(notes)


def _logged(reports: Sequence[LayoutReport]) -> list[str]:
    """Logged numbers that differ from what they should say."""
    windows = [window for report in reports for window in report.windows]
    notes = []
    losses = [w for w in windows if w.logged_loss is not None]
    for window in losses:
        right = (window.reference_loss, window.reference_token_loss)
        if all(_differs(window.logged_loss, value) for value in right):
            notes.append(
                f"the logged loss is not that of the window: {window.logged_loss:.4f} logged on rank 0, "
                f"{window.reference_loss:.4f} right"
            )
            break
    for window in windows:
        if _differs(window.logged_tokens, window.supervised_tokens):
            notes.append(
                f"the logged token count is {window.logged_tokens:g} on rank 0, "
                f"the window has {window.supervised_tokens:g} supervised tokens"
            )
            break
    return notes


def _differs(logged: float | None, right: float) -> bool:
    return logged is not None and not abs(logged - right) <= _LOGGED * abs(right)
