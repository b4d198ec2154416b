"""The report of :mod:`benchmarks.sft_smollm2`: tables, the curves of the three runs and the page of the report."""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.report import write_report

__all__ = ["write_results"]

TITLES = {
    "float32": "float32, 1 rank",
    "bfloat16": "bfloat16 autocast, 1 rank",
    "two_ranks": "float32, DDP on 2 ranks",
}
REFERENCE = "float32"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One run that has ended: the records of its steps and of its evaluations, and what it cost."""

    name: str
    steps: Sequence[dict[str, Any]]
    evaluations: Sequence[dict[str, Any]]
    cpu_seconds: float
    about: dict[str, Any]

    @classmethod
    def read(cls, name: str, folder: Path) -> Trained:
        """Read a run folder."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return cls(
            name=name,
            steps=[line for line in lines if "loss" in line],
            evaluations=[line for line in lines if "eval_loss" in line],
            cpu_seconds=json.loads((folder / "cpu_seconds.json").read_text()),
            about=json.loads((folder / "run.json").read_text()),
        )

    def held_out(self) -> dict[int, float]:
        """Nats per held-out token, by step."""
        return {line["step"]: line["eval_loss"] for line in self.evaluations}

    def losses(self) -> dict[int, float]:
        """Nats per supervised token of each window, by step."""
        return {line["step"]: line["loss"] for line in self.steps}


def write_results(results: Path, folders: Mapping[str, Path]) -> None:
    """Write ``sft_smollm2.md`` and its pictures into ``results``."""
    runs = [Trained.read(name, folder) for name, folder in folders.items()]
    _plot(runs, results / "sft_smollm2.png")
    photographed = _photograph(list(folders.values()), results / "sft_smollm2_page.png")
    lines = [*_head(runs), *_held_out(runs), *_windows(runs), *_cost(runs)]
    lines += ["", "![held-out loss and distance of the windows' losses](sft_smollm2.png)"]
    if photographed:
        lines += ["", "The page that `tokennorm report` makes of the three:", "", "![page](sft_smollm2_page.png)"]
    (results / "sft_smollm2.md").write_text("\n".join(lines) + "\n")


def _head(runs: Sequence[Trained]) -> list[str]:
    first, last = runs[0], runs[0].steps[-1]["step"]
    versions = first.about["versions"]
    held_out = first.evaluations[0]
    trained = {len(run.steps) for run in runs}
    assert trained == {last}, f"runs of different length: {trained}"
    tokens, supervised = (sum(line[key] for line in first.steps) for key in ("total_tokens", "effective_tokens"))
    return [
        f"# {last} steps of SmolLM2-135M on pydoc: float32, bfloat16, two ranks",
        "",
        f"`python -m benchmarks.sft_smollm2`, trained on commit {first.about['git']['commit'][:7]}. "
        f"{_processor()}, 2 cores that others used too, one thread per rank, Python "
        f"{first.about['python']}, torch {versions['torch'].split('+')[0]} (CPU), transformers "
        f"{versions['transformers']}.",
        "",
        f"{last} steps of 8 packed rows of 512 tokens, {tokens:,} tokens of which {supervised:,} supervised. "
        "AdamW with a cosine from 1e-4 to 1e-5. All three train on the same windows in the same order; two ranks "
        "take half of the rows each. The held-out loss is the sum over all held-out tokens by their number: "
        f"{held_out['eval_effective_tokens']:,} supervised ones of {held_out['eval_total_tokens']:,}.",
        "",
    ]


def _processor() -> str:
    """Kind of processor, and which instructions for bfloat16 it has."""
    try:
        about = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    name = next((line.partition(":")[2].strip() for line in about.splitlines() if "model name" in line), "")
    found = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in about]
    return f"{platform.machine()} ({name}, {' and '.join(found) or 'no instructions for bfloat16'})"


def _held_out(runs: Sequence[Trained]) -> list[str]:
    steps = sorted(runs[0].held_out())
    lines = ["| held-out loss after step | " + " | ".join(map(str, steps)) + " |", "|---|" + "---:|" * len(steps)]
    for run in runs:
        values = run.held_out()
        lines.append(f"| {TITLES[run.name]} | " + " | ".join(f"{values[step]:.5f}" for step in steps) + " |")
    return lines


def _windows(runs: Sequence[Trained]) -> list[str]:
    reference = _reference(runs)
    lines = ["", "Distance of a window's loss from that of the float32 run on one rank (nats per token):", ""]
    lines += ["| | first step | median | largest | held-out, last |", "|---|---:|---:|---:|---:|"]
    for run in runs:
        if run is not reference:
            distances = _distances(run, reference)
            end = max(reference.held_out())
            apart = run.held_out()[end] - reference.held_out()[end]
            lines.append(
                f"| {TITLES[run.name]} | {distances[0]:.1e} | {statistics.median(distances):.1e} "
                f"| {max(distances):.1e} | {apart:+.1e} |"
            )
    return lines


def _cost(runs: Sequence[Trained]) -> list[str]:
    reference = _reference(runs)
    lines = ["", "CPU time of all processes together, with loading, encoding and evaluations:", ""]
    lines += ["| | CPU minutes | of float32's | peak memory of rank 0, MiB |", "|---|---:|---:|---:|"]
    for run in runs:
        memory = max(line["memory_bytes"] for line in run.steps) / 2**20
        ratio = run.cpu_seconds / reference.cpu_seconds
        lines.append(f"| {TITLES[run.name]} | {run.cpu_seconds / 60:.0f} | {ratio:.2f} | {memory:,.0f} |")
    return lines


def _reference(runs: Sequence[Trained]) -> Trained:
    return next(run for run in runs if run.name == REFERENCE)


def _distances(run: Trained, reference: Trained) -> list[float]:
    theirs = reference.losses()
    return [abs(loss - theirs[step]) for step, loss in run.losses().items()]


def _plot(runs: Sequence[Trained], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, apart) = pyplot.subplots(1, 2, figsize=(11, 4))
    reference = _reference(runs)
    for run, style in zip(runs, ("-", "--", ":"), strict=True):
        values = run.held_out()
        losses.plot(list(values), list(values.values()), style, marker="o", markersize=4, label=TITLES[run.name])
        if run is not reference:
            apart.plot(list(run.losses()), _distances(run, reference), label=TITLES[run.name])
    losses.set(xlabel="step", ylabel="nats per held-out token", title="Held-out loss")
    apart.set(
        yscale="log", xlabel="step", ylabel="nats per token", title="Window's loss: distance from float32, 1 rank"
    )
    for axis in (losses, apart):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _photograph(folders: Sequence[Path], path: Path) -> bool:
    """Let a browser draw the page of the report; False if there is none."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as name:
        page = write_report([str(folder) for folder in folders], str(Path(name) / "page.html"))
        command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1100,2100"]
        subprocess.run(
            [*command, f"--user-data-dir={name}/profile", f"--screenshot={path.resolve()}", Path(page).as_uri()],
            check=True,
            capture_output=True,
            timeout=120,
        )
    return True
