"""Time and memory of ``linear_cross_entropy``, forward and backward, beside the ways people do it today.

    python -m benchmarks.cross_entropy                 # the table
    python -m benchmarks.cross_entropy --write         # and benchmarks/results/cross_entropy.md

Times are CPU seconds of the whole process (all threads), one run of each variant per round in turn, the medians
over the rounds; ratios are taken round by round, so that a machine whose speed drifts doesn't show in them. Memory
is the peak resident size of a process of its own, above one that only holds the inputs.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tokennorm.loss import linear_cross_entropy

Variant = Callable[[Tensor, Tensor, Tensor], None]
IGNORE = -100
RESULT = Path(__file__).parent / "results" / "cross_entropy.md"


def bare_products(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """The three matrix products alone, on the supervised rows, in chunks of 256: what no method can avoid."""
    with torch.no_grad():
        rows = hidden[labels != IGNORE]
        logits = torch.empty(256, weight.shape[0])
        grad_weight, grad_hidden = torch.empty_like(weight), torch.empty_like(rows)
        for start in range(0, rows.shape[0], 256):
            chunk = rows[start : start + 256]
            out = logits[: chunk.shape[0]]
            torch.mm(chunk, weight.t(), out=out)
            torch.mm(out, weight, out=grad_hidden[start : start + 256])
            if start == 0:
                torch.mm(out.t(), chunk, out=grad_weight)
            else:
                grad_weight.addmm_(out.t(), chunk)


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """The engine's path: per-token losses, then their sum."""
    linear_cross_entropy(hidden, weight, labels).sum().backward()


def ours_sum(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """``reduction="sum"``."""
    linear_cross_entropy(hidden, weight, labels, reduction="sum").backward()


def torch_chunked(chunk: int | None, reduction: str, *, compacted: bool) -> Variant:
    """``torch.nn.functional.linear_cross_entropy``; ``chunk=None`` leaves its options at their default."""

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        options = (
            torch.nn.LinearCrossEntropyOptions()
            if chunk is None
            else torch.nn.LinearCrossEntropyOptions(
                batch_chunk_size=chunk, chunking_method=None, acc_policy="compact"
            )
        )
        if compacted:
            keep = (labels != IGNORE).nonzero().squeeze(1)
            hidden, labels = hidden.index_select(0, keep), labels.index_select(0, keep)
        F.linear_cross_entropy(hidden, weight, labels, reduction=reduction, options=options).sum().backward()

    return run


def plain_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """All logits at once, then ``cross_entropy``: what most training loops do."""
    F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()


def variants(fraction: float) -> dict[str, Variant]:
    """Name -> what is timed, for a fraction of supervised rows."""
    some = fraction < 1
    named: dict[str, Variant] = {
        "three bare matrix products": bare_products,
        "tokennorm, per token, summed": ours,
        'tokennorm, reduction="sum"': ours_sum,
    }
    rows = ", compacted by hand" if some else ""
    for chunk in (128, 256, 512):
        named[f"torch linear_cross_entropy sum, chunk {chunk}{rows}"] = torch_chunked(chunk, "sum", compacted=some)
    if some:
        named["torch linear_cross_entropy sum, chunk 256, all rows"] = torch_chunked(256, "sum", compacted=False)
    named["torch linear_cross_entropy none, chunk 256"] = torch_chunked(256, "none", compacted=False)
    named["torch linear_cross_entropy sum, default options"] = torch_chunked(None, "sum", compacted=False)
    named["plain logits and cross_entropy"] = plain_logits
    return named


def make_inputs(args: argparse.Namespace, fraction: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels with the given fraction supervised."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.rows, args.width, generator=generator)
    weight = torch.randn(args.vocabulary, args.width, generator=generator).mul_(0.05)
    labels = torch.randint(0, args.vocabulary, (args.rows,), generator=generator)
    unsupervised = torch.randperm(args.rows, generator=generator)[round(args.rows * fraction) :]
    labels[unsupervised] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def time_variants(args: argparse.Namespace, fraction: float) -> dict[str, list[float]]:
    """CPU seconds of every variant, interleaved, after one round that isn't counted."""
    hidden, weight, labels = make_inputs(args, fraction)
    named = variants(fraction)
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for round_number in range(args.rounds + 1):
        for name, run in named.items():
            hidden.grad = weight.grad = None
            start = time.process_time()
            run(hidden, weight, labels)
            if round_number:
                seconds[name].append(time.process_time() - start)
        print(f"\r  round {round_number}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def peak_memory(args: argparse.Namespace, fraction: float, name: str | None) -> float:
    """Peak resident MB of a process that makes the inputs and runs one variant (None: none)."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.cross_entropy",
        "--only",
        name or "-",
        "--fraction",
        str(fraction),
    ]
    for option in ("rows", "width", "vocabulary"):
        command += [f"--{option}", str(getattr(args, option))]
    # glibc would keep freed blocks below its moving threshold, and the peak would show its habits, not ours.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def run_only(args: argparse.Namespace) -> None:
    """Child process of :func:`peak_memory`."""
    inputs = make_inputs(args, args.fraction)
    if args.only != "-":
        variants(args.fraction)[args.only](*inputs)
    else:
        # The libraries' own start-up belongs to the inputs-only process as well.
        tiny = [torch.randn(4, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)]
        ours(tiny[0], tiny[1], torch.zeros(4, dtype=torch.int64))
    # Not getrusage: a child started by vfork inherits its parent's peak there.
    status = Path("/proc/self/status").read_text()
    print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024)


def table(args: argparse.Namespace, fraction: float) -> list[str]:
    """Measure one fraction of supervised rows and lay it out."""
    seconds = time_variants(args, fraction)
    floor = peak_memory(args, fraction, None)
    bare = seconds["three bare matrix products"]
    peers = [
        name for name in seconds if "torch linear_cross_entropy sum, chunk" in name and "all rows" not in name
    ]
    best = min(peers, key=lambda name: statistics.median(seconds[name]))
    lines = [
        f"{fraction:.0%} of {args.rows} rows supervised, D {args.width}, V {args.vocabulary}, float32, "
        f"{args.rounds} rounds. Best torch variant on the same rows: {best}.",
        "",
        "| | CPU s | / bare products | / best torch | peak memory above inputs, MB |",
        "|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        to_bare = statistics.median(a / b for a, b in zip(values, bare, strict=True))
        to_best = statistics.median(a / b for a, b in zip(values, seconds[best], strict=True))
        memory = peak_memory(args, fraction, name) - floor
        lines.append(
            f"| {name} | {statistics.median(values):.2f} | {to_bare:.2f} | {to_best:.2f} | {memory:.0f} |"
        )
    return [*lines, ""]


def main() -> None:
    """Print the tables; with ``--write`` keep them under benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="N")
    parser.add_argument("--width", type=int, default=576, help="D")
    parser.add_argument("--vocabulary", type=int, default=49152, help="V")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--fraction", type=float, default=1.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        run_only(args)
        return
    lines = table(args, 1.0) + table(args, 0.4)
    text = "\n".join(lines)
    print(text)
    if args.write:
        where = (
            f"`python -m benchmarks.cross_entropy --write` on {platform.machine()}, {torch.get_num_threads()} "
            f"threads, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]} (CPU).\n"
        )
        RESULT.write_text(f"# Cross-entropy from hidden states, forward and backward\n\n{where}\n{text}")


if __name__ == "__main__":
    main()
