"""What a checkpoint must have in common with the run that goes on from it."""

from __future__ import annotations

from typing import Any

from tokennorm.engine import config_to_dict
from tokennorm.recipes.common.guard import guard_identity
from tokennorm.recipes.sft.config import SftConfig
from tokennorm.recipes.sft.windows import RunData

__all__ = ["run_identity"]


def run_identity(config: SftConfig, data: RunData) -> dict[str, Any]:
    """Return everything that decides the weights; where a run is saved or how often it reports is left out."""
    resolved = config_to_dict(config)
    lora = {name: value for name, value in resolved["lora"].items() if name != "export"}
    autocast = config.model.autocast
    layout = {name: resolved["data"][name] for name in ("micro_batch_size", "micro_batches_per_window")}
    return {
        **guard_identity(config.guard, layout),
        **({"lora": lora} if config.lora.rank else {}),
        "data": data.identity,
        "model": {
            "dtype": config.model.dtype,
            **({"autocast": autocast} if autocast != "none" else {}),
            **({"quantize": config.model.quantize} if config.model.quantize != "none" else {}),
        },
        "optim": resolved["optim"],
        "train": {**resolved["train"], "max_steps": data.total_steps},
    }
