"""One date for a whole run, where the chat template prints it: that of its first day, also when it is resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokennorm.data import can_hold_date, shows_date
from tokennorm.engine import Runtime, broadcast_from_main, saved_identity
from tokennorm.recipes.sft.config import SftConfig

__all__ = ["hold_date"]


def hold_date(config: SftConfig, tokenizer: Any, runtime: Runtime, say: Callable[[str], None]) -> SftConfig:
    """Return the configuration with the date that is used; with none where the template prints none.

    Every rank calls it: midnight may fall between two of them.
    """
    date = config.data.template_date
    if not shows_date(tokenizer):
        if date is not None:
            say("note: the chat template prints no date, and data.template_date is not used")
        return _with(config, None)
    if date is None and config.run.goes_on:
        folder = Path(config.run.dir or ".") / "checkpoints"
        date = saved_identity(folder, config.run.resume_from, runtime).get("data.template_date")
    date = broadcast_from_main(date or time.strftime("%Y-%m-%d"), runtime)
    say(f"the chat template prints the date: {date} in this run (data.template_date)")
    if not can_hold_date(tokenizer):
        say(
            "note: it prints it in a form that can't be held fixed as well; a run that is resumed on another day "
            "has other tokens, and is refused"
        )
    return _with(config, date)


def _with(config: SftConfig, date: str | None) -> SftConfig:
    return replace(config, data=replace(config.data, template_date=date))
