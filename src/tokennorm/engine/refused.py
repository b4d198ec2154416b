"""Micro-batches that the loss guard kept out of a window: the dummy in their place, and a file about each."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokennorm.engine.distributed import Runtime
from tokennorm.engine.objective import Batch, Objective, ObjectiveOutput
from tokennorm.errors import KitUsageError
from tokennorm.kit import GuardVerdict, TokenNormedLossKit

__all__ = ["RefusedFolder", "RefusedMicroBatch", "dummy_maker", "judged_loss"]


@dataclass(frozen=True, kw_only=True)
class RefusedMicroBatch:
    """One micro-batch index of a window, refused on all ranks.

    Attributes:
        index: which micro-batch of the window, from 0.
        verdict: why; its ``step`` is the optimizer step that the window was for.
    """

    index: int
    verdict: GuardVerdict

    def record(self) -> dict[str, Any]:
        """What ``metrics.jsonl`` says about it: the same on every rank."""
        verdict = self.verdict
        return {
            "micro_batch": self.index,
            "reason": verdict.reason,
            "loss": verdict.loss,
            "limit": verdict.limit,
            "non_finite_ranks": verdict.non_finite_ranks,
        }

    def __str__(self) -> str:
        verdict = self.verdict
        cause = f"loss NaN or infinite on {verdict.non_finite_ranks} rank(s)"
        if verdict.reason == "spike":
            cause = f"loss {verdict.loss:.4g} above {verdict.limit:.4g}"
        return f"refused micro-batch {self.index} on all ranks: {cause}"


def judged_loss(outputs: ObjectiveOutput) -> Tensor:
    """The loss sum as the guard sees it: 0-d; NaN too when an extra term of the objective is not finite."""
    judged = outputs.loss_sum.detach() if outputs.judged is None else outputs.judged
    for term in outputs.extra_terms.values():
        # A finite number times zero changes nothing, any other becomes NaN: no wait for the device.
        judged = judged + 0.0 * (term.weight * term.numerator.detach()).to(judged.device)
    return judged


def dummy_maker(objective: Objective, kit: TokenNormedLossKit) -> Callable[[Batch], Batch]:
    """The objective's ``dummy``, asked for before the first step rather than at the first NaN.

    Raises:
        KitUsageError: the kit has a loss guard, and the objective makes no dummy.
    """
    dummy = getattr(objective, "dummy", None)
    if dummy is None and kit.loss_guard is not None:
        raise KitUsageError(
            f"the kit has a loss guard, but the objective {type(objective).__name__} has no method dummy(batch)",
            why="a refused micro-batch is replaced by one without supervised tokens that runs through the whole "
            "model, so that every rank goes on issuing the same collectives.",
            fix="give the objective a method dummy(batch) that returns such a micro-batch, or build no guard.",
        )
    return dummy or _no_dummy


def _no_dummy(_batch: Batch) -> Batch:
    raise KitUsageError(
        "the loss guard was installed after the engine was built",
        fix="call kit.build_loss_guard before Engine(...)",
    )


class RefusedFolder:
    """Writes the offending micro-batches of a run, a few per rank, for somebody to look at: ``on_refused``.

    ``step-00000012-micro-003-rank-1.json`` holds the verdict, the micro-batch's tensors (token ids, labels, ...)
    and host values (counts, sources), the losses per token where the objective gives them, and the text of each
    row. Only the ranks whose own micro-batch is the offence write. NaN and infinity are strings there.

    Args:
        folder: e.g. ``runs/my-run/refused``; made when something is refused.
        runtime: this process's place among the ranks.
        limit: files of this rank in the folder, those of earlier starts of the run included; beyond it nothing is
            written.
        decode: token ids of a row to text, e.g. ``tokenizer.decode``.
        describe: what of a micro-batch to write; by default all of it.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        runtime: Runtime | None = None,
        limit: int = 5,
        decode: Callable[[Sequence[int]], str] | None = None,
        describe: Callable[[Batch], Mapping[str, Any]] = dict,
    ) -> None:
        self.folder, self.limit, self.decode, self.describe = Path(folder), limit, decode, describe
        self._rank = (runtime or Runtime()).rank

    def __call__(self, refused: RefusedMicroBatch, batch: Batch, outputs: ObjectiveOutput) -> None:
        """Write one file if this rank's micro-batch is (one of) the offending; never stops a run."""
        if not refused.verdict.own_offence:
            return
        name = f"step-{refused.verdict.step:08d}-micro-{refused.index:03d}-rank-{self._rank}.json"
        path = self.folder / name
        try:
            # A resumed run does the last steps again, and writes the same files again.
            if path.exists() or len(list(self.folder.glob(f"*-rank-{self._rank}.json"))) < self.limit:
                self.folder.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(self._content(refused, batch, outputs), allow_nan=False) + "\n")
        except Exception as error:
            warnings.warn(
                f"the refused micro-batch could not be written: {type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _content(self, refused: RefusedMicroBatch, batch: Batch, outputs: ObjectiveOutput) -> dict[str, Any]:
        content: dict[str, Any] = {
            "step": refused.verdict.step,
            "rank": self._rank,
            **refused.record(),
            "own_loss_sum": refused.verdict.own_loss_sum,
            "extra_terms": {name: term.numerator for name, term in outputs.extra_terms.items()},
            "batch": dict(self.describe(batch)),
        }
        ids = batch.get("input_ids")
        if self.decode is not None and isinstance(ids, Tensor):
            content["text"] = self._text(self.decode, ids)
        if outputs.token_losses is not None:
            content["token_losses"] = outputs.token_losses
        return _plain(content)

    @staticmethod
    def _text(decode: Callable[[Sequence[int]], str], ids: Tensor) -> list[str] | str:
        try:
            return [decode(row) for row in ids.reshape(-1, ids.shape[-1]).tolist()]
        except Exception as error:
            # The ids themselves are worth having, all the more when they can't be decoded.
            return f"not decoded: {type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """The value as JSON that any reader reads."""
    if isinstance(value, Tensor):
        value = value.detach().to("cpu", torch.float64 if value.is_floating_point() else None).tolist()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
