"""The loop that the README shows is run as it stands there, and its step is exact."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.exactness import by_definition, make_model, make_sample
from tokennorm.data import IGNORE_INDEX, collate_padded
from tokennorm.testing import spawn_ranks

README = Path(__file__).parents[1] / "README.md"
LEARNING_RATE = 0.5


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return next(block for block in blocks if "TokenNormedLossKit" in block)


def _run_example(rank: int, world_size: int) -> float:
    model = make_model()
    before = copy.deepcopy(model)
    # Two micro-batches on each rank, the second rank with far fewer tokens.
    samples = [[make_sample(10 * r + m, supervised=True) for m in range(2)] for r in range(world_size)]
    window = []
    for sample in samples[rank]:
        batch = collate_padded([sample], pad_token_id=0)
        labels = sample.input_ids.where(sample.supervised, IGNORE_INDEX).unsqueeze(0)
        window.append({**batch, "labels": labels})
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    names = {
        "DistributedDataParallel": DistributedDataParallel,
        "device": "cpu",
        "world_size": world_size,
        "model": model,
        "optimizer": optimizer,
        "windows": [window],
    }
    exec(compile(_example(), str(README), "exec"), names)
    truth = by_definition(before, [sample for mine in samples for sample in mine], torch.float64)
    steps = [(a - b) / LEARNING_RATE for a, b in zip(before.parameters(), model.parameters(), strict=True)]
    error = sum(float((step - want).square().sum()) for step, want in zip(steps, truth, strict=True))
    return (error / sum(float(want.square().sum()) for want in truth)) ** 0.5


def test_the_readme_s_loop_is_exact_on_two_ranks() -> None:
    for result in spawn_ranks(_run_example, 2):
        assert result.value < 1e-10
