"""The attention of packed rows: chosen where the model can have it, said where not, and the same training."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.sft.tests.tiny import job_of, tiny_config
from tokennorm.engine import Runtime
from tokennorm.errors import ConfigError, PatchError
from tokennorm.kit.varlen import VARLEN_ATTENTION
from tokennorm.recipes.sft import prepare
from tokennorm.recipes.sft.config import ModelConfig


def attention_of(job: Any) -> str:
    return job.engine.model.config._attn_implementation


def test_packed_rows_train_the_same_without_square_masks(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: dict[str, int] = {}
    attend = torch.nn.functional.scaled_dot_product_attention
    losses, norms = [], []
    for name, attention in (("inside", "auto"), ("square", "model")):
        model = replace(tiny_config(tiny_folder, "x").model, attention=attention)
        job = job_of(tiny_folder, model=model)
        assert (attention_of(job) == VARLEN_ATTENTION) is (name == "inside")

        def spy(*args: Any, attn_mask: Any = None, name: str = name, **kwargs: Any) -> Any:
            largest[name] = max(largest.get(name, 0), 0 if attn_mask is None else attn_mask.numel())
            return attend(*args, attn_mask=attn_mask, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        reports = [job.engine.train_step(window) for window, _ in zip(job.windows, range(3), strict=False)]
        monkeypatch.undo()
        losses.append([report.loss for report in reports])
        norms.append([report.grad_norm for report in reports])
    assert largest["inside"] == 0
    assert largest["square"] > 0
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    assert norms[0] == pytest.approx(norms[1], rel=1e-8)


def test_a_model_that_can_not_have_it_keeps_its_own_and_says_why(tiny_folder: Path) -> None:
    config = tiny_config(tiny_folder, "x")
    folder = tiny_folder / "dropout"
    shutil.copytree(tiny_folder / "model", folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "attention_dropout": 0.1}))
    model = replace(config.model, path=str(folder))
    said: list[str] = []
    job = prepare(replace(config, model=model), Runtime(), say=said.append)
    assert attention_of(job) == "sdpa"
    (note,) = [line for line in said if "square mask" in line]
    assert "dropout of 0.1 on its weights" in note
    with pytest.raises(PatchError, match=r"dropout of 0\.1"):
        job_of(tiny_folder, model=replace(model, attention="varlen"))


def test_padded_rows_and_compiled_models_keep_their_own(tiny_folder: Path) -> None:
    config = tiny_config(tiny_folder, "x")
    assert attention_of(job_of(tiny_folder, data=replace(config.data, packing=False))) == "sdpa"
    compiled = replace(config.model, compile=True, compile_backend="aot_eager")
    assert attention_of(job_of(tiny_folder, model=compiled)) == "sdpa"
    with pytest.raises(ConfigError, match=r"model\.attention is 'varlen'"):
        ModelConfig(compile=True, attention="varlen")
