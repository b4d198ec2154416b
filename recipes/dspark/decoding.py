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

__all__ = ["PLAIN", "DecodedPrompt", "DecodingFile", "Way", "decode_prompts"]

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


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to decode with a drafter.

    Attributes:
        drafter: in eval mode.
        schedule: how many proposals are verified; None: all.
        prompts_per_group: only the first so many prompts of each group; None: all.
    """

    drafter: DraftModel
    schedule: VerificationSchedule | None = None
    prompts_per_group: int | None = None


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
    ways: Mapping[str, Way],
    prompts: Sequence[Answer],
    file: DecodingFile,
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[DecodedPrompt]:
    """Decode every prompt plainly and in each way in turn, so that all see the machine in the same state.

    Args:
        target: in eval mode.
        ways: by name; ``plain`` comes by itself.
        prompts: of all groups.
        file: keeps what is done.
        max_new_tokens: per prompt.
        stop_token_ids: end an answer.
        temperature: 0: greedy.
        seed: of sampling.
        progress: called with (done, total).
    """
    options: dict[str, Any] = {"stop_token_ids": stop_token_ids, "temperature": temperature}
    taken: dict[str, int] = {}
    results = []
    warm = False
    for number, prompt in enumerate(prompts):
        place = taken[prompt.group] = taken.get(prompt.group, 0) + 1
        names = [name for name, way in ways.items() if place <= (way.prompts_per_group or place)]
        known = file.done.get(prompt.id)
        if known is None or set(known.ways) != {PLAIN, *names}:
            if not warm:
                # The first calls pay for allocations that none of the measured ones should.
                _decode_all(target, ways, list(ways), prompt, seed, {**options, "max_new_tokens": 4})
                warm = True
            decoded = _decode_all(
                target, ways, names, prompt, seed + number, {**options, "max_new_tokens": max_new_tokens}
            )
            known = DecodedPrompt(id=prompt.id, group=prompt.group, prompt_ids=prompt.prompt_ids, ways=decoded)
            file.add(known)
        results.append(known)
        if progress is not None:
            progress(number + 1, len(prompts))
    return results


def _decode_all(
    target: Any,
    ways: Mapping[str, Way],
    names: Sequence[str],
    prompt: Answer,
    seed: int,
    options: Mapping[str, Any],
) -> dict[str, Decoded]:
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    decoded = {PLAIN: plain_decode(target, prompt.prompt_ids, generator=generator(), **options)}
    for name in names:
        way = ways[name]
        decoded[name] = speculative_decode(
            target, way.drafter, prompt.prompt_ids, generator=generator(), schedule=way.schedule, **options
        )
    return decoded


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
