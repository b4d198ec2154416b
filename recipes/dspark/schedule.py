"""How many proposals are worth verifying on this machine: chosen before the decoding that is reported.

Measured on held-out prompts of its own: what a choice promises on the prompts that it was made with is too good.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tokennorm.draft import (
    DraftModel,
    Round,
    VerificationSchedule,
    choose_schedule,
    measure_costs,
    speculative_decode,
)
from tokennorm.recipes.dspark.answers import Answer

__all__ = ["choose_by_measuring"]


def choose_by_measuring(
    target: Any,
    drafter: DraftModel,
    prompts: Sequence[Answer],
    path: Path,
    *,
    settings: Mapping[str, Any],
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    temperature: float,
    seed: int,
    say: Callable[[str], None],
) -> VerificationSchedule:
    """Decode ``prompts``, time target and drafter, and take the schedule with the least seconds per token.

    Args:
        target: in eval mode.
        drafter: made for it, in eval mode.
        prompts: none of them in the evaluation.
        path: JSON file of the choice; one that was made with the same settings is read instead.
        settings: whatever decides the choice.
        max_new_tokens: per prompt.
        stop_token_ids: end an answer.
        temperature: of decoding; 0: greedy.
        seed: of sampling.
        say: gets a line about the choice.
    """
    settings = json.loads(json.dumps({**settings, "prompts": [prompt.id for prompt in prompts]}))
    if path.exists():
        known = json.loads(path.read_text())
        if known["settings"] == settings:
            return VerificationSchedule(**known["schedule"])
    rounds: list[Round] = []
    for number, prompt in enumerate(prompts):
        decoded = speculative_decode(
            target,
            drafter,
            prompt.prompt_ids,
            max_new_tokens=max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=temperature,
            generator=torch.Generator().manual_seed(seed + number),
        )
        rounds += decoded.rounds
    median = sorted(prompts, key=lambda prompt: len(prompt.prompt_ids))[len(prompts) // 2]
    costs = measure_costs(target, drafter, median.prompt_ids)
    choice = choose_schedule(rounds, costs)
    schedule = choice.schedule
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {"settings": settings, **asdict(choice), "costs": asdict(costs)}
    path.write_text(json.dumps(values, indent=1) + "\n")
    limit = drafter.config.num_proposals if schedule.max_proposals is None else schedule.max_proposals
    say(
        f"schedule, chosen on {len(prompts)} other held-out prompts: up to {limit} proposals while they are "
        f"thought to survive with {schedule.threshold:.0%} (expected speed-up {choice.speedup:.2f}, with all "
        f"proposals {choice.speedup_of_all:.2f})"
    )
    return schedule
