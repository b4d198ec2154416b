"""Prompts for the target: the embedded ones, split so that what is held out is never trained on."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from tokennorm.data import load_pydoc
from tokennorm.errors import ConfigError
from tokennorm.recipes.dspark.prompt import Prompt, hash_percent, text_hash
from tokennorm.recipes.dspark.prompt_files import read_prompts
from tokennorm.recipes.dspark.prompt_templates import TASKS

__all__ = ["GROUPS", "Prompt", "embedded_prompts", "read_prompts"]

GROUPS = ("structured", "free_form")

HELD_OUT_PERCENT = 12
# Draws per task: where parameters are few most of them repeat.
DRAWS = 400


def embedded_prompts(
    *, train: int | None = None, held_out: int | None = None, groups: Sequence[str] = GROUPS
) -> list[Prompt]:
    """Prompts of our own and questions about the standard library; always the same ones.

    ``structured`` prompts come from the templates of :mod:`~tokennorm.recipes.dspark.prompt_templates`, the part
    chosen by a hash of their parameters (about 12 % held out). ``free_form`` prompts are the questions of
    ``pydoc`` with its own held-out part.

    Args:
        train: how many per group; None for all. The tasks of a group take turns as long as they last, and
            fewer prompts are the beginning of more.
        held_out: the same for the held-out part.
        groups: which groups.

    Returns:
        Group by group, the training prompts of each before the held-out ones.

    Raises:
        ConfigError: a group that is not there, or more prompts than a group has.
        DataError: Python has no sources for the free-form prompts.
    """
    for group in groups:
        if group not in GROUPS:
            raise ConfigError(f"no embedded prompts of the group {group!r}", fix=f"use {', '.join(GROUPS)}")
    chosen: list[Prompt] = []
    for group in groups:
        for is_held_out, number in ((False, train), (True, held_out)):
            part = [prompt for prompt in _all_prompts(group) if prompt.held_out is is_held_out]
            if number is not None and not 0 <= number <= len(part):
                name = "held-out" if is_held_out else "training"
                raise ConfigError(
                    f"{number} {name} prompts of the group {group}: there are {len(part)}",
                    fix=f"ask for 0 to {len(part)}, or leave it out for all",
                )
            chosen += part[:number]
    return chosen


@cache
def _all_prompts(group: str) -> tuple[Prompt, ...]:
    """Every prompt of the group; within each part the tasks take turns."""
    tasks = _structured() if group == "structured" else _free_form()
    parts = [[[p for p in prompts if p.held_out is part] for prompts in tasks] for part in (False, True)]
    return tuple(prompt for part in parts for prompt in _in_turns(part))


def _structured() -> list[list[Prompt]]:
    return [list(_drawn(task)) for task in TASKS]


def _drawn(task: str) -> Iterator[Prompt]:
    seen: set[str] = set()
    for draw in range(DRAWS):
        # A generator per draw: a change in one template's draws leaves the others as they are.
        key, text = TASKS[task](random.Random(f"{task} {draw}"))
        if text not in seen:
            seen.add(text)
            held_out = hash_percent(f"{task} {key}") < HELD_OUT_PERCENT
            yield _prompt("structured", task, text, held_out)


def _free_form() -> list[list[Prompt]]:
    pydoc = load_pydoc()
    tasks: dict[str, list[Prompt]] = {}
    for pairs, held_out in ((pydoc.train, False), (pydoc.held_out, True)):
        for pair in pairs:
            tasks.setdefault(pair.kind, []).append(_prompt("free_form", pair.kind, pair.question, held_out))
    # pydoc goes through the library in order; neighbours are alike, so a few of them would be of few modules.
    return [sorted(tasks[kind], key=lambda prompt: prompt.id) for kind in sorted(tasks)]


def _prompt(group: str, task: str, text: str, held_out: bool) -> Prompt:
    return Prompt(id=f"{group}-{task}-{text_hash(text)}", group=group, task=task, text=text, held_out=held_out)


def _in_turns(lists: Iterable[Sequence[Prompt]]) -> Iterator[Prompt]:
    iterators = [iter(prompts) for prompts in lists]
    while iterators:
        for iterator in list(iterators):
            try:
                yield next(iterator)
            except StopIteration:
                iterators.remove(iterator)
