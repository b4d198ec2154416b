"""Train drafters for SmolLM2-135M in several ways and decode held-out prompts with them: hours of CPU.

    python -m benchmarks.dspark_smollm2 --root runs/dspark-smollm2

goes on where it was stopped: answers, hidden states, trainings and decoded prompts stay in the folder. It writes
``benchmarks/results/dspark_smollm2.md`` and its pictures at the end. ``--only NAME`` trains one drafter,
``--report-only`` writes the report of what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.dspark_smollm2_report import Entry, write_report
from tokennorm.draft import DecodeReport, load_drafter, speculative_decode
from tokennorm.engine import LoopConfig
from tokennorm.recipes.dspark import DSparkConfig, demo, stages, train
from tokennorm.recipes.dspark.build import load_target
from tokennorm.recipes.dspark.config import AnswersConfig, DrafterConfig, EvaluateConfig, RunConfig, TrainConfig
from tokennorm.recipes.dspark.evaluate import evaluate, first_of_each_group
from tokennorm.recipes.dspark.folder import StageFolder
from tokennorm.recipes.dspark.generate import read_answers, stop_token_ids

RESULTS = Path(__file__).parent / "results"
PROPOSALS = 7
SEEDS = (0, 1)
STRUCTURED, FREE_FORM = 1300, 300
LONG_EPOCHS, SHORT_EPOCHS = 8, 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to build and train a drafter.

    Attributes:
        name: of its folder, with the seed behind it.
        title: in the report.
        draft: what differs.
        epochs: passes over the answers.
        prompts: held-out prompts of each group that are decoded.
        timed: decoded plainly too, side by side, and calibrated; else only tau is measured.
    """

    name: str
    title: str
    draft: DrafterConfig
    epochs: int
    prompts: int
    timed: bool = False


def variants() -> Iterator[Variant]:
    """The long training first, then the comparison at equal, shorter trainings and equal numbers of proposals."""
    base = demo().draft
    next_token = dataclasses.replace(base, block_size=PROPOSALS)
    bonus = dataclasses.replace(base, block_size=PROPOSALS + 1, layout="bonus_anchor")
    yield Variant(
        name="long",
        title=f"next-token layout, Markov head, {LONG_EPOCHS} epochs",
        draft=next_token,
        epochs=LONG_EPOCHS,
        prompts=25,
        timed=True,
    )
    for name, title, draft in (
        ("next-markov", "next-token layout, Markov head", next_token),
        ("next-plain", "next-token layout", dataclasses.replace(next_token, markov_rank=0)),
        ("bonus-markov", "bonus-anchor layout, Markov head", bonus),
    ):
        yield Variant(name=name, title=title, draft=draft, epochs=SHORT_EPOCHS, prompts=12)


def config_of(root: Path, variant: Variant, seed: int) -> DSparkConfig:
    """The demonstration's configuration with more answers, one thread, and what the variant changes."""
    start = demo()
    return dataclasses.replace(
        start,
        answers=AnswersConfig(
            per_group=STRUCTURED, only={"free_form": FREE_FORM}, held_out_per_group=40, max_new_tokens=128
        ),
        draft=variant.draft,
        train=TrainConfig(epochs=variant.epochs, seed=seed, markov_lr_factor=start.train.markov_lr_factor),
        loop=LoopConfig(eval_every=450, save_every=450, log_every=50, keep_last=1),
        run=RunConfig(dir=str(root / f"{variant.name}-{seed}"), resume=True),
        evaluate=EvaluateConfig(
            prompts_per_group=variant.prompts,
            untrained_prompts_per_group=2 if variant.timed and seed == SEEDS[0] else 0,
        ),
        distributed=dataclasses.replace(start.distributed, threads=1),
    )


def share(root: Path, config: DSparkConfig) -> None:
    """Answers and hidden states are made once, in ``shared``, and linked from every other folder."""
    shared, folder = StageFolder.of(root / "shared"), StageFolder.of(config.run.dir)
    # Whatever the seed of the training, the answers are the same.
    seed = dataclasses.replace(config.train, seed=SEEDS[0])
    common = dataclasses.replace(config, train=seed, run=RunConfig(dir=str(shared.root)))
    stages.generate(common)
    stages.cache(common)
    folder.root.mkdir(parents=True, exist_ok=True)
    for name in ("answers.jsonl", "held_out.jsonl", "cache", "cache-held-out"):
        link = folder.root / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(shared.root / name, folder.root))


def measure_tau(config: DSparkConfig) -> None:
    """Decode with the drafter alone and keep ``tau.json``: greedy answers don't depend on the drafter."""
    folder = StageFolder.of(config.run.dir)
    path = folder.root / "tau.json"
    if path.exists():
        return
    torch.set_num_threads(1)
    target, tokenizer = load_target(config)
    drafter = load_drafter(folder.drafter, target=target).eval()
    rows = []
    for prompt in first_of_each_group(read_answers(folder.held_out), config.evaluate.prompts_per_group):
        decoded = speculative_decode(
            target,
            drafter,
            prompt.prompt_ids,
            max_new_tokens=config.evaluate.max_new_tokens,
            stop_token_ids=stop_token_ids(target, tokenizer),
        )
        rows.append((prompt.group, decoded, decoded))
    report = DecodeReport.of(rows)
    print({group.name: (group.tau, group.tau_interval) for group in report.groups}, flush=True)
    path.write_text(report.to_json())


def main() -> None:
    """Train, decode and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("runs/dspark-smollm2"))
    parser.add_argument("--only", action="append", help="name and seed of one drafter, such as long-0")
    parser.add_argument("--no-evaluate", action="store_true", help="train only")
    parser.add_argument("--report-only", action="store_true", help="write the report of what is there")
    options = parser.parse_args()
    todo = [(variant, seed) for variant in variants() for seed in SEEDS]
    for variant, seed in todo:
        name = f"{variant.name}-{seed}"
        if options.report_only or (options.only and name not in options.only):
            continue
        print(f"\n== {name}: {variant.title}, seed {seed}", flush=True)
        config = config_of(options.root, variant, seed)
        share(options.root, config)
        if not StageFolder.of(config.run.dir).drafter.exists():
            train.run(config)
        if not options.no_evaluate:
            evaluate(config) if variant.timed else measure_tau(config)
    entries = [
        Entry(
            title=variant.title,
            seed=seed,
            epochs=variant.epochs,
            timed=variant.timed,
            folder=options.root / f"{variant.name}-{seed}",
        )
        for variant, seed in todo
    ]
    if options.report_only or not options.only:
        write_report(RESULTS, [entry for entry in entries if entry.trained])


if __name__ == "__main__":
    main()
