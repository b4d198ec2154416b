"""LoRA adapters on a frozen base, and what is exported of them."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tokennorm.engine import Runtime, all_ranks_or_none, export_pretrained, unwrap_model
from tokennorm.errors import ConfigError, MissingDependencyError
from tokennorm.recipes.common import load_causal_lm
from tokennorm.recipes.common.quantised import decode_nf4, quantised_layers
from tokennorm.recipes.sft.config import LoraConfig, ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokennorm.engine.export import SavesPretrained

__all__ = ["add_lora", "export_lora"]


def add_lora(model: Any, config: LoraConfig, *, seed: int) -> Any:
    """Freeze ``model`` and give its linear layers adapters; without a rank, return it as it is.

    Adapters of a half-precision base are float32, so that their gradients and updates are not rounded to its few
    bits. They start the same on every rank, and the model's output is what it was before.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: no layer has a name of ``target_modules``.
    """
    if config.rank == 0:
        return model
    peft = _peft()
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha if config.alpha is not None else 2 * config.rank,
        lora_dropout=config.dropout,
        target_modules=list(config.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        # Ranks have random states of their own, for dropout; a split model would be made of different adapters.
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            return peft.get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(
            f"no adapters on {', '.join(config.target_modules) or 'the linear layers'}: {error}",
            fix="give lora.target_modules as the last parts of the names of linear layers, such as q_proj v_proj",
        ) from error


def export_lora(
    model: nn.Module,
    folder: Path,
    *,
    config: LoraConfig,
    base: ModelConfig,
    tokenizer: SavesPretrained,
    runtime: Runtime,
) -> Path:
    """Write the adapter alone, or the model that base and adapter make together.

    For the latter the base is loaded once more, on rank 0: training's own is not touched, whatever wraps it.

    Args:
        model: with adapters, wrapped or not.
        folder: what is written; a merged model leaves its adapter next to it, as ``<folder>-adapter``.
        config: which of the two.
        base: where the base came from.
        tokenizer: goes with it.
        runtime: the ranks; all call.
    """
    if config.export == "adapter":
        return export_pretrained(model, folder, tokenizer=tokenizer, runtime=runtime)
    adapter = export_pretrained(model, folder.with_name(f"{folder.name}-adapter"), runtime=runtime)

    def merge() -> Any:
        if not runtime.is_main:
            return nn.Module()
        plain, _ = load_causal_lm(base.path, base.dtype)
        # What the adapters have learned on: the decoded weights, not those from before they were quantised.
        inner: Any = unwrap_model(model)
        for name, layer in quantised_layers(inner.get_base_model()).items():
            weight: Any = plain.get_submodule(name).weight
            weight.data.copy_(decode_nf4(layer.weight))
        with _quiet():
            merged = _peft().PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
        merged.config.use_cache = True
        return merged

    return export_pretrained(all_ranks_or_none(merge, runtime), folder, tokenizer=tokenizer, runtime=runtime)


@contextmanager
def _quiet() -> Iterator[None]:
    """peft reads names that transformers has renamed; nobody here can do anything about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            "LoRA adapters need peft", fix='install it: pip install "tokennorm[lora]"'
        ) from error
    return peft
