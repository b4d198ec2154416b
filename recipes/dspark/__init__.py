"""Train a DSpark drafter for a target model: prompts, answers, training, evaluation, export."""

from __future__ import annotations

from tokennorm.recipes.dspark.config import DSparkConfig, default, demo
from tokennorm.recipes.dspark.stages import STAGES
from tokennorm.recipes.dspark.train import DSparkJob, DSparkResult, prepare, run

__all__ = [
    "CONFIGS",
    "DESCRIPTION",
    "STAGES",
    "Config",
    "DSparkConfig",
    "DSparkJob",
    "DSparkResult",
    "default",
    "demo",
    "prepare",
    "run",
]

# What the command line asks of a recipe.
Config = DSparkConfig
CONFIGS = {"default": default, "demo": demo}
DESCRIPTION = "Train a DSpark drafter on a target's own answers (tokennorm draft generate makes them)."
