"""Batches of a drafter's training: documents, blocks at random anchors and, from a cache, hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokennorm.data import Batch, ChatDataset, Position, WindowLoader, collate_padded, rank_view
from tokennorm.draft import (
    AnchorRule,
    DraftModel,
    HiddenStateCache,
    anchor_generator,
    collate_log_totals,
    collate_states,
    document_ids,
    drafter_flops,
    make_blocks,
    sample_anchors,
    supervised_tokens,
)

__all__ = ["BlockMaker", "DraftWindows", "held_out_batches", "window_flops"]

# Held-out anchors are drawn from a stream that no training step uses.
_HELD_OUT = -1

Rows = Sequence[Sequence[int]]
"""For each row of a batch the documents in it, in order."""


@dataclass(frozen=True, kw_only=True)
class BlockMaker:
    """Adds to a batch what a drafter trains on.

    Attributes:
        drafter: says block size, layout and vocabulary.
        anchors: most blocks of a row.
        anchor_rule: where they may start.
        seed: of the anchors.
    """

    drafter: DraftModel
    anchors: int
    anchor_rule: AnchorRule
    seed: int

    def __call__(
        self,
        batch: Batch,
        generators: Sequence[torch.Generator],
        states: HiddenStateCache | None,
        rows: Rows | None,
    ) -> dict[str, Any]:
        """The batch with ``blocks``, ``plan`` and ``documents``; with a cache the target's states.

        Args:
            batch: from the loader.
            generators: of the anchors of each row.
            states: the cache, or None: the target runs with the batch.
            rows: documents of each row; None for a dummy.
        """
        config = self.drafter.config
        supervised = supervised_tokens(batch["shift_labels"])
        documents = document_ids(batch["position_ids"], batch.get("attention_mask"))
        anchors = sample_anchors(
            supervised,
            num_anchors=self.anchors,
            generator=generators,
            documents=documents,
            anchor_rule=self.anchor_rule,
        )
        blocks = make_blocks(
            batch["input_ids"],
            supervised,
            anchors,
            block_size=config.block_size,
            first_supervised_slot=config.first_supervised_slot,
            documents=documents,
        )
        extra: dict[str, Any] = {
            "blocks": blocks,
            "plan": blocks.plan(self.drafter.vocabulary),
            "documents": documents,
        }
        if states is not None:
            count, length = batch["input_ids"].shape
            if rows is None:
                extra["features"] = torch.zeros(count, length, config.feature_size)
                extra["last_hidden"] = torch.zeros(count, length, config.hidden_size)
                extra["log_total"] = torch.zeros(count, length) if states.spec.log_totals else None
            else:
                cached = [[states[i] for i in row] for row in rows]
                extra["features"], extra["last_hidden"] = collate_states(cached, row_length=length)
                extra["log_total"] = collate_log_totals(cached, row_length=length)
        return {**batch, **extra}


class DraftWindows:
    """The engine's source of windows: a loader's, with blocks.

    The anchors of a row depend on its place in the run alone, not on the micro-batch or the rank that it falls to:
    however a window is cut, it has the same blocks.

    Args:
        loader: of this rank.
        epochs: of the run.
        maker: adds the blocks.
        states: hidden states of the loader's documents; None: the target runs.
    """

    def __init__(
        self, loader: WindowLoader, epochs: int, *, maker: BlockMaker, states: HiddenStateCache | None
    ) -> None:
        self.loader, self.epochs = loader, epochs
        self.position = Position()
        self._maker, self._states = maker, states

    def __iter__(self) -> Iterator[Sequence[Batch]]:
        loader = self.loader
        for window in loader.windows(self.epochs, start=self.position):
            (rows,) = rank_view([loader.window_rows(window.position)], loader.rank, loader.world_size)
            step = loader.window_number(window.position)
            self.position = window.next_position
            yield [
                self._maker(batch, self._generators(batch, step, index), self._states, rows[index])
                for index, batch in enumerate(window.batches)
            ]

    def _generators(self, batch: Batch, step: int, index: int) -> list[torch.Generator]:
        """One for each row of the rank's ``index``-th micro-batch, by the row's place among those of all ranks."""
        loader = self.loader
        first = (loader.rank + index * loader.world_size) * loader.micro_batch_size
        return [
            anchor_generator(self._maker.seed, data_rank=0, step=step, micro_batch=first + row)
            for row in range(batch["input_ids"].shape[0])
        ]

    def state_dict(self) -> dict[str, int]:
        """Return the place after the last window that was yielded."""
        return {"epoch": self.position.epoch, "window": self.position.window}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place."""
        self.position = Position(epoch=state["epoch"], window=state["window"])


def held_out_batches(
    dataset: ChatDataset,
    *,
    maker: BlockMaker,
    states: HiddenStateCache | None,
    pad_token_id: int,
    rank: int,
    world_size: int,
) -> list[Batch]:
    """One rank's evaluation batches, a document each, always with the same anchors."""
    return [
        maker(
            collate_padded([dataset[i]], pad_token_id=pad_token_id),
            [anchor_generator(maker.seed, data_rank=_HELD_OUT, step=0, micro_batch=i)],
            states,
            [[i]],
        )
        for i in range(rank, len(dataset), world_size)
    ]


def window_flops(drafter: DraftModel, window: Sequence[Mapping[str, Any]]) -> float:
    """The drafter's work on a rank's micro-batches (:func:`tokennorm.draft.drafter_flops`), for MFU."""
    return sum(
        drafter_flops(
            drafter,
            blocks=batch["blocks"],
            plan=batch["plan"],
            position_ids=batch["position_ids"],
            context_tokens=batch["total_tokens"],
            log_totals=batch.get("log_total") is not None,
        ).total
        for batch in window
    )
