"""The sums of one evaluation: every sample once, also where the data loader repeats some to fill its last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokennorm.integrations.hf.checks import refuse_unsized
from tokennorm.integrations.hf.token_losses import TokenLosses, count_of, total_sum
from tokennorm.loss import RatioSum, merge_ratios, reduce_ratios

__all__ = ["SAMPLE_LENGTHS", "EvaluationSums", "NotingLengths"]

SAMPLE_LENGTHS = "tokennorm_sample_lengths"


class NotingLengths:
    """Around a data collator: batches that hold several samples in one row say how long each is.

    Only then can samples that the loader repeated be told from the others.
    """

    def __init__(self, collator: Callable[[Sequence[Any]], Any]) -> None:
        self._collator = collator

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The collator's batch, with the lengths ``[number of samples]`` if it has flattened its samples."""
        batch = self._collator(samples)
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if isinstance(labels, Tensor) and labels.dim() == 2 and len(labels) != len(samples) and _have_ids(samples):
            batch[SAMPLE_LENGTHS] = torch.tensor([len(sample["input_ids"]) for sample in samples])
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_collator":
            raise AttributeError(name)
        return getattr(self._collator, name)


def _have_ids(samples: Sequence[Any]) -> bool:
    return all(hasattr(sample, "keys") and "input_ids" in sample for sample in samples)


class EvaluationSums:
    """Sums of token losses and of counts, on this rank; one reduction at the end.

    Args:
        accelerator: the Trainer's.
        dataloader: the one that is evaluated on.
    """

    def __init__(self, accelerator: Any, dataloader: Any) -> None:
        self._accelerator = accelerator
        self._dataloader = dataloader
        self._sums: dict[str, RatioSum] = {}
        self.sample_lengths: Tensor | None = None

    def add(self, part: TokenLosses, weights: Tensor) -> None:
        """Add one batch.

        Args:
            part: its token losses.
            weights: ``[B, S]``, which tokens count (bool) or how much (float).

        Raises:
            ConfigError: it can't be told which samples the loader repeats.
        """
        self._refuse_unknown_repeats()
        keep = self._first_occurrences(weights)
        if keep is not None:
            weights = torch.where(keep, weights, torch.zeros_like(weights))
        chosen = weights != 0
        count = count_of(weights)

        def weighted_sum(values: Tensor) -> Tensor:
            values = values.detach().view(weights.shape)
            return total_sum(torch.where(chosen, values * weights, torch.zeros_like(values)))

        batch = {"loss": RatioSum(weighted_sum(part.losses), count)}
        for name, values in part.metrics.items():
            batch[name] = RatioSum(weighted_sum(values), count)
        if part.extra_loss is not None:
            extra = part.extra_loss.detach()
            extra = torch.where(count > 0, extra, torch.zeros_like(extra))
            batch["router_loss"] = RatioSum(total_sum(extra) * count, count)
        self._sums = merge_ratios([self._sums, batch])

    def reduce(self) -> dict[str, RatioSum]:
        """Sums over all ranks (a collective call); empty if no batch had labels."""
        return reduce_ratios(self._sums, device=self._accelerator.device)

    def _refuse_unknown_repeats(self) -> None:
        loader = self._dataloader
        dispatched = type(loader).__name__ == "DataLoaderDispatcher"
        if not dispatched and not getattr(loader, "_drop_last", False):
            refuse_unsized(self._accelerator, getattr(loader, "dataset", None))

    def _first_occurrences(self, weights: Tensor) -> Tensor | None:
        """``[B, S]`` bool: tokens of samples that the loader has not already given; None if that is all.

        The loader of several ranks fills up its last round from the beginning of the dataset. The round's samples
        are in the order of the ranks, and the first ``remainder`` are the real ones (Accelerate's
        ``gather_for_metrics`` relies on the same).
        """
        state = self._accelerator.gradient_state
        if state.active_dataloader is not self._dataloader or not state.end_of_dataloader or state.remainder <= 0:
            return None
        rows, length = weights.shape
        lengths = self.sample_lengths
        samples = rows if lengths is None else len(lengths)
        real = min(max(state.remainder - self._accelerator.process_index * samples, 0), samples)
        if real == samples:
            return None
        if lengths is None:
            return (torch.arange(rows, device=weights.device) < real)[:, None].expand(rows, length)
        # Position s predicts token s + 1, which belongs to the first `real` samples if it lies before their end.
        end = int(lengths[:real].sum())
        return (torch.arange(length, device=weights.device) < end - 1).expand(rows, length)
