"""Supervised fine-tuning of a causal LM on chats, every supervised token counted once."""

from __future__ import annotations

from tokennorm.recipes.sft.config import SftConfig, default, demo
from tokennorm.recipes.sft.train import SftJob, SftResult, prepare, run

__all__ = [
    "CONFIGS",
    "DESCRIPTION",
    "Config",
    "SftConfig",
    "SftJob",
    "SftResult",
    "default",
    "demo",
    "prepare",
    "run",
]

# What the command line asks of a recipe.
Config = SftConfig
CONFIGS = {"default": default, "demo": demo}
DESCRIPTION = "Fine-tune a causal language model on chats, every supervised token counted exactly once."
