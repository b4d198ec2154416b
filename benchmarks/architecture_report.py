"""The survey of architectures as Markdown."""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, field

import torch
import transformers

from benchmarks.architecture_check import CHUNK, LENGTH, ROWS, TOLERANCES, Verdict
from benchmarks.shrunk_models import VOCABULARY

# From best to worst: a class gets the worst of its dtypes.
OUTCOMES = ("right", "materialised", "refused", "wrong", "not built")
HEADINGS = {
    "right": "Right, without ever materialising the logits",
    "materialised": "Right, but materialised",
    "refused": "Refused",
    "wrong": "Wrong",
    "not built": "Could not be built or run unpatched",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One class in the survey."""

    name: str
    outcome: str
    detail: str = ""
    verdicts: dict[torch.dtype, Verdict] = field(default_factory=dict)


def report(rows: list[Row], command: str) -> str:
    """The whole file."""
    counts = Counter(row.outcome for row in rows)
    lines = [
        "# Which architectures the model patch is right for",
        "",
        f"Command: `{command}` (`make survey`)",
        "",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread used.",
        "",
        "Every class in transformers' causal-LM and image-text-to-text mappings, shrunk (vocabulary "
        f"{VOCABULARY}) and with its logit scale, softcap, vocabulary slice, router loss and z-loss switched on, "
        f"on {ROWS} x {LENGTH} tokens with some labels ignored, {CHUNK} rows of logits at a time, "
        "against the unpatched class: every token's loss, the whole loss times the number of tokens (so a router "
        "or other extra loss too), and the gradients of all parameters, for an uneven and for a uniform upstream. "
        f"Right: relative L2 differences of at most {TOLERANCES[torch.float32]:g} in float32 and, where the "
        f"unpatched side is float64 too, {TOLERANCES[torch.float64]:g} in float64. Vision-language models run on "
        "text alone.",
        "",
        "| outcome | classes |",
        "|---|---:|",
        *(f"| {HEADINGS[outcome].lower()} | {counts[outcome]} |" for outcome in OUTCOMES),
        f"| all | {len(rows)} |",
    ]
    for outcome in ("wrong", "refused", "materialised"):
        lines += _reasons(rows, outcome)
    lines += _figures(rows)
    lines += _reasons(rows, "not built")
    return "\n".join(lines) + "\n"


def _reasons(rows: list[Row], outcome: str) -> list[str]:
    chosen = [f"| {row.name} | {_cell(row.detail)} |" for row in rows if row.outcome == outcome]
    return ["", f"## {HEADINGS[outcome]}", "", "| class | why |", "|---|---|", *chosen] if chosen else []


def _figures(rows: list[Row]) -> list[str]:
    lines = [
        "",
        f"## {HEADINGS['right']}",
        "",
        "Largest relative L2 difference of losses and gradients from what the unpatched model's logits give, and "
        "from its own loss (which transformers always computes in float32). Gradients count twice: all of them "
        "together, and the head's alone, which is what the patch changes. Float64 says most about the head: many "
        "bodies cast to float32 inside (RMSNorm does), which rounds a difference of 1e-16 away, so that their "
        "gradients are often bitwise equal. Extra: it adds a loss of its own.",
        "",
        "| class | f32, logits | f32, loss | f64, logits | f64, loss | extra | note |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    for row in rows:
        if row.outcome == "right":
            verdicts = [row.verdicts.get(dtype) for dtype in TOLERANCES]
            cells = ["- | -" if it is None else f"{it.by_logits:.0e} | {it.by_loss:.0e}" for it in verdicts]
            extra = "yes" if any(it is not None and it.has_extra for it in verdicts) else ""
            lines.append(f"| {row.name} | {' | '.join(cells)} | {extra} | {_cell(row.detail)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
