"""Decode held-out prompts plainly and with the drafter, and calibrate its confidence: tables, JSON and plots."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import islice, zip_longest
from typing import Any

import torch

from tokennorm.data import terminal_progress
from tokennorm.draft import (
    DecodeReport,
    DraftModel,
    VerificationSchedule,
    calibrate,
    compare_reports,
    explain_difference,
    load_drafter,
)
from tokennorm.draft.states.spec import fingerprint_target, fingerprint_tokenizer, fingerprint_weights
from tokennorm.engine import ProgressPrinter, Runtime, config_to_dict, distributed_session
from tokennorm.errors import DataError, DistributedError
from tokennorm.recipes.dspark.build import build_drafter, load_answers, load_target
from tokennorm.recipes.dspark.config import DSparkConfig
from tokennorm.recipes.dspark.decoding import PLAIN, DecodedPrompt, DecodingFile, Way, decode_prompts
from tokennorm.recipes.dspark.folder import StageFolder
from tokennorm.recipes.dspark.generate import Answer, read_answers, stop_token_ids
from tokennorm.recipes.dspark.schedule import choose_by_measuring

__all__ = ["evaluate", "first_of_each_group"]

TRAINED, SCHEDULED, UNTRAINED = "trained", "scheduled", "untrained"
Say = Callable[[str], None]
_SAY_EVERY_SECONDS = 30
# They choose among finished prompts, or work on them.
_NOT_SETTINGS = ("prompts_per_group", "untrained_prompts_per_group", "calibrate")


def evaluate(config: DSparkConfig) -> dict[str, DecodeReport]:
    """Decode the held-out prompts and report.

    ``trained`` verifies all proposals, ``scheduled`` those that the confidence head thinks worth it; ``untrained``
    is the drafter as it was before training.

    Raises:
        ConfigError: an earlier stage is missing.
        DistributedError: started on several ranks.
    """
    folder = StageFolder.of(config.run.dir)
    folder.require(folder.drafter, made_by="tokennorm train dspark")
    folder.require(folder.held_out, made_by="tokennorm draft generate")
    with distributed_session(config.distributed) as runtime:
        if runtime.world_size > 1:
            raise DistributedError("evaluate runs in one process", fix="start it without torchrun")
        say, options = ProgressPrinter(0).say, config.evaluate
        target, results = _decode(config, folder, runtime, say)
        greedy = options.temperature == 0
        names = (UNTRAINED, TRAINED, SCHEDULED)
        found = {name: _report(target, results, name, greedy=greedy) for name in names}
        reports = {name: report for name, report in found.items() if report is not None}
        _write(folder, reports, say, greedy=greedy)
        if options.calibrate:
            _calibrate(folder, results, options.seed, say)
        return reports


def _decode(
    config: DSparkConfig, folder: StageFolder, runtime: Runtime, say: Say
) -> tuple[Any, list[DecodedPrompt]]:
    options = config.evaluate
    target, tokenizer = load_target(config, runtime.device)
    trained = load_drafter(folder.drafter, target=target).to(runtime.device).eval()
    ways = {TRAINED: Way(drafter=trained)}
    answers, stops = read_answers(folder.held_out), stop_token_ids(target, tokenizer)
    prompts = first_of_each_group(answers, options.prompts_per_group)
    settings = {
        "target": fingerprint_target(target),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "drafter": fingerprint_weights(trained),
        "threads": torch.get_num_threads(),
        "stop_token_ids": list(stops),
        **{name: value for name, value in config_to_dict(options).items() if name not in _NOT_SETTINGS},
    }
    schedule = _schedule(config, folder, target, trained, (answers, prompts), settings, say)
    settings["schedule"] = None if schedule is None else asdict(schedule)
    if schedule is not None:
        ways[SCHEDULED] = Way(drafter=trained, schedule=schedule)
    if options.untrained_prompts_per_group:
        documents = load_answers(folder.answers, max_length=config.data.max_length)
        new = build_drafter(config, target, tokenizer, documents).eval()
        ways[UNTRAINED] = Way(drafter=new, prompts_per_group=options.untrained_prompts_per_group)
    file = DecodingFile(folder.evaluation / "prompts.jsonl", settings)
    known = sum(prompt.id in file.done for prompt in prompts)
    groups = sorted({prompt.group for prompt in prompts})
    say(
        f"{len(prompts)} held-out prompts ({', '.join(groups)}), up to {options.max_new_tokens} tokens each, "
        f"{'greedy' if options.temperature == 0 else f'temperature {options.temperature}'}"
        + (f"; {known} are decoded already" if known else "")
    )
    with terminal_progress("decoding", enabled=True) as bar:
        results = decode_prompts(
            target,
            ways,
            prompts,
            file,
            max_new_tokens=options.max_new_tokens,
            stop_token_ids=stops,
            temperature=options.temperature,
            seed=options.seed,
            progress=bar or _say_now_and_then(say),
        )
    return target, results


def _schedule(
    config: DSparkConfig,
    folder: StageFolder,
    target: Any,
    drafter: DraftModel,
    held_out: tuple[Sequence[Answer], Sequence[Answer]],
    settings: dict[str, Any],
    say: Say,
) -> VerificationSchedule | None:
    """The configured one, or the fastest on prompts that are not reported; of ``held_out`` the second are."""
    options, (answers, reported) = config.evaluate, held_out
    threshold = options.confidence_threshold
    if threshold is not None:
        wanted = threshold > 0 and drafter.confidence_head is not None
        return VerificationSchedule(threshold=threshold) if wanted else None
    ids = {prompt.id for prompt in reported}
    more = first_of_each_group(answers, options.prompts_per_group + options.schedule_prompts_per_group)
    others = [prompt for prompt in more if prompt.id not in ids]
    if not others:
        say("no held-out prompts are left to choose a schedule on: decoding without one")
        return None
    return choose_by_measuring(
        target,
        drafter,
        others,
        folder.evaluation / "schedule.json",
        settings=settings,
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=settings["stop_token_ids"],
        temperature=options.temperature,
        seed=options.seed,
        say=say,
    )


def _say_now_and_then(say: Say) -> Callable[[int, int], None]:
    """Where there is no terminal for a bar: a line every half minute."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAY_EVERY_SECONDS and done < total:
            last = time.monotonic()
            say(f"decoded {done}/{total}")

    return progress


def first_of_each_group(answers: Sequence[Answer], count: int) -> list[Answer]:
    """So many of each group, its tasks in turn; always the same ones, whatever the order of the file."""
    chosen: list[Answer] = []
    for group in sorted({answer.group for answer in answers}):
        tasks: dict[str, list[Answer]] = {}
        for answer in sorted(answers, key=lambda one: one.id):
            if answer.group == group:
                tasks.setdefault(answer.task, []).append(answer)
        turns = (answer for turn in zip_longest(*tasks.values()) for answer in turn if answer is not None)
        chosen += islice(turns, count)
    return chosen


def _report(target: Any, results: Sequence[DecodedPrompt], name: str, *, greedy: bool) -> DecodeReport | None:
    rows = []
    for prompt in results:
        if name not in prompt.ways:
            continue
        plain, drafted = prompt.ways[PLAIN], prompt.ways[name]
        difference = None
        if greedy and plain.token_ids != drafted.token_ids:
            # Where they part: a tie between two tokens, or a fault.
            difference = explain_difference(target, prompt.prompt_ids, plain.token_ids, drafted.token_ids)
        rows.append((prompt.group, plain, drafted, difference))
    return DecodeReport.of(rows) if rows else None


def _write(folder: StageFolder, reports: dict[str, DecodeReport], say: Say, *, greedy: bool) -> None:
    folder.evaluation.mkdir(parents=True, exist_ok=True)
    comparison = compare_reports(reports)
    say(comparison.table())
    values = {name: json.loads(report.to_json()) for name, report in reports.items()}
    (folder.evaluation / "report.json").write_text(json.dumps(values, indent=1) + "\n")
    (folder.evaluation / "report.md").write_text(comparison.markdown())
    comparison.plot(folder.evaluation / "decoding.png")
    for name, report in reports.items() if greedy else ():
        overall = report.overall
        ties = f" ({overall.ties} more part at a tie of the target's two likeliest tokens)" if overall.ties else ""
        say(f"{name}: {overall.identical} of {len(overall.prompts)} answers identical to plain decoding{ties}")
    say(f"written: {folder.evaluation}/report.md, report.json, decoding.png")


def _calibrate(folder: StageFolder, results: Sequence[DecodedPrompt], seed: int, say: Say) -> None:
    rounds = [prompt.ways[TRAINED].rounds for prompt in results]
    if any(one.confidence is None for prompt in rounds for one in prompt):
        say("the drafter has no confidence head: nothing to calibrate")
        return
    try:
        result = calibrate(rounds, seed)
    except DataError as error:
        # The decoding is worth having without it.
        say(f"not calibrated: {error}")
        return
    result.write(folder.evaluation / "sts.json")
    result.plot(folder.evaluation / "calibration.png")
    (folder.evaluation / "calibration.md").write_text(result.markdown())
    say(f"calibration of the confidence head\n{result.table()}")
    say(f"written: {folder.evaluation}/sts.json, calibration.md, calibration.png")
