"""The loss of an evaluation set under Lightning, and how numbers get into its logs unrounded."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DistributedSampler

from tokennorm.errors import KitUsageError
from tokennorm.integrations.windows import sum_of_samples
from tokennorm.loss.terms import RatioSum, reduce_ratios

__all__ = ["EvaluationSums", "log_number"]


class EvaluationSums:
    """Pairs of sums, by name, over one run through the evaluation loaders."""

    def __init__(self) -> None:
        self.dataloader_idx = 0
        self.start()

    def start(self) -> None:
        """Forget everything."""
        self._sums: dict[str, RatioSum] = {}
        self._in_prog_bar: set[str] = set()
        self._rows: dict[tuple[str, int], int] = {}

    def add(
        self, trainer: Trainer, name: str, *, loss_sums: Tensor, effective_tokens: Tensor, prog_bar: bool
    ) -> None:
        """Add one batch of the current loader; see ``TokenNormedModule.log_token_loss``."""
        if not (trainer.validating or trainer.testing or trainer.sanity_checking):
            raise KitUsageError(
                "log_token_loss was called outside of validation_step and test_step",
                fix="in training_step return self.token_loss(...), which logs the loss of each window.",
            )
        rows = loss_sums.shape[0] if loss_sums.dim() else 0
        seen = self._rows.get((name, self.dataloader_idx), 0)
        self._rows[name, self.dataloader_idx] = seen + rows
        limit = _samples_of_this_rank(trainer, self.dataloader_idx)
        real = None if limit is None else min(max(limit - seen, 0), rows)
        self._sums[name] = self._sums.get(name, RatioSum(0.0, 0)) + sum_of_samples(
            loss_sums, effective_tokens, real
        )
        if prog_bar:
            self._in_prog_bar.add(name)

    def log(self, pl_module: LightningModule) -> None:
        """Sum over the ranks (a collective call), and log each mean. A name without tokens is not logged."""
        names = set(self._sums)
        if pl_module.trainer.world_size > 1:
            # A rank may have had no batch, and ranks must agree on what they reduce.
            of_ranks: list[Any] = [None] * pl_module.trainer.world_size
            dist.all_gather_object(of_ranks, (names, self._in_prog_bar))
            names = names.union(*(theirs for theirs, _ in of_ranks))
            self._in_prog_bar = self._in_prog_bar.union(*(theirs for _, theirs in of_ranks))
        sums = {name: self._sums.get(name, RatioSum(0.0, 0)) for name in names}
        for name, ratio in sorted(reduce_ratios(sums, device=pl_module.device).items()):
            if ratio.mean is not None:
                log_number(pl_module, name, ratio.mean, prog_bar=name in self._in_prog_bar)
        self.start()


def log_number(
    pl_module: LightningModule, name: str, value: float, *, on_step: bool = False, prog_bar: bool = False
) -> None:
    """Log a number that is the same on every rank, in float64."""
    # Lightning averages it over ranks, where it warns if that is not asked for; so it has to be on the device.
    device = pl_module.device if pl_module.trainer.world_size > 1 else "cpu"
    pl_module.log(
        name,
        torch.tensor(value, dtype=torch.float64, device=device),
        on_step=on_step,
        on_epoch=not on_step,
        sync_dist=not on_step,
        add_dataloader_idx=False,
        batch_size=1,
        prog_bar=prog_bar,
    )


def _samples_of_this_rank(trainer: Trainer, dataloader_idx: int) -> int | None:
    """How many samples of a loader are no repeats, on this rank; None: all of them.

    ``DistributedSampler`` fills the list of samples up at its end, and rank r takes every R-th from place r on.
    """
    # trainer.val_dataloaders would be those of the last fit, also in trainer.validate.
    loaders = trainer._evaluation_loop._combined_loader
    if loaders is None:
        return None
    loader = loaders.flattened[dataloader_idx]
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return None
    return len(range(sampler.rank, len(cast(Sized, sampler.dataset)), sampler.num_replicas))
