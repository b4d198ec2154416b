"""The trained drafter as a folder for a server, checked against what each server's schema accepts."""

from __future__ import annotations

import torch

from tokennorm.draft import export_drafter, load_drafter, validate_folder
from tokennorm.engine import ProgressPrinter
from tokennorm.recipes.dspark.build import load_target
from tokennorm.recipes.dspark.config import DSparkConfig
from tokennorm.recipes.dspark.folder import StageFolder

__all__ = ["export"]


def export(config: DSparkConfig) -> None:
    """Write the drafter in the schema of ``config.export`` and say what each server would make of it."""
    folder, printer = StageFolder.of(config.run.dir), ProgressPrinter(0)
    folder.require(folder.drafter, made_by="tokennorm train dspark")
    target, _ = load_target(config)
    path = export_drafter(
        load_drafter(folder.drafter, target=target),
        folder.export,
        kind=config.export.format,
        dtype=getattr(torch, config.export.dtype),
        verifier=config.target.path,
        num_anchors=config.data.anchors,
        provenance={"target": config.target.path, "trained": str(folder.train)},
    )
    printer.say(f"exported {path} ({config.export.format}, {config.export.dtype})")
    printer.say(str(validate_folder(path)))
