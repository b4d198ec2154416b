"""A thousand steps of a tiny model with evaluations and checkpoints: is the run the same at the end as it was?

    python -m benchmarks.steady --write

trains a Llama of two layers on ``pydoc`` and reads the run's ``metrics.jsonl``: resident memory and steps per
second along the run, and the share of the time that the loop waited for data. ``--write`` puts the table and the
picture into ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tokennorm.data import load_pydoc
from tokennorm.engine import DistributedConfig, LoopConfig, OptimConfig
from tokennorm.recipes.sft import run
from tokennorm.recipes.sft.config import DataConfig, ModelConfig, RunConfig, SftConfig, TrainConfig

RESULTS = Path(__file__).parent / "results"
STEPS, PART = 1000, 100
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


def config(folder: Path) -> SftConfig:
    """Uneven windows of packed rows; an evaluation every 100 steps and a checkpoint every 50."""
    return SftConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(max_length=512, micro_batches_per_window=4, eval_tokens=10_000),
        optim=OptimConfig(lr=1e-3, warmup=20),
        train=TrainConfig(epochs=20, max_steps=STEPS),
        loop=LoopConfig(eval_every=100, save_every=50, log_every=100),
        run=RunConfig(dir=str(folder / "run"), export=False),
        distributed=DistributedConfig(threads=1),
    )


def parts(records: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The run in tenths: median memory, steps per second from the median step, data wait and loss."""
    found = []
    for start in range(0, len(records), PART):
        some = records[start : start + PART]
        seconds = sum(record["seconds"] for record in some)
        found.append(
            {
                "last step": some[-1]["step"],
                "memory, MiB": statistics.median(record["memory_bytes"] for record in some) / 2**20,
                "steps/s": 1 / statistics.median(record["seconds"] for record in some),
                "data wait, %": 100 * sum(record["data_wait"] for record in some) / seconds,
                "loss": sum(r["loss"] * r["effective_tokens"] for r in some)
                / sum(r["effective_tokens"] for r in some),
            }
        )
    return found


def table(rows: Sequence[dict[str, float]]) -> str:
    """As Markdown."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'---:|' * len(names)}"]
    for row in rows:
        cells = [f"{value:.0f}" if name == "last step" else f"{value:.3f}" for name, value in row.items()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory and time of each step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    steps = [record["step"] for record in records]
    memory.plot(steps, [record["memory_bytes"] / 2**20 for record in records])
    memory.set(ylim=(0, None), xlabel="step", ylabel="MiB", title="Resident memory")
    time.plot(steps, [1000 * record["seconds"] for record in records], ".", markersize=2, label="step")
    time.plot(steps, [1000 * record["data_wait"] for record in records], ".", markersize=2, label="data wait")
    time.set(yscale="log", xlabel="step", ylabel="ms", title="Time")
    time.legend()
    for axis in (memory, time):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/steady.md and .png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_model(folder / "model")
        result = run(config(folder))
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
        size = sum(path.stat().st_size for path in (result.folder / "checkpoints").rglob("*") if path.is_file())
    records = [line for line in lines if "loss" in line]
    rows = parts(records)
    print(table(rows))
    if not options.write:
        return
    plot(records, RESULTS / "steady.png")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    waited = 100 * sum(r["data_wait"] for r in records) / sum(r["seconds"] for r in records)
    text = f"""\
# {STEPS:,} steps: memory, speed, waiting for data

`python -m benchmarks.steady --write` on commit {commit.stdout.strip()}, {platform.machine()}, one thread on 2
shared cores, Python {platform.python_version()}, torch {torch.__version__.split("+")[0]} (CPU).

A Llama of two layers on `pydoc`, packed rows of 512 tokens, four micro-batches per window, an evaluation every 100
steps, a checkpoint every 50 ({size / 2**20:.1f} MiB for the last two). Memory is the median of resident set sizes,
steps per second is from the median step. In all the loop waited for data {waited:.2f} % of the time.

{table(rows)}

![memory and time](steady.png)
"""
    (RESULTS / "steady.md").write_text(text)


if __name__ == "__main__":
    main()
