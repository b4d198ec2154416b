"""What is refused before anything runs, and where no library is needed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer
from trl import DPOTrainer

from tests.integrations import hf_toy as toy
from tokennorm.errors import ConfigError, MissingDependencyError
from tokennorm.integrations.hf import token_normalised
from tokennorm.integrations.hf.checks import refuse_unsupported


def test_only_trainers_with_token_losses() -> None:
    exact = token_normalised(Trainer)
    assert token_normalised(exact) is exact
    with pytest.raises(ConfigError, match="not a subclass"):
        token_normalised(torch.nn.Module)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="DPOTrainer"):
        token_normalised(DPOTrainer)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"torch_compile": True}, "torch_compile"),
        ({"use_liger_kernel": True}, "liger"),
        ({"optim": "lomo"}, "inside backward"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["q_proj"]}, "inside backward"),
    ],
)
def test_arguments(options: dict[str, Any], reason: str) -> None:
    run = token_normalised(Trainer)(model=toy.dense(), args=toy.arguments())
    for name, value in options.items():
        setattr(run.args, name, value)
    with pytest.raises(ConfigError, match=reason):
        refuse_unsupported(run)


def test_compute_loss_func() -> None:
    with pytest.raises(ConfigError, match="override token_losses"):
        token_normalised(Trainer)(
            model=toy.dense(), args=toy.arguments(), compute_loss_func=lambda *args, **kwargs: None
        )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_distributed_loading_by_transformers": True}, "DistributedConfig"),
        ({"is_model_parallel": True}, "device_map"),
        ({"distributed_type": "XLA"}, "XLA"),
        ({"parallelism_config": SimpleNamespace(tp_enabled=True)}, "TP"),
        ({"parallelism_config": SimpleNamespace(cp_enabled=True)}, "CP"),
        ({"gradient_accumulation_steps": 4}, "4 accumulation steps"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_parallelism_and_models(changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = token_normalised(Trainer)(model=toy.dense(), args=toy.arguments())
    refuse_unsupported(run)
    for name, value in changes.items():
        if name in ("distributed_type", "parallelism_config", "gradient_accumulation_steps"):
            monkeypatch.setattr(type(run.accelerator), name, value, raising=False)
        elif name == "is_encoder_decoder":
            run.model.config.is_encoder_decoder = value
        else:
            monkeypatch.setattr(run, name, value)
    with pytest.raises(ConfigError, match=reason):
        refuse_unsupported(run)


@pytest.mark.parametrize("version", ["4.57.1", "5.18.0", "6.0.0.dev0"])
def test_other_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=f"transformers {version}"):
        token_normalised(Trainer)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(MissingDependencyError, match=r"tokennorm\[integrations\]"):
        token_normalised(Trainer)


def test_importing_the_integration_needs_torch_only() -> None:
    code = (
        "import sys; import tokennorm.integrations.hf; "
        "assert not {'transformers', 'accelerate', 'trl', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
