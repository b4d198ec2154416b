"""Sources of a run that are read while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokennorm.data import (
    BadRows,
    ChatDataset,
    EncodeSettings,
    StreamPart,
    StreamSettings,
    StreamSource,
    StreamWindows,
    encoding_fingerprint,
    parse_mixture,
)
from tokennorm.engine import Runtime
from tokennorm.recipes.sft.config import SftConfig
from tokennorm.recipes.sft.data_config import DataConfig
from tokennorm.recipes.sft.datasets import settings_identity

__all__ = ["StreamData", "build_stream", "stream_report"]

PACK_BUFFER = 512


@dataclass(frozen=True, kw_only=True)
class StreamData:
    """The sources; ``held_out`` is None when nothing is evaluated, ``groups`` are the names of a mixture's."""

    parts: tuple[StreamPart, ...]
    settings: StreamSettings
    held_out: ChatDataset | None
    groups: tuple[str, ...]

    def identity(self, config: DataConfig, tokenizer: Any) -> dict[str, Any]:
        """Return what decides the tokens and their order, as far as it is known before they are read.

        Of each source: its files, bytes and first rows. The rest of the rows is compared when a run is resumed,
        as far as it had read them.
        """
        return {
            **settings_identity(config),
            "stream": {
                "shuffle_buffer": config.shuffle_buffer,
                "pack_buffer": config.pack_buffer or PACK_BUFFER,
                "encoding": encoding_fingerprint(tokenizer, self.settings.encode),
                **{
                    part.name or Path(part.source.where).name: {"weight": str(part.weight), **part.source.facts()}
                    for part in self.parts
                },
            },
        }

    def describe(self, config: DataConfig) -> list[str]:
        """Return a line for each source."""
        total = sum(part.weight for part in self.parts)
        shuffled = f"shuffled over {config.shuffle_buffer:,} rows" if config.shuffle else "in its own order"
        return [
            f"train: {part.source.where} as a stream, {shuffled}"
            + (f"; {part.name} is {float(part.weight / total):.1%} of the rows" if part.name else "")
            for part in self.parts
        ]

    def windows(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        pad_token_id: int,
        runtime: Runtime,
        say: Callable[[str], None],
    ) -> StreamWindows:
        """Return one rank's windows; nothing is read yet."""
        return StreamWindows(
            self.parts,
            tokenizer,
            self.settings,
            micro_batch_size=config.micro_batch_size,
            micro_batches_per_window=config.micro_batches_per_window,
            pad_token_id=pad_token_id,
            pack_length=(config.pack_length or config.max_length) if config.packing else None,
            pack_buffer=config.pack_buffer or PACK_BUFFER,
            pad_to_multiple_of=config.pad_to_multiple_of or (64 if config.packing else 1),
            rank=runtime.rank,
            world_size=runtime.world_size,
            say=lambda sentence: say(f"note: {sentence}"),
        )


def build_stream(config: SftConfig, *, vocabulary: int, held_out: ChatDataset | None) -> StreamData:
    """Find the sources.

    Raises:
        DataError: one is not there.
    """
    data, sources = config.data, parse_mixture(config.data.mixture)
    parts = tuple(
        StreamPart(source=StreamSource(source.path), name=source.name, weight=source.weight) for source in sources
    )
    return StreamData(
        parts=parts or (StreamPart(source=StreamSource(data.path)),),
        settings=StreamSettings(
            encode=EncodeSettings(max_length=data.max_length, turns=data.turns, date=data.template_date),
            seed=config.train.seed,
            shuffle=data.shuffle,
            shuffle_buffer=data.shuffle_buffer,
            bad_rows=BadRows(action=data.bad_rows, max_share=data.max_bad_share),
            workers=data.workers,
            vocabulary=vocabulary,
        ),
        held_out=held_out,
        groups=tuple(source.name for source in sources),
    )


def stream_report(windows: StreamWindows, state: Mapping[str, Any]) -> list[str]:
    """Return what became of the rows up to a place, a few sentences for each source."""
    said: list[str] = []
    for account in windows.accounts(state):
        counted = account.statistics
        said.append(
            f"stream: {account.where}: {counted.num_conversations:,} rows, {counted.num_samples:,} samples, "
            f"{counted.supervised_tokens:,} supervised of {counted.total_tokens:,} tokens"
            + (f"; {counted.num_bad:,} bad rows left out" if counted.num_bad else "")
        )
        said += [f"note: {sentence}" for sentence in counted.warnings()]
    return said
