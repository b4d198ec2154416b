"""Decoding held-out prompts in every way that is compared, prompt by prompt, kept on disk as they come."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokennorm.draft import Decoded, DraftModel, Round, VerificationSchedule, plain_decode, speculative_decode
from tokennorm.errors import DataError
from tokennorm.recipes.dspark.generate import Answer

__all__ = ["PLAIN", "DecodedPrompt", "DecodingFile", "decode_prompts"]

PLAIN = "plain"
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class DecodedPrompt:
    """One prompt, decoded in several ways.

    Attributes:
        id: of the prompt.
        group: of the prompt.
        prompt_ids: what the target was given.
        ways: by name; ``plain`` is the target alone, the others are drafters.
    """

    id: str
    group: str
    prompt_ids: tuple[int, ...]
    ways: Mapping[str, Decoded]


class DecodingFile:
    """Finished prompts, a JSON line each, and what they were decoded with in the first line.

    Args:
        path: of the file; made by the first :meth:`add`.
        settings: whatever decides the results; a file that was begun with others is begun anew.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._header = json.dumps({"settings": settings}, sort_keys=True)
        self.done: dict[str, DecodedPrompt] = self._read()

    def _read(self) -> dict[str, DecodedPrompt]:
        if not self.path.exists():
            return {}
        header, *lines = self.path.read_text().split("\n")
        if header != self._header:
            return {}
        # What follows the last line break was cut by a kill.
        found = [_from_dict(json.loads(line)) for line in lines[:-1]]
        return {prompt.id: prompt for prompt in found}

    def add(self, prompt: DecodedPrompt) -> None:
        """Keep one more; it is on disk when this returns."""
        self.done[prompt.id] = prompt
        lines = [self._header, *(json.dumps(_to_dict(one)) for one in self.done.values())]
        temporary = self.path.with_suffix(".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text("\n".join(lines) + "\n")
            os.replace(temporary, self.path)
        except OSError as error:
            raise DataError(
                f"{self.path} can't be written: {error}", fix="free some space and start again"
            ) from error


def decode_prompts(
    target: Any,
    drafters: Mapping[str, DraftModel],
    prompts: Sequence[Answer],
    file: DecodingFile,
    *,
    limits: Mapping[str, int] | None = None,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    temperature: float = 0.0,
    schedule: VerificationSchedule | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[DecodedPrompt]:
    """Decode every prompt plainly and with each drafter in turn, so that all see the machine in the same state.

    Args:
        target: in eval mode.
        drafters: by name.
        prompts: of all groups.
        file: keeps what is done.
        limits: for some drafters, how many prompts of each group; all by default.
        max_new_tokens: per prompt.
        stop_token_ids: end an answer.
        temperature: 0: greedy.
        schedule: how many proposals are verified.
        seed: of sampling.
        progress: called with (done, total).
    """
    taken: dict[str, int] = {}
    results = []
    warm = False
    for number, prompt in enumerate(prompts):
        rank_in_group = taken[prompt.group] = taken.get(prompt.group, 0) + 1
        names = [name for name in drafters if rank_in_group <= (limits or {}).get(name, rank_in_group)]
        known = file.done.get(prompt.id)
        if known is None or set(known.ways) != {PLAIN, *names}:
            options: dict[str, Any] = {"stop_token_ids": stop_token_ids, "temperature": temperature}
            if not warm:
                # The first calls pay for allocations that none of the measured ones should.
                plain_decode(target, prompt.prompt_ids, max_new_tokens=4, **options)
                warm = True
            options["max_new_tokens"] = max_new_tokens
            ways = {}
            for name in (PLAIN, *names):
                generator = torch.Generator().manual_seed(seed + number)
                if name == PLAIN:
                    ways[name] = plain_decode(target, prompt.prompt_ids, generator=generator, **options)
                else:
                    ways[name] = speculative_decode(
                        target,
                        drafters[name],
                        prompt.prompt_ids,
                        generator=generator,
                        schedule=schedule,
                        **options,
                    )
            known = DecodedPrompt(id=prompt.id, group=prompt.group, prompt_ids=prompt.prompt_ids, ways=ways)
            file.add(known)
        results.append(known)
        if progress is not None:
            progress(number + 1, len(prompts))
    return results


def _to_dict(prompt: DecodedPrompt) -> dict[str, Any]:
    return dataclasses.asdict(prompt)


def _from_dict(values: Mapping[str, Any]) -> DecodedPrompt:
    ways = {
        name: Decoded(
            **{
                **decoded,
                "token_ids": tuple(decoded["token_ids"]),
                "rounds": tuple(
                    Round(**{**one, "confidence": None if one["confidence"] is None else tuple(one["confidence"])})
                    for one in decoded["rounds"]
                ),
            }
        )
        for name, decoded in values["ways"].items()
    }
    return DecodedPrompt(id=values["id"], group=values["group"], prompt_ids=tuple(values["prompt_ids"]), ways=ways)
