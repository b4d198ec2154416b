"""The windows of a run as batches, for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokennorm.data.collating import Collator
from tokennorm.data.dataset import ChatDataset
from tokennorm.data.packing import Batch
from tokennorm.data.plan import Position, Window, epoch_order, plan_windows, rank_view
from tokennorm.data.rows import fill_rate, pack, pack_buffered
from tokennorm.errors import ConfigError

__all__ = ["LoadedWindow", "WindowLoader"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedWindow:
    """One optimizer step's data on one rank.

    Attributes:
        position: where it stands.
        next_position: where a run goes on after it; this belongs in a checkpoint.
        batches: this rank's micro-batches, dummies included; as many as on every other rank.
    """

    position: Position
    next_position: Position
    batches: list[Batch]


class WindowLoader:
    """Yields the windows of a run from any position.

    It keeps no state: the batches of a window follow from the data set, the arguments and the position.

    Args:
        dataset: the samples.
        micro_batch_size: rows of a micro-batch (samples, or packs).
        micro_batches_per_window: micro-batches of one optimizer step, of all ranks together.
        pad_token_id: id of the filling.
        pack_length: tokens of a packed row; None: one sample per row, padded.
        pad_to_multiple_of: tokens; rows are filled up to a multiple of them (but to no more than ``pack_length``,
            or the longest sample), so that the same shapes come again: compiled models, the kernels' caches and
            the allocators keep something for each. With ``pack_length`` all rows have its shape.
        shuffle: a new order in each epoch.
        seed: of the order.
        rank: this rank.
        world_size: number of ranks that hold different data.
        pack_buffer: documents that packing looks at together (:func:`~tokennorm.data.pack_buffered`); None: all.
        order: gives the samples of an epoch in order (:class:`~tokennorm.data.MixtureOrder`), in place of
            ``shuffle`` and ``seed``; the same on every rank.

    Raises:
        ConfigError: a value that can't work.
        DataError: a sample that is longer than ``pack_length``.
    """

    def __init__(
        self,
        dataset: ChatDataset,
        *,
        micro_batch_size: int,
        micro_batches_per_window: int,
        pad_token_id: int,
        pack_length: int | None = None,
        pad_to_multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pack_buffer: int | None = None,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.dataset = dataset
        self.group_names = dataset.groups
        self.pack_buffer, self.order = pack_buffer, order
        self.micro_batch_size = micro_batch_size
        self.micro_batches_per_window = micro_batches_per_window
        self.pad_token_id = pad_token_id
        self.pack_length = pack_length
        self.pad_to_multiple_of = pad_to_multiple_of
        self.longest_row = max(dataset.lengths) if pack_length is None else pack_length
        self._collator = Collator(
            packed=pack_length is not None,
            pad_token_id=pad_token_id,
            pad_to_multiple_of=pad_to_multiple_of,
            longest_row=self.longest_row,
            group_names=self.group_names,
        )
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._planned_epoch: int | None = None
        self._rows: list[tuple[int, ...]] = []
        self._windows: list[Window] = []
        self._plan(0)
        rank_view([], rank, world_size)  # refuses a bad rank now

    @property
    def packed(self) -> bool:
        """Whether rows hold several documents."""
        return self.pack_length is not None

    def num_windows(self, epoch: int) -> int:
        """Windows of an epoch. Packs depend on the order, so epochs can differ by a few."""
        return len(self._plan(epoch))

    def total_windows(self, num_epochs: int) -> int:
        """Windows of the first ``num_epochs`` epochs: the optimizer steps of a run."""
        return sum(self.num_windows(epoch) for epoch in range(num_epochs))

    def fill_rate(self, epoch: int = 0) -> float:
        """Tokens of an epoch by the tokens that its packed rows could hold, 0 to 1.

        Raises:
            ConfigError: rows are not packed.
        """
        if self.pack_length is None:
            raise ConfigError("the fill rate of rows that are not packed", fix="set pack_length")
        self._plan(epoch)
        return fill_rate(self._rows, self.dataset.lengths, self.pack_length)

    def window(self, position: Position) -> list[Batch]:
        """This rank's batches of one window."""
        windows = self._plan(position.epoch)
        if not 0 <= position.window < len(windows):
            raise ConfigError(
                f"window {position.window} of epoch {position.epoch}, which has {len(windows)}",
                why="the data or the batch sizes are not those that the position was saved with",
                fix="resume with the configuration of the run",
            )
        (view,) = rank_view([windows[position.window]], self.rank, self.world_size)
        return [self._collate(micro_batch) for micro_batch in view]

    def windows(self, num_epochs: int, *, start: Position = Position()) -> Iterator[LoadedWindow]:  # noqa: B008
        """The windows from ``start`` to the end of the last epoch."""
        for epoch in range(start.epoch, num_epochs):
            count = self.num_windows(epoch)
            for window in range(start.window if epoch == start.epoch else 0, count):
                position = Position(epoch, window)
                following = Position(epoch, window + 1) if window + 1 < count else Position(epoch + 1, 0)
                yield LoadedWindow(position=position, next_position=following, batches=self.window(position))

    def window_samples(self, position: Position) -> list[list[int]]:
        """Indices of the samples in each micro-batch of a window, of all ranks (for reports and proofs)."""
        return [[i for row in rows for i in row] for rows in self.window_rows(position)]

    def window_rows(self, position: Position) -> list[list[tuple[int, ...]]]:
        """The same row by row: for each micro-batch its rows, for each row its samples in order."""
        window = self._plan(position.epoch)[position.window]
        return [[self._rows[row] for row in micro_batch] for micro_batch in window]

    def window_number(self, position: Position) -> int:
        """How many windows of the run come before this one."""
        return self.total_windows(position.epoch) + position.window

    def _plan(self, epoch: int) -> list[Window]:
        if self._planned_epoch != epoch:
            order = self._order(epoch)
            if self.pack_length is None:
                self._rows = [(i,) for i in order]
            elif self.pack_buffer is not None:
                documents = ((i, self.dataset.lengths[i]) for i in order)
                self._rows = list(pack_buffered(documents, self.pack_length, self.pack_buffer))
            else:
                self._rows = pack(self.dataset.lengths, self.pack_length, order)
            self._windows = plan_windows(
                range(len(self._rows)),
                micro_batch_size=self.micro_batch_size,
                micro_batches_per_window=self.micro_batches_per_window,
            )
            self._planned_epoch = epoch
        return self._windows

    def _order(self, epoch: int) -> Sequence[int]:
        if self.order is not None:
            return self.order(epoch)
        return epoch_order(len(self.dataset), seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def _collate(self, micro_batch: tuple[int, ...] | None) -> Batch:
        if micro_batch is None:
            return self._collator(None)
        return self._collator([[self.dataset[i] for i in self._rows[row]] for row in micro_batch])
