"""The state of every random generator that a training step may draw from."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

__all__ = ["capture_rng_state", "continue_rng_state", "restore_rng_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, torch's and, where it is loaded, numpy's global generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def capture_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the generators' states as tensors and plain Python values, so that no code has to be unpickled."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(internal), gauss], "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where :func:`capture_rng_state` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def continue_rng_state(state: dict[str, Any], rank: int) -> None:
    """Seed the generators of a rank that joins a run; they follow from rank 0's ``state`` and differ by rank."""
    digest = hashlib.sha256(bytes(state["torch"].tolist()) + f" rank {rank}".encode()).digest()
    seed_everything(int.from_bytes(digest[:7], "big"))
