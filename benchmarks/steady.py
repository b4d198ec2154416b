"""Thousands of steps of a tiny model with evaluations and checkpoints: is the run the same at the end as it was?

    python -m benchmarks.steady --write

trains a Llama of two layers on ``pydoc`` and reads the run's ``metrics.jsonl``: memory that the process holds and
memory that it uses, processor time per step, and the share of the time that the loop waited for data. ``--write``
puts the table and the picture into ``benchmarks/results``. With ``--trim-every 50`` the C library gives freed
memory back every 50 steps: what is held then follows what is used.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.allocator import give_back, memory_in_use
from tokennorm.data import Prefetch, load_pydoc
from tokennorm.engine import (
    CheckpointStore,
    DistributedConfig,
    LoopConfig,
    OptimConfig,
    ProgressPrinter,
    RunFolder,
    distributed_session,
    train,
)
from tokennorm.recipes.sft.config import DataConfig, ModelConfig, RunConfig, SftConfig, TrainConfig
from tokennorm.recipes.sft.train import prepare

RESULTS = Path(__file__).parent / "results"
STEPS, PARTS = 2000, 10
END = 1
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_model(folder: Path) -> Path:
    """Write a random Llama of two layers with a tokenizer of 2,000 tokens for the answers of ``pydoc``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|im_start|>", "<|im_end|>"],  # ids 0 and END
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((pair.answer for pair in load_pydoc().train[:1000]), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=END,
            pad_token_id=END,
            bos_token_id=None,
        )
    )
    fast.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def config(folder: Path, steps: int) -> SftConfig:
    """Uneven windows of packed rows; an evaluation every 100 steps and a checkpoint every 50."""
    return SftConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(max_length=512, micro_batches_per_window=4, eval_tokens=10_000),
        optim=OptimConfig(lr=1e-3, warmup=20),
        train=TrainConfig(epochs=20, max_steps=steps),
        loop=LoopConfig(eval_every=100, save_every=50, log_every=100),
        run=RunConfig(dir=str(folder / "run")),
        distributed=DistributedConfig(threads=1),
    )


class WatchedRun(RunFolder):
    """Writes beside each step what the allocator says, and the processor time since the line before."""

    trim_every = collect_every = 0
    _cpu = 0.0

    def log(self, record: Mapping[str, Any]) -> None:
        now = time.process_time()
        super().log({**record, **memory_in_use(), "cpu_seconds": now - self._cpu})
        if self.collect_every and record["step"] % self.collect_every == 0:
            gc.collect()
        if self.trim_every and record["step"] % self.trim_every == 0:
            give_back()
        self._cpu = time.process_time()


def run(config: SftConfig, *, trim_every: int = 0, collect_every: int = 0) -> Path:
    """Train as the recipe does; return the run folder."""
    with distributed_session(config.distributed) as runtime:
        folder = WatchedRun(str(config.run.dir), runtime=runtime)
        folder.trim_every, folder.collect_every = trim_every, collect_every
        progress = ProgressPrinter(0)
        job = prepare(config, runtime, say=progress.say)
        progress.total_steps = job.total_steps
        train(
            job.engine,
            Prefetch(job.windows, config.data.prefetch),
            total_steps=job.total_steps,
            config=config.loop,
            evaluate=job.evaluate,
            run=folder,
            checkpoints=CheckpointStore(folder.checkpoints, identity=job.identity, runtime=runtime),
            progress=progress,
        )
    return folder.path


def parts(records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The run in tenths: medians of memory and of processor time, data wait and loss."""
    found = []
    size = max(1, len(records) // PARTS)
    for start in range(0, len(records), size):
        some = records[start : start + size]
        seconds = sum(record["seconds"] for record in some)

        def median(name: str, some: Sequence[dict[str, Any]] = some) -> float:
            return statistics.median(record[name] for record in some)

        found.append(
            {
                "last step": some[-1]["step"],
                "held, MiB": median("memory_bytes") / 2**20,
                "in use, MiB": median("used_bytes") / 2**20,
                "freed and kept, MiB": median("kept_bytes") / 2**20,
                "Python blocks": median("python_blocks"),
                "CPU per step, ms": 1000 * median("cpu_seconds"),
                "data wait, %": 100 * sum(record["data_wait"] for record in some) / seconds,
                "loss": sum(r["loss"] * r["effective_tokens"] for r in some)
                / sum(r["effective_tokens"] for r in some),
            }
        )
    return found


def slope(records: Sequence[dict[str, Any]], name: str) -> float:
    """Growth over the second half of the run, by least squares: units per 1,000 steps."""
    half = records[len(records) // 2 :]
    return 1000 * statistics.linear_regression([r["step"] for r in half], [r[name] for r in half]).slope


def table(rows: Sequence[dict[str, float]]) -> str:
    """As Markdown."""
    names = list(rows[0])
    digits = {"last step": ",.0f", "Python blocks": ",.0f", "data wait, %": ".3f", "loss": ".3f"}
    lines = [f"| {' | '.join(names)} |", f"|{'---:|' * len(names)}"]
    for row in rows:
        cells = [format(value, digits.get(name, ".1f")) for name, value in row.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(records: Sequence[dict[str, Any]]) -> str:
    """The slopes, in words."""
    held, used = (slope(records, name) / 2**20 for name in ("memory_bytes", "used_bytes"))
    return (
        f"per 1,000 steps of the second half: held {held:+.2f} MiB, in use {used:+.2f} MiB, Python blocks "
        f"{slope(records, 'python_blocks'):+,.0f}, CPU per step {1000 * slope(records, 'cpu_seconds'):+.2f} ms"
    )


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory and time of each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, clock) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    steps = [record["step"] for record in records]
    for name, label in (
        ("memory_bytes", "held (resident)"),
        ("used_bytes", "in use"),
        ("kept_bytes", "freed, kept"),
    ):
        memory.plot(steps, [record[name] / 2**20 for record in records], label=label)
    memory.set(ylim=(0, None), xlabel="step", ylabel="MiB", title="Memory")
    for name, label in (("seconds", "step"), ("cpu_seconds", "step, CPU time"), ("data_wait", "data wait")):
        clock.plot(steps, [1000 * record[name] for record in records], ".", markersize=2, label=label)
    clock.set(yscale="log", xlabel="step", ylabel="ms", title="Time")
    for axis in (memory, clock):
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/steady.md and .png")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    parser.add_argument("--trim-every", type=int, default=0, help="give freed memory back every so many steps")
    parser.add_argument("--collect-every", type=int, default=0, help="collect cyclic garbage every so many steps")
    parser.add_argument("--keep", type=Path, help="copy the run's metrics.jsonl there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(folder / "model")
        path = run(
            config(folder, options.steps), trim_every=options.trim_every, collect_every=options.collect_every
        )
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        if options.keep:
            shutil.copy(path / "metrics.jsonl", options.keep)
        size = sum(path.stat().st_size for path in (path / "checkpoints").rglob("*") if path.is_file())
    records = [line for line in lines if "loss" in line]
    rows = parts(records)
    print(table(rows))
    print(growth(records))
    if not options.write:
        return
    plot(records, RESULTS / "steady.png")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    waited = 100 * sum(r["data_wait"] for r in records) / sum(r["seconds"] for r in records)
    text = f"""\
# {len(records):,} steps: memory, speed, waiting for data

`python -m benchmarks.steady --write` on commit {commit.stdout.strip()}, {platform.machine()}, one thread on 2
cores that others used too, Python {platform.python_version()}, torch {torch.__version__.split("+")[0]} (CPU).

A Llama of two layers on `pydoc`, packed rows of 512 tokens, four micro-batches per window, an evaluation every
100 steps, a checkpoint every 50 ({size / 2**20:.1f} MiB for the last two). *Held* is the resident set; *in use* is
what was asked of the C library and not freed; *freed and kept* is what was freed and not given back to the system;
Python blocks are the living small objects. Numbers are medians of each tenth of the run. Time is processor time,
since others used the cores. In all the loop waited for data {waited:.2f} % of the time.

{table(rows)}

Growth {growth(records)}.

![memory and time](steady.png)
"""
    (RESULTS / "steady.md").write_text(text)


if __name__ == "__main__":
    main()
