"""Training and held-out chats of a run, encoded, and the windows of one rank."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.data import (
    BadRows,
    ChatDataset,
    Document,
    MixtureOrder,
    MixtureSource,
    SourceRows,
    default_cache_folder,
    load_pydoc,
    parse_mixture,
    read_source,
    terminal_progress,
)
from tokennorm.engine import config_to_dict
from tokennorm.errors import DataError, NoSupervisedTokenError
from tokennorm.recipes.sft.config import DataConfig

__all__ = ["Datasets", "build_datasets", "build_evaluation", "settings_identity"]

# Fewer are encoded faster than somebody notices, and would only fill the cache.
CACHED_ROWS = 1000
# Fields of the configuration that decide the windows, given the tokens.
DECIDING = (
    "max_length",
    "packing",
    "pack_length",
    "shuffle",
)


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """The two parts; ``held_out`` is None when nothing is to be evaluated.

    ``order`` gives the samples of each epoch where they come from a mixture, else None. ``groups`` are the names
    of its sources.
    """

    train: ChatDataset
    held_out: ChatDataset | None
    order: MixtureOrder | None = None
    groups: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """Return a hash of every token and mask that is trained on."""
        digest = hashlib.sha256()
        for sample in self.train:
            digest.update(sample.input_ids.numpy().tobytes() + sample.supervised.numpy().tobytes() + b"|")
        return digest.hexdigest()[:16]

    def identity(self, config: DataConfig) -> dict[str, Any]:
        """Return what decides the tokens and their order: a checkpoint must have it in common with a run."""
        identity = {**settings_identity(config), "tokens": self.fingerprint()}
        if self.order is not None:
            parts = zip(self.order.sizes, self.order.weights, strict=True)
            identity["mixture"] = [f"{size} samples, weight {weight}" for size, weight in parts]
        return identity


def settings_identity(config: DataConfig) -> dict[str, Any]:
    """Return the settings that decide the order of the tokens.

    What is at its default is left out, except what always was there: a checkpoint from before there was the option
    still fits.
    """
    resolved, defaults = config_to_dict(config), config_to_dict(DataConfig())
    identity = {name: resolved[name] for name in DECIDING}
    # The window is a stretch of rows; how it is cut into micro-batches changes no sample of it.
    identity["rows_per_window"] = config.micro_batch_size * config.micro_batches_per_window
    for name in ("turns", "pack_buffer", "template_date"):
        if resolved[name] != defaults[name]:
            identity[name] = resolved[name]
    return identity


def build_datasets(
    config: DataConfig, tokenizer: Any, *, seed: int, say: Callable[[str], None], show_progress: bool = False
) -> Datasets:
    """Read, split and encode the sources, and say what became of them.

    Raises:
        DataError: nothing readable, nothing supervised, too many bad rows, or too little to hold any out.
    """
    sources = parse_mixture(config.mixture)
    bad_rows = BadRows(action=config.bad_rows, max_share=config.max_bad_share)
    make = _Maker(config=config, tokenizer=tokenizer, bad_rows=bad_rows, say=say, show_progress=show_progress)
    parts = [make.parts(source, seed) for source in sources or [None]]
    train = ChatDataset.concatenate([part for part, _ in parts])
    held_out = [part for _, part in parts if part is not None]
    if config.eval_path is not None:
        held_out = [make.evaluation(config.eval_path)]
    evaluated = _taken(ChatDataset.concatenate(held_out), config) if held_out else None
    say(f"train: {train.describe()}")
    order = None
    if sources:
        sizes = [len(part) for part, _ in parts]
        order = MixtureOrder(sizes, [source.weight for source in sources], seed=seed, shuffle=config.shuffle)
        for line in _shares([part for part, _ in parts], order, [source.name for source in sources]):
            say(line)
    if evaluated is not None:
        say(f"held-out: {evaluated.describe()}")
    for sentence in (*train.notes, *train.statistics.warnings()):
        say(f"note: {sentence}")
    return Datasets(train=train, held_out=evaluated, order=order, groups=tuple(source.name for source in sources))


def build_evaluation(
    config: DataConfig, tokenizer: Any, *, say: Callable[[str], None], show_progress: bool = False
) -> ChatDataset | None:
    """Read and encode ``eval_path`` alone; None where there is none.

    Raises:
        DataError: nothing readable, nothing supervised, or too many bad rows.
    """
    if config.eval_path is None:
        return None
    bad_rows = BadRows(action=config.bad_rows, max_share=config.max_bad_share)
    make = _Maker(config=config, tokenizer=tokenizer, bad_rows=bad_rows, say=say, show_progress=show_progress)
    evaluated = _taken(make.evaluation(config.eval_path), config)
    say(f"held-out: {evaluated.describe()}")
    return evaluated


def _taken(everything: ChatDataset, config: DataConfig) -> ChatDataset:
    if config.eval_tokens is None:
        return everything
    return everything.take(min_supervised_tokens=min(config.eval_tokens, sum(everything.supervised_lengths)))


def _shares(parts: Sequence[ChatDataset], order: MixtureOrder, names: Sequence[str]) -> list[str]:
    supervised = [
        float(weight) * sum(part.supervised_lengths) for part, weight in zip(parts, order.weights, strict=True)
    ]
    return [
        f"mixture: {name} with weight {weight}: {order.count(index):,} samples in the first epoch "
        f"(it has {len(part):,}), {supervised[index] / sum(supervised):.1%} of the supervised tokens"
        for index, (name, weight, part) in enumerate(zip(names, order.weights, parts, strict=True))
    ]


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Reads and encodes sources, all in the same way."""

    config: DataConfig
    tokenizer: Any
    bad_rows: BadRows
    say: Callable[[str], None]
    show_progress: bool

    def parts(self, source: MixtureSource | None, seed: int) -> tuple[ChatDataset, ChatDataset | None]:
        """Training and held-out part of one source; None: the source of data.path."""
        path, name = (self.config.path, None) if source is None else (source.path, source.name)
        rows: SourceRows | None = None
        if path == "pydoc":
            pydoc = load_pydoc()
            self.say(pydoc.describe())
            train: Sequence[Document] = [pair.conversation for pair in pydoc.train]
            held_out: Sequence[Document] = [pair.conversation for pair in pydoc.held_out]
            held_out = [] if self.config.eval_path is not None else held_out
        else:
            rows = self._read(path)
            train, held_out = self._split(rows.documents, path, seed)
        parts = self._encode(train, "train", name), self._held_out(held_out, path, name)
        if rows is not None:
            self._settle(rows, [part for part in parts if part is not None])
        return parts

    def _held_out(self, documents: Sequence[Document], path: str, name: str | None) -> ChatDataset | None:
        """A part that was split off; None, and a note, when nothing of it can be evaluated."""
        if not documents:
            return None
        try:
            return self._encode(documents, "held-out", name)
        except NoSupervisedTokenError:
            self.say(
                f"note: no evaluation on {path}: nothing is supervised in the {len(documents)} conversations "
                "that are held out of it"
            )
            return None

    def evaluation(self, path: str) -> ChatDataset:
        """A source to evaluate on."""
        rows = self._read(path)
        dataset = self._encode(rows.documents, "held-out", None)
        self._settle(rows, [dataset])
        return dataset

    def _settle(self, rows: SourceRows, parts: Sequence[ChatDataset]) -> None:
        # The share is that of the whole source: one bad row among few that are held out is not many.
        errors = [*rows.errors, *(error for part in parts for error in part.errors)]
        self.bad_rows.settle(errors, rows.num_rows, rows.where)

    def _read(self, path: str) -> SourceRows:
        """All documents of a source; says which rows are left out."""
        rows = read_source(path, bad_rows=self.bad_rows)
        for sentence in self.bad_rows.report(rows.errors, rows.num_rows, rows.where):
            self.say(f"note: {sentence}")
        return rows

    def _encode(self, documents: Sequence[Document], part: str, name: str | None) -> ChatDataset:
        """Encode one part of a source."""
        label = part if name is None else f"{part} {name}"
        with terminal_progress(f"encoding {label}", enabled=self.show_progress) as progress:
            return ChatDataset.encode(
                documents,
                self.tokenizer,
                max_length=self.config.max_length,
                turns=self.config.turns,
                date=self.config.template_date,
                group=name,
                bad_rows=BadRows(action=self.bad_rows.action, max_share=1.0),
                workers=self.config.workers,
                cache=default_cache_folder() if self.config.cache and len(documents) >= CACHED_ROWS else None,
                progress=progress,
            )

    def _split(
        self, everything: Sequence[Document], path: str, seed: int
    ) -> tuple[list[Document], list[Document]]:
        if self.config.eval_path is not None:
            return list(everything), []
        number = math.ceil(self.config.eval_fraction * len(everything))
        if number == 0:
            return list(everything), []
        if number == len(everything):
            raise DataError(
                f"{path} has {len(everything)} chat, and it can't be both trained on and held out",
                fix="add chats, give data.eval_path, or set data.eval_fraction to 0",
            )
        order = list(range(len(everything)))
        random.Random(f"held out {seed}").shuffle(order)
        chosen = set(order[:number])
        return (
            [chat for index, chat in enumerate(everything) if index not in chosen],
            [everything[index] for index in sorted(chosen)],
        )
