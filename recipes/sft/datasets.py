"""Training and held-out chats of a run, encoded, and the windows of one rank."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.data import (
    Batch,
    ChatDataset,
    Conversation,
    Position,
    WindowLoader,
    collate_padded,
    load_pydoc,
    read_jsonl,
    terminal_progress,
)
from tokennorm.errors import DataError
from tokennorm.recipes.sft.config import DataConfig

__all__ = ["Datasets", "RunWindows", "build_datasets", "eval_batches"]


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The two parts; ``held_out`` is None when nothing is to be evaluated."""

    train: ChatDataset
    held_out: ChatDataset | None

    def fingerprint(self) -> str:
        """Return a hash of every token and mask that is trained on."""
        digest = hashlib.sha256()
        for sample in self.train:
            digest.update(sample.input_ids.numpy().tobytes() + sample.supervised.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]


def build_datasets(
    config: DataConfig, tokenizer: Any, *, seed: int, say: Callable[[str], None], show_progress: bool = False
) -> Datasets:
    """Read, split and encode the chats, and say what became of them.

    Raises:
        DataError: nothing readable, nothing supervised, or too little to hold any out.
    """
    train, held_out = _conversations(config, seed, say)
    parts: dict[str, ChatDataset] = {}
    for name, conversations in (("train", train), ("held-out", held_out)):
        if conversations:
            with terminal_progress(f"encoding {name}", enabled=show_progress) as progress:
                parts[name] = ChatDataset.encode(
                    conversations, tokenizer, max_length=config.max_length, progress=progress
                )
    evaluated = parts.get("held-out")
    if evaluated is not None and config.eval_tokens is not None:
        evaluated = evaluated.take(
            min_supervised_tokens=min(config.eval_tokens, sum(evaluated.supervised_lengths))
        )
    say(f"train: {parts['train'].describe()}")
    if evaluated is not None:
        say(f"held-out: {evaluated.describe()}")
    for sentence in parts["train"].statistics.warnings():
        say(f"note: {sentence}")
    return Datasets(train=parts["train"], held_out=evaluated)


def _conversations(
    config: DataConfig, seed: int, say: Callable[[str], None]
) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
    if config.path == "pydoc":
        pydoc = load_pydoc()
        say(pydoc.describe())
        train: Sequence[Conversation] = [pair.conversation for pair in pydoc.train]
        if config.eval_path is None:
            return train, [pair.conversation for pair in pydoc.held_out]
        return train, read_jsonl(config.eval_path)
    everything = read_jsonl(config.path)
    if config.eval_path is not None:
        return everything, read_jsonl(config.eval_path)
    number = math.ceil(config.eval_fraction * len(everything))
    if number == 0:
        return everything, []
    if number == len(everything):
        raise DataError(
            f"{config.path} has {len(everything)} chat, and it can't be both trained on and held out",
            fix="add chats, give data.eval_path, or set data.eval_fraction to 0",
        )
    order = list(range(len(everything)))
    random.Random(f"held out {seed}").shuffle(order)
    chosen = set(order[:number])
    return (
        [chat for index, chat in enumerate(everything) if index not in chosen],
        [everything[index] for index in sorted(chosen)],
    )


class RunWindows:
    """A :class:`~tokennorm.data.WindowLoader` as the engine's source of windows: an iterator with a place."""

    def __init__(self, loader: WindowLoader, epochs: int) -> None:
        self.loader, self.epochs = loader, epochs
        self.position = Position()

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        for window in self.loader.windows(self.epochs, start=self.position):
            self.position = window.next_position
            yield window.batches

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last window that was yielded."""
        return {"epoch": self.position.epoch, "window": self.position.window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""
        self.position = Position(epoch=state["epoch"], window=state["window"])


def eval_batches(
    dataset: ChatDataset, *, batch_size: int, pad_token_id: int, rank: int, world_size: int
) -> list[Batch]:
    """Return one rank's evaluation batches; chats of like length share one, so that little is padded."""
    order = sorted(range(len(dataset)), key=lambda index: dataset.lengths[index])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [
        collate_padded([dataset[index] for index in batch], pad_token_id=pad_token_id)
        for batch in batches[rank::world_size]
    ]
