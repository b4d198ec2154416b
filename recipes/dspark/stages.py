"""The stages around the training, each a function of the configuration; every one goes on where it was stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tokennorm.data import terminal_progress
from tokennorm.engine import ProgressPrinter, config_to_dict, distributed_session
from tokennorm.errors import ConfigError, DistributedError
from tokennorm.recipes.dspark import train
from tokennorm.recipes.dspark.build import draft_config, load_answers, load_target
from tokennorm.recipes.dspark.config import AnswersConfig, DSparkConfig
from tokennorm.recipes.dspark.evaluate import evaluate
from tokennorm.recipes.dspark.export import export
from tokennorm.recipes.dspark.folder import StageFolder
from tokennorm.recipes.dspark.generate import generate_answers
from tokennorm.recipes.dspark.prompts import Prompt, embedded_prompts, read_prompts
from tokennorm.recipes.dspark.states import cached_states

__all__ = ["STAGES", "cache", "generate", "run_all"]

_DECIDES_THE_DRAFTER = ("target", "answers", "draft", "data", "loss", "optim", "train")


def generate(config: DSparkConfig) -> None:
    """Let the target answer the training prompts and the held-out ones."""
    folder = StageFolder.of(config.run.dir)
    train_prompts, held_out = choose_prompts(config.answers)
    with distributed_session(config.distributed) as runtime:
        if runtime.world_size > 1:
            raise DistributedError(
                "generate runs in one process", fix="start it without torchrun; the training takes several ranks"
            )
        printer = ProgressPrinter(0)
        target, tokenizer = load_target(config, runtime.device)
        folder.root.mkdir(parents=True, exist_ok=True)
        for name, prompts, path in (
            ("answers", train_prompts, folder.answers),
            ("held-out answers", held_out, folder.held_out),
        ):
            if not prompts:
                continue
            groups = Counter(prompt.group for prompt in prompts)
            printer.say(
                f"{name}: {len(prompts):,} prompts ({', '.join(f'{g} {n:,}' for g, n in groups.items())}), up to "
                f"{config.answers.max_new_tokens} tokens each"
            )
            with terminal_progress(name, enabled=True) as progress:
                answers = generate_answers(
                    target,
                    tokenizer,
                    prompts,
                    path,
                    batch_size=config.answers.batch_size,
                    max_new_tokens=config.answers.max_new_tokens,
                    temperature=config.answers.temperature,
                    seed=config.train.seed,
                    say=printer.say,
                    progress=progress,
                )
            tokens = sum(len(answer.answer_ids) for answer in answers)
            ended = sum(answer.finish == "stop" for answer in answers)
            printer.say(f"{path}: {len(answers):,} answers, {tokens:,} tokens, {ended:,} ended by themselves")


def choose_prompts(config: AnswersConfig) -> tuple[list[Prompt], list[Prompt]]:
    """The training prompts and the held-out ones: the first of each group, its tasks in turn."""
    prompts = embedded_prompts() if config.prompts == "embedded" else read_prompts(config.prompts)
    taken: dict[tuple[str, bool], int] = {}
    chosen: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt in prompts:
        key = (prompt.group, prompt.held_out)
        limit = config.held_out_per_group if prompt.held_out else config.only.get(prompt.group, config.per_group)
        taken[key] = taken.get(key, 0) + 1
        if limit is None or taken[key] <= limit:
            chosen[prompt.held_out].append(prompt)
    return chosen


def cache(config: DSparkConfig) -> None:
    """Write the target's hidden states of all answers to disk; says first how much that is."""
    if not config.cache.enabled:
        raise ConfigError(
            "cache.enabled is False", fix="leave this stage out; the training runs the target itself"
        )
    folder = StageFolder.of(config.run.dir)
    folder.require(folder.answers, made_by="tokennorm draft generate")
    with distributed_session(config.distributed) as runtime:
        printer = ProgressPrinter(0, enabled=runtime.is_main)
        target, tokenizer = load_target(config, runtime.device)
        layer_ids = draft_config(config.draft, target, tokenizer).target_layer_ids
        for answers, path in ((folder.answers, folder.cache), (folder.held_out, folder.held_out_cache)):
            if answers.exists():
                cached_states(
                    config.cache,
                    path,
                    load_answers(answers, max_length=config.data.max_length),
                    target=target,
                    tokenizer=tokenizer,
                    layer_ids=layer_ids,
                    log_totals=config.draft.vocabulary is not None,
                    runtime=runtime,
                    say=printer.say,
                )


def run_all(config: DSparkConfig) -> None:
    """Generate, train (which fills the cache), evaluate and export; finished stages are not done again.

    Raises:
        ConfigError: the folder's drafter was trained with other settings.
    """
    folder = StageFolder.of(config.run.dir)
    printer = ProgressPrinter(0)
    if folder.drafter.exists():
        _require_same_settings(config, folder)
    printer.say("\n== 1/4 the target answers")
    generate(config)
    printer.say("\n== 2/4 training")
    if folder.drafter.exists():
        printer.say(f"{folder.drafter} is there already")
    else:
        train.run(replace(config, run=replace(config.run, resume=True)))
    printer.say("\n== 3/4 decoding held-out prompts")
    evaluate(config)
    printer.say("\n== 4/4 export")
    export(config)


def _require_same_settings(config: DSparkConfig, folder: StageFolder) -> None:
    now = json.loads(json.dumps(config_to_dict(config)))
    before = json.loads((folder.train / "config.json").read_text())
    differences = [
        f"{group}.{name}: {before.get(group, {}).get(name)!r} there, {value!r} here"
        for group in _DECIDES_THE_DRAFTER
        for name, value in now[group].items()
        if before.get(group, {}).get(name) != value
    ]
    if differences:
        raise ConfigError(
            f"the drafter in {folder.drafter} was trained with other settings: " + "; ".join(differences),
            why="it would be evaluated and exported as if it had these",
            fix="give another run.dir, or the settings of that run (train/config.json)",
        )


STAGES: dict[str, Callable[[DSparkConfig], None]] = {
    "generate": generate,
    "cache": cache,
    "evaluate": evaluate,
    "export": export,
    "run": run_all,
}
