"""Sixty steps of SmolLM2-135M on ``pydoc``, three times: float32, bfloat16, and float32 on two ranks.

    python -m benchmarks.sft_smollm2                 # trains what is not there yet, then writes the results
    python -m benchmarks.sft_smollm2 --only float32  # one of the runs, without writing

Each run is the command line's own ``tokennorm train sft`` with one thread per rank (up to an hour each on one
core), goes on where it was stopped, and lies in ``runs/sft_smollm2``. What is compared: the loss per held-out
token along the run, the losses of the same windows, and CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.sft_smollm2_report import write_results

RUNS = Path("runs/sft_smollm2")
FINISHED = "finished"
COMMON = (
    "--data.max-length=512",
    "--data.micro-batches-per-window=8",
    "--data.eval-tokens=6000",
    "--optim.lr=1e-4",
    "--optim.min-lr-ratio=0.1",
    "--train.max-steps=60",
    "--loop.eval-every=15",
    "--loop.save-every=15",
    "--loop.keep-last=1",
    "--loop.log-every=1",
    "--distributed.threads=1",
    "--run.no-export",
    "--run.resume",
)
# Name of the run: ranks, options of its own.
VARIANTS = {
    "float32": (1, ()),
    "bfloat16": (1, ("--model.autocast=bfloat16",)),
    "two_ranks": (2, ()),
}


def train(name: str) -> None:
    """Train one of :data:`VARIANTS`, or go on with it; its CPU time is added up in ``cpu_seconds.json``."""
    ranks, options = VARIANTS[name]
    folder = RUNS / name
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tokennorm", "train", "sft", *COMMON, *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    before = _cpu_seconds()
    try:
        subprocess.run([*command, f"--run.dir={folder}"], check=True, env=environment)
        (folder / FINISHED).touch()
    finally:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "cpu_seconds.json"
        earlier = json.loads(path.read_text()) if path.exists() else 0.0
        path.write_text(json.dumps(earlier + _cpu_seconds() - before))


def _cpu_seconds() -> float:
    """User and system time of the processes that this one has waited for, and of those that they waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=VARIANTS, help="train this one and write nothing")
    options = parser.parse_args()
    for name in [options.only] if options.only else VARIANTS:
        if not (RUNS / name / FINISHED).exists():
            train(name)
    if not options.only:
        write_results(Path(__file__).parent / "results", {name: RUNS / name for name in VARIANTS})


if __name__ == "__main__":
    main()
