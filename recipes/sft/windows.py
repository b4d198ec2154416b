"""From the data of a run to one rank's windows and evaluation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokennorm.data import (
    Batch,
    ChatDataset,
    Position,
    StreamWindows,
    WindowLoader,
    check_max_length,
    collate_padded,
)
from tokennorm.engine import Runtime
from tokennorm.recipes.sft.config import SftConfig
from tokennorm.recipes.sft.datasets import Datasets, build_datasets, build_evaluation
from tokennorm.recipes.sft.streams import StreamData, build_stream

__all__ = ["RunData", "RunWindows", "eval_batches", "load_data", "pad_id"]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run trains and evaluates on.

    Attributes:
        datasets: the encoded chats, or the sources that are streamed.
        windows: this rank's windows.
        total_steps: optimizer steps of the run.
        identity: what decides the tokens and their order.
    """

    datasets: Datasets | StreamData
    windows: RunWindows | StreamWindows
    total_steps: int
    identity: dict[str, Any]


def load_data(
    config: SftConfig, tokenizer: Any, model: Any, runtime: Runtime, *, say: Callable[[str], None]
) -> RunData:
    """Read and encode the data, or open them as streams, and check that they fit the model.

    Raises:
        DataError: they don't, or can't be read.
    """
    if not config.data.stream:
        return _load_sets(config, tokenizer, model, runtime, say)
    check_max_length(config.data.max_length, model.config)
    held_out = build_evaluation(config.data, tokenizer, say=say, show_progress=runtime.is_main)
    if held_out is not None:
        held_out.check_fits(model)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    data = build_stream(config, vocabulary=vocabulary, held_out=held_out)
    for line in data.describe(config.data):
        say(line)
    windows = data.windows(config.data, tokenizer, pad_token_id=pad_id(tokenizer), runtime=runtime, say=say)
    assert config.train.max_steps is not None
    return RunData(
        datasets=data,
        windows=windows,
        total_steps=config.train.max_steps,
        identity=data.identity(config.data, tokenizer),
    )


def _load_sets(
    config: SftConfig, tokenizer: Any, model: Any, runtime: Runtime, say: Callable[[str], None]
) -> RunData:
    datasets = build_datasets(
        config.data, tokenizer, seed=config.train.seed, say=say, show_progress=runtime.is_main
    )
    for dataset in (datasets.train, datasets.held_out):
        if dataset is not None:
            dataset.check_fits(model)
    data = config.data
    loader = WindowLoader(
        datasets.train,
        micro_batch_size=data.micro_batch_size,
        micro_batches_per_window=data.micro_batches_per_window,
        pad_token_id=pad_id(tokenizer),
        pack_length=(data.pack_length or data.max_length) if data.packing else None,
        shuffle=data.shuffle,
        seed=config.train.seed,
        rank=runtime.rank,
        world_size=runtime.world_size,
        pack_buffer=data.pack_buffer,
        order=datasets.order,
        pad_to_multiple_of=data.pad_to_multiple_of or (64 if data.packing else 1),
    )
    if data.packing:
        say(f"packing: rows of {loader.pack_length} tokens, {loader.fill_rate():.1%} filled")
    total_steps = loader.total_windows(config.train.epochs)
    if config.train.max_steps is not None:
        total_steps = min(total_steps, config.train.max_steps)
    return RunData(
        datasets=datasets,
        windows=RunWindows(loader, config.train.epochs),
        total_steps=total_steps,
        identity=datasets.identity(data),
    )


def pad_id(tokenizer: Any) -> int:
    """Return the id of the filling. It is masked or isolated, so any id inside the vocabulary will do."""
    return 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


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
    dataset: ChatDataset,
    *,
    batch_size: int,
    pad_token_id: int,
    rank: int,
    world_size: int,
    groups: Sequence[str] = (),
) -> list[Batch]:
    """Return one rank's evaluation batches; chats of like length share one, so that little is padded."""
    order = sorted(range(len(dataset)), key=lambda index: dataset.lengths[index])
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [
        collate_padded([dataset[index] for index in batch], pad_token_id=pad_token_id, group_names=groups)
        for batch in batches[rank::world_size]
    ]
