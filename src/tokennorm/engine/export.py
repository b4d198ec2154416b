"""Export: a folder that ``AutoModelForCausalLM.from_pretrained`` loads, without a trace of tokennorm."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tokennorm.engine.distributed import Runtime, all_ranks_or_none, unwrap_model
from tokennorm.engine.sharding import is_sharded
from tokennorm.errors import CheckpointError

__all__ = ["SavesPretrained", "export_pretrained"]


class SavesPretrained(Protocol):
    """A tokenizer, processor or the like."""

    def save_pretrained(self, save_directory: str, /) -> Any:
        """Write itself into a folder."""
        ...


def export_pretrained(
    model: nn.Module,
    folder: Path | str,
    *,
    tokenizer: SavesPretrained | None = None,
    runtime: Runtime | None = None,
) -> Path:
    """Write model, configuration and tokenizer as a Hugging Face folder, on rank 0.

    The folder appears complete or not at all; one that exists is replaced. A patched model saves itself under
    its family's name, so the patch may stay on. A split model is put together in rank 0's memory.

    Raises:
        CheckpointError: it could not be written.
    """
    target, runtime = Path(folder), runtime or Runtime()
    # A collective, so before what rank 0 does alone.
    state = _gathered(model) if is_sharded(model) else None

    def write() -> None:
        if runtime.is_main:
            _write(unwrap_model(model), target, tokenizer, state)

    all_ranks_or_none(write, runtime)
    return target


def _gathered(model: nn.Module) -> dict[str, Any]:
    """The whole weights, on rank 0's CPU; those of the adapters alone when that is all that will be written."""
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=hasattr(model, "peft_config")
    )
    state = get_model_state_dict(model, options=options)
    # Tied weights come as copies; what is saved must know that they are one.
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(parameter), name)
        if name in state and kept in state:
            state[name] = state[kept]
    return state


def _write(
    model: nn.Module, target: Path, tokenizer: SavesPretrained | None, state: dict[str, Any] | None
) -> None:
    temporary = target.with_name(f".partial-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        given = {} if state is None else {"state_dict": state}
        model.save_pretrained(str(temporary), **given)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be exported to {target}: {error}",
            fix="free some space; the weights are also in the run's last checkpoint",
        ) from error
