"""A held-out set whose samples are uneven, its right loss, and notes of what a loop says instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from tokennorm.audit import Layout, Sample, collate, make_samples
from tokennorm.recipes.audit.trainer_models import VOCABULARY, tiny_model
from tokennorm.recipes.audit.trainer_report import Evaluation

__all__ = ["Notes", "held_out_loader"]

SAMPLES = make_samples(VOCABULARY)
# As `tokennorm audit trainer` has them: one very long (10), one without a supervised token (11), an odd number.
HELD_OUT = (0, 1, 2, 3, 10, 11, 4, 5, 7)


def _padded(samples: list[Sample]) -> dict[str, Tensor]:
    return collate(samples, False)


def held_out_loader() -> DataLoader[Any]:
    """Batches of two padded rows."""
    rows: Any = [SAMPLES[number] for number in HELD_OUT]
    return DataLoader(rows, batch_size=2, collate_fn=_padded)


@torch.no_grad()
def right_loss(model: str, weights: Mapping[str, Tensor]) -> float:
    """Sum of token losses over their number: one sample at a time, plain model, float64."""
    plain: Any = tiny_model(model)
    plain.load_state_dict(weights)
    plain.double().eval()
    total, count = 0.0, 0
    for number in HELD_OUT:
        batch = _padded([SAMPLES[number]])
        logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        total += F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum").item()
        count += SAMPLES[number].supervised_tokens
    return total / count


@dataclass(frozen=True)
class Notes:
    """A file to which ranks, which are processes of their own, write what they evaluated."""

    path: Path
    model: str

    def add(self, layout: Layout, found: float, weights: Mapping[str, Tensor]) -> None:
        """Note the evaluation loss that rank 0 reports next to the right one."""
        if dist.get_rank() == 0:
            entry = {"layout": layout.name, "ranks": layout.ranks, "loss": found}
            with self.path.open("a") as file:
                file.write(json.dumps({**entry, "right": right_loss(self.model, weights)}) + "\n")

    def read(self) -> tuple[Evaluation, ...]:
        """All of them."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return tuple(Evaluation(**json.loads(line)) for line in lines)
