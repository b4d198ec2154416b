"""The report of :mod:`benchmarks.dspark_smollm2`: tables, and the curves of tau over trained tokens."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tokennorm.draft import DecodeGroup, DecodeReport, ReportComparison
from tokennorm.recipes.dspark.generate import read_answers

GROUPS = ("structured", "free_form")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One trained drafter."""

    title: str
    seed: int
    epochs: int
    timed: bool
    folder: Path

    @property
    def trained(self) -> bool:
        """Whether it is there."""
        return (self.folder / "drafter").exists()

    def records(self) -> list[dict[str, Any]]:
        """The lines of its training."""
        return [json.loads(line) for line in (self.folder / "train" / "metrics.jsonl").read_text().splitlines()]

    def curve(self) -> list[tuple[float, float]]:
        """(tokens read so far, tau on held-out answers, teacher-forced) at each evaluation."""
        tokens, points = 0.0, []
        for record in self.records():
            tokens += record.get("total_tokens", 0)
            if record.get("eval_tau") is not None:
                points.append((tokens, record["eval_tau"]))
        return points

    def reports(self) -> dict[str, DecodeReport]:
        """What was decoded with it, by name."""
        path = self.folder / "evaluation" / "report.json"
        if path.exists():
            return {
                name: DecodeReport.from_json(json.dumps(values))
                for name, values in json.loads(path.read_text()).items()
            }
        path = self.folder / "tau.json"
        return {"trained": DecodeReport.from_json(path.read_text())} if path.exists() else {}


def write_report(results: Path, entries: Sequence[Entry]) -> None:
    """Write ``dspark_smollm2.md`` and its pictures into ``results``."""
    timed = [entry for entry in entries if entry.timed]
    _plot_curves(entries, results / "dspark_smollm2_curves.png")
    lines = [*_head(entries), *_summary(timed), *_comparison(entries), *_curves(entries)]
    for entry in timed:
        lines += _timed(entry, results)
    (results / "dspark_smollm2.md").write_text("\n".join(lines).rstrip() + "\n")


def _head(entries: Sequence[Entry]) -> Iterator[str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    run = json.loads((entries[0].folder / "train" / "run.json").read_text())
    yield "# Drafters for SmolLM2-135M, decoded\n"
    yield (
        f"`python -m benchmarks.dspark_smollm2`, report of commit {commit.stdout.strip()}, trained on commit "
        f"{run['git']['commit'][:7]}. {platform.machine()}, 2 shared cores, one thread per run, two "
        f"runs side by side, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]} (CPU), "
        f"transformers {transformers.__version__}, float32.\n"
    )
    first = entries[0].records()
    counts = Counter(answer.group for answer in read_answers(entries[0].folder / "answers.jsonl"))
    per_epoch = sum(record.get("total_tokens", 0) for record in first) / entries[0].epochs
    yield (
        f"Target: SmolLM2-135M-Instruct. {counts['structured']:,} structured, {counts['free_form']:,} free-form "
        f"training prompts, answered by the target (greedy, up to 128 tokens); an epoch reads {per_epoch:,.0f} "
        "tokens. Drafters of one layer, 7 proposals, "
        "32 anchors per answer, vocabulary 8,192, Markov rank 128 where there is a Markov head; one answer per "
        "step, lr 2e-3 (Markov head 2e-2), cosine. Held-out prompts are never trained on; answers of up to 128 "
        "tokens, greedy, batch 1.\n"
    )
    yield (
        "tau: tokens per round of draft and verify, the target's own token included; an untrained drafter has 1. "
        "Intervals: 95 %, bootstrap over prompts.\n"
    )


def _summary(timed: Sequence[Entry]) -> Iterator[str]:
    reports = {entry.seed: entry.reports() for entry in timed if entry.reports()}
    if not reports:
        return
    tokens = max(tokens for entry in timed for tokens, _ in entry.curve())
    yield f"## The long training ({tokens:,.0f} tokens read), decoded and timed\n"
    yield "| seed | prompts | tau | speed-up | with a schedule | same output as plain decoding |"
    yield "|---:|---|---|---|---|---|"
    for seed, found in reports.items():
        for name in GROUPS:
            group = found["trained"].group(name)
            cells = [_tau(group), _speedup(group)]
            cells.append(_speedup(found["scheduled"].group(name)) if "scheduled" in found else "-")
            same = [f"{one.group(name).identical} of {len(one.group(name).prompts)}" for one in _full(found)]
            ties = sum(one.group(name).ties for one in _full(found))
            cells.append(", ".join(dict.fromkeys(same)) + (f" ({ties} at a tie)" if ties else ""))
            yield f"| {seed} | {name} | " + " | ".join(cells) + " |"
    yield (
        "\nSpeed-up: plain over speculative seconds per token after the prefill, same process, prompt by prompt. "
        "Where it is below 1, verifying eight tokens costs more than the accepted ones save; the milliseconds "
        "below say where the time goes. A schedule (see below) verifies fewer.\n"
    )


def _full(found: dict[str, DecodeReport]) -> list[DecodeReport]:
    return [report for name, report in found.items() if name != "untrained"]


def _speedup(group: DecodeGroup) -> str:
    interval = group.speedup_interval
    between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return "-" if group.speedup is None else f"{group.speedup:.2f}{between}"


def _comparison(entries: Sequence[Entry]) -> Iterator[str]:
    yield "## Decoded tau on held-out prompts\n"
    yield "| drafter | epochs | seed | prompts | structured | free-form |"
    yield "|---|---:|---:|---:|---|---|"
    for entry in entries:
        report = entry.reports().get("trained")
        if report is None:
            continue
        cells = " | ".join(_tau(report.group(name)) for name in GROUPS)
        yield (
            f"| {entry.title.split(f', {entry.epochs} epochs')[0]} | {entry.epochs} | {entry.seed} | "
            f"{len(report.overall.prompts)} | {cells} |"
        )
    yield ""


def _tau(group: DecodeGroup) -> str:
    interval = group.tau_interval
    between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    return "-" if group.tau is None else f"{group.tau:.2f}{between}"


def _curves(entries: Sequence[Entry]) -> Iterator[str]:
    yield "## tau over trained tokens\n"
    yield "On held-out answers of both groups, teacher-forced, at temperature 1 (the expected tokens per round):\n"
    yield "![tau over trained tokens](dspark_smollm2_curves.png)\n"
    for entry in entries:
        points = ", ".join(f"{tokens / 1000:,.0f}k: {tau:.2f}" for tokens, tau in entry.curve())
        yield f"- {entry.title}, seed {entry.seed}: {points}"
    yield ""


def _timed(entry: Entry, results: Path) -> Iterator[str]:
    reports = entry.reports()
    if not reports:
        return
    name = f"dspark_smollm2_seed{entry.seed}"
    comparison = ReportComparison(reports=reports)
    comparison.plot(results / f"{name}_decoding.png")
    yield f"## {entry.title}, seed {entry.seed}: acceptance, time and calibration\n"
    chosen = json.loads((entry.folder / "evaluation" / "schedule.json").read_text())
    schedule = chosen["schedule"]
    others = len(chosen["settings"]["prompts"])
    limit = schedule["max_proposals"]
    limit = len(chosen["costs"]["target_seconds"]) - 1 if limit is None else limit
    passes = ", ".join(f"{1000 * seconds:.0f}" for seconds in chosen["costs"]["target_seconds"])
    drafts = ", ".join(f"{1000 * seconds:.1f}" for seconds in chosen["costs"]["draft_seconds"])
    yield (
        f"`trained` verifies all proposals, `scheduled` at most {limit} and only while the estimated probability "
        f"that all so far are accepted is at least {schedule['threshold']}: the fastest on {others} other "
        "held-out prompts. Plain decoding ran in the same process, prompt by prompt. Measured for the choice, in "
        f"milliseconds: the target over 1 to 8 tokens {passes}; drafting 0 to 7 proposals {drafts}.\n"
    )
    yield f"![decoding]({name}_decoding.png)\n"
    yield comparison.markdown()
    calibration = entry.folder / "evaluation" / "calibration.md"
    if calibration.exists():
        (results / f"{name}_calibration.png").write_bytes(
            (entry.folder / "evaluation" / "calibration.png").read_bytes()
        )
        yield f"### Confidence, seed {entry.seed}\n"
        yield calibration.read_text()
        yield f"![calibration]({name}_calibration.png)\n"


def _plot_curves(entries: Sequence[Entry], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    titles = list(dict.fromkeys(entry.title for entry in entries))
    for entry in entries:
        tokens, values = zip(*entry.curve(), strict=True)
        axis.plot(
            [count / 1000 for count in tokens],
            values,
            color=f"C{titles.index(entry.title)}",
            linestyle="-" if entry.seed == 0 else "--",
            marker=".",
            label=f"{entry.title}, seed {entry.seed}",
        )
    axis.set(xlabel="trained tokens, thousands", ylabel="tau, teacher-forced", title="Held-out answers")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
