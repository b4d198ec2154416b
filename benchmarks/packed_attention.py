"""Packed rows on CPU: attention inside documents against a square mask, in CPU seconds and in memory.

    python -m benchmarks.packed_attention --write

runs forward and backward of two layers in the sizes of SmolLM2-135M, patched, on one packed row. Rounds are
interleaved; seconds are this process's CPU time on one thread, medians; memory is what a process of its own needed
at most beyond what it had before. ``--write`` puts the table into ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tokennorm.kit import apply_chunked_token_loss_patch, use_varlen_attention

RESULTS = Path(__file__).parent / "results" / "packed_attention.md"
VOCABULARY, LAYERS, ROUNDS = 1024, 2, 3
# Tokens of a row; shortest and longest document.
CASES = {
    "2,048 tokens, documents of 20 to 400": (2048, 20, 400),
    "4,096 tokens, documents of 20 to 400": (4096, 20, 400),
    "2,048 tokens, two documents of 1,024": (2048, 1024, 1024),
}


def models() -> dict[str, Any]:
    """The same weights, with either attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    square = LlamaForCausalLM(config)
    inside = use_varlen_attention(copy.deepcopy(square))
    return {name: apply_chunked_token_loss_patch(it) for name, it in (("square", square), ("inside", inside))}


def packed_row(length: int, shortest: int, longest: int) -> tuple[dict[str, Tensor], int]:
    """One row that documents fill, and how many they are."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < length:
        lengths.append(min(draw.randint(shortest, longest), length - sum(lengths)))
    ids = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(it) for it in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "shift_labels": ids.roll(-1, 1)}, len(lengths)


def step(model: Any, batch: dict[str, Tensor]) -> float:
    """Forward and backward; returns CPU seconds."""
    model.zero_grad()
    start = time.process_time()
    model(**batch).loss.sum().backward()
    return time.process_time() - start


def peak_memory(model: Any, batch: dict[str, Tensor]) -> float:
    """MiB that one forward and backward needs at most, in a forked process."""
    context: Any = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(model, batch)
        send.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    process = context.Process(target=child)
    process.start()
    found = receive.recv()
    process.join()
    return found


def measure() -> list[str]:
    """The table's rows."""
    pair = models()
    rows = []
    for name, (length, shortest, longest) in CASES.items():
        batch, count = packed_row(length, shortest, longest)
        memory = {kind: peak_memory(model, batch) for kind, model in pair.items()}
        seconds: dict[str, list[float]] = {kind: [] for kind in pair}
        for _ in range(ROUNDS):
            for kind, model in pair.items():
                seconds[kind].append(step(model, batch))
        ratios = [a / b for a, b in zip(seconds["square"], seconds["inside"], strict=True)]
        middle = {kind: statistics.median(some) for kind, some in seconds.items()}
        cells = [
            f"{name} ({count})",
            *(f"{middle[kind]:.2f}" for kind in ("square", "inside")),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{memory[kind]:,.0f}" for kind in ("square", "inside")),
            f"{memory['square'] / memory['inside']:.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return rows


def report(rows: list[str]) -> str:
    """The page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return f"""# Packed rows on CPU: attention inside documents

`python -m benchmarks.packed_attention --write` on commit {commit.stdout.strip()}, {platform.machine()}, one thread
on 2 shared cores, Python {platform.python_version()}, torch {torch.__version__},
transformers {transformers.__version__}.

Forward and backward of {LAYERS} layers in the sizes of SmolLM2-135M (float32, {VOCABULARY:,} ids), patched, on one
packed row. "square" is `sdpa` with a square mask, "inside" `use_varlen_attention`. CPU seconds are medians
of {ROUNDS} interleaved rounds, their ratio is the median of the rounds' ratios (smallest to largest). Memory is
the peak beyond what the process had before.

| row (documents) | square, s | inside, s | square / inside | square, MiB | inside, MiB | square / inside |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

Nothing here says how the kernel for CUDA compares: it has not been run.
"""


def main() -> None:
    """Measure, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure()
    if arguments.write:
        RESULTS.write_text(report(rows))
    else:
        sys.stdout.write(report(rows))


if __name__ == "__main__":
    main()
