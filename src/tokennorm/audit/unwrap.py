"""From the model that a loop built to the plain module inside: no wrapper, no shards, no dropout."""

from __future__ import annotations

import copy
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from tokennorm.errors import AuditError

__all__ = ["bare_model", "full", "parameters_by_name", "silence_dropout"]

# Names that wrappers (DDP, torch.compile, FSDP1, activation checkpointing) put into a parameter's path.
_WRAPPER_NAMES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters under the names they have without wrappers."""
    return {_plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def _plain_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def full(value: Tensor) -> Tensor:
    """A detached copy of a tensor on the CPU, gathered from its shards if it has any (a collective)."""
    value = value.detach()
    if _is_sharded(value):
        value = cast(Any, value).full_tensor()
    return value.cpu().clone()


def _is_sharded(value: Tensor) -> bool:
    """Whether it is a DTensor; the module is not imported for a program that has none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def silence_dropout(model: nn.Module) -> bool:
    """Set every dropout module's probability to zero; True if one was at work."""
    found = False
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found = found or module.p > 0
            module.p = 0.0
    return found


def bare_model(model: nn.Module) -> nn.Module:
    """The plain module inside DDP, ``torch.compile`` or FSDP2 (which is taken apart in place).

    Raises:
        AuditError: a wrapper that the audit can't see through.
    """
    while True:
        inner = next((getattr(model, name) for name in ("module", "_orig_mod") if _wraps(model, name)), None)
        if inner is None:
            break
        model = inner
    if isinstance(model, nn.parallel.DistributedDataParallel) or "FullyShardedDataParallel" in {
        type(module).__name__ for module in model.modules()
    }:
        raise AuditError(
            f"the audit can't see through a {type(model).__name__}",
            why="the reference runs the plain model, in one process and in float64.",
            fix="pass reference_model=, a function that builds the same model without its wrapper.",
        )
    _undo_fully_shard(model)
    for parameter in model.parameters():
        parameter.grad = None
    # Hugging Face's fast kernel for experts knows no float64.
    choose_experts = getattr(model, "set_experts_implementation", None)
    if choose_experts is not None:
        choose_experts("eager")
    # The copy has new parameters: what DDP hung on the old ones doesn't run in the reference.
    return copy.deepcopy(model)


def _wraps(model: nn.Module, name: str) -> bool:
    """A wrapper has one child, and its name says that it wraps."""
    return list(model._modules) == [name] and isinstance(model._modules[name], nn.Module)


def _undo_fully_shard(model: nn.Module) -> None:
    """Give FSDP2 modules their class, their forward and their full parameters back."""
    plain: dict[int, nn.Parameter] = {}  # by identity, so that tied weights stay tied
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and _is_sharded(parameter):
                if id(parameter) not in plain:
                    value = cast(Any, parameter).full_tensor().detach().clone()
                    plain[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                module._parameters[name] = plain[id(parameter)]
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            # fully_shard made a subclass (FSDPModule, original): the original is what the person wrote.
            module.__class__ = type(module).__mro__[2]
        for key in [key for key in module.__dict__ if key.startswith("__composable_api")]:
            del module.__dict__[key]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if _belongs_to_fsdp(hook):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def _belongs_to_fsdp(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return "fsdp" in str(getattr(function, "__module__", "")).lower()


def check_deterministic(first: Tensor, second: Tensor) -> None:
    """Refuse a model that answers differently when asked twice."""
    if not torch.equal(first, second):
        raise AuditError(
            "the model's loss differs between two calls on the same batch",
            why="a random gradient can't be compared; dropout modules were already silenced, so the randomness "
            "comes from somewhere else (functional dropout, noise, router jitter).",
            fix="switch it off in the build function of the audit, for example attention_dropout=0 in the config.",
        )
