"""What a checkpoint holds of an engine, by name: tensors apart from plain values, independent of the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tokennorm.engine.checkpoint_tensors import Description, describe
from tokennorm.engine.distributed import unwrap_model
from tokennorm.engine.engine import Engine
from tokennorm.engine.sharding import reshard

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "compare_groups",
    "compare_tensors",
    "compare_values",
    "flatten",
    "frozen_fingerprint",
    "model_tensors",
    "optimizer_templates",
    "optimizer_tensors",
    "plain_state",
    "restore_plain_state",
    "tensor_bytes",
]

MODEL, OPTIMIZER = "model.", "optimizer."
# What wrappers add to names: a compiled or checkpointed module's weights are the same weights.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def model_tensors(engine: Engine, *, frozen: bool = True) -> dict[str, Tensor]:
    """Return ``model.NAME`` -> parameter or persistent buffer, the engine's own storage; a tied one once.

    Without ``frozen``, only what can change: buffers and the parameters that learn.
    """
    model = unwrap_model(engine.model)
    reshard(model)
    changing = _changing(model)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in seen and (frozen or id(value) in changing):
            seen.add(id(value))
            found[MODEL + _plain(name)] = value.detach()
    return found


def frozen_fingerprint(model: nn.Module) -> str | None:
    """Return a SHA-256 of the names and values of all that never changes: frozen parameters, and what else the
    state dict holds of them (the scales of quantised ones). None when every parameter learns.

    Call it before the model is wrapped; the values are read on the CPU.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return None
    changing, digest = _changing(model), hashlib.sha256()
    for name, value in sorted(model.state_dict(keep_vars=True).items()):
        if isinstance(value, Tensor) and id(value) not in changing:
            digest.update(f"{_plain(name)} {tuple(value.shape)} {value.dtype}\n".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def optimizer_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return ``optimizer.NAME.KEY`` -> tensor of the optimizer's state, e.g. ``optimizer.head.weight.exp_avg``."""
    found: dict[str, Tensor] = {}
    for name, parameter in _optimised(engine).items():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{OPTIMIZER}{name}.{key}"] = value
    return found


def tensor_bytes(engine: Engine, *, frozen: bool = True) -> int:
    """Return the bytes of all tensors, those of a split model over all ranks."""
    tensors = (*model_tensors(engine, frozen=frozen).values(), *optimizer_tensors(engine).values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def plain_state(engine: Engine) -> dict[str, Any]:
    """Return what is no tensor of the model's or the optimizer's, the same on every rank."""
    guard = engine.token_loss_kit.loss_guard
    values = {
        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for name, parameter in _optimised(engine).items()
        if (state := engine.optimizer.state.get(parameter))
    }
    return {
        "groups": [
            {**{key: value for key, value in group.items() if key != "params"}, "names": names}
            for group, names in zip(engine.optimizer.param_groups, _group_names(engine), strict=True)
        ],
        "values": values,
        "scheduler": None if engine.scheduler is None else engine.scheduler.state_dict(),
        "scaler": engine.scaler.state_dict(),
        "guard": None if guard is None else guard.state_dict(),
        "kit": engine.token_loss_kit.state_dict(),
    }


def optimizer_templates(engine: Engine, index: Mapping[str, Description]) -> dict[str, Tensor]:
    """Return empty tensors for the optimizer state of a checkpoint, split as the parameters are here."""
    found: dict[str, Tensor] = {}
    parameters = _optimised(engine)
    for name, (shape, dtype) in index.items():
        if name.startswith(OPTIMIZER):
            parameter = parameters[name.removeprefix(OPTIMIZER).rpartition(".")[0]]
            found[name] = (
                torch.empty_like(parameter.detach(), dtype=dtype)
                if tuple(parameter.shape) == shape
                else torch.empty(shape, dtype=dtype, device=engine.device)
            )
    return found


def restore_plain_state(
    engine: Engine, state: Mapping[str, Any], tensors: Mapping[str, Tensor], *, own_settings: bool = False
) -> None:
    """Give optimizer, schedule, scaler, accounting and guard their state; ``tensors`` are the filled templates.

    With ``own_settings`` the settings of the optimizer's groups (learning rate, decay, ...) stay the engine's.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    by_name: dict[str, dict[str, Any]] = {name: dict(values) for name, values in state["values"].items()}
    for full, value in tensors.items():
        name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
        by_name.setdefault(name, {})[key] = value
    names = [name for group in _group_names(engine) for name in group]
    by_index = {number: by_name[name] for number, name in enumerate(names) if name in by_name}
    numbers = iter(range(sum(len(group["names"]) for group in state["groups"])))
    groups = [
        {
            **{key: value for key, value in group.items() if key != "names"},
            "params": [next(numbers) for _ in group["names"]],
        }
        for group in state["groups"]
    ]
    engine.optimizer.load_state_dict({"state": by_index, "param_groups": groups})
    if engine.scheduler is not None:
        engine.scheduler.load_state_dict(state["scheduler"])
    if own_settings:
        for group, values in zip(engine.optimizer.param_groups, settings, strict=True):
            group.update(values)
        _follow_own_schedule(engine)
    # Empty when it was or is switched off.
    if state["scaler"] and engine.scaler.is_enabled():
        engine.scaler.load_state_dict(state["scaler"])
    # Checkpoints of earlier versions have none.
    if "kit" in state:
        engine.token_loss_kit.load_state_dict(state["kit"])
    if engine.token_loss_kit.loss_guard is not None and state["guard"] is not None:
        engine.token_loss_kit.loss_guard.load_state_dict(state["guard"])


def _follow_own_schedule(engine: Engine) -> None:
    """Set the rates that the engine's own schedule has at the step that was loaded."""
    scheduler, groups = engine.scheduler, engine.optimizer.param_groups
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
        for group, base, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in groups]
    elif scheduler is not None:
        # Of another kind nobody knows which part of its state is a setting: it goes on as it was.
        for group, rate in zip(groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate


def compare_tensors(index: Mapping[str, Description], engine: Engine, *, frozen: bool = True) -> list[str]:
    """Name the tensors of the model that are not the same there and here."""
    own = {name: describe(tensor) for name, tensor in model_tensors(engine, frozen=frozen).items()}
    saved = {name: value for name, value in index.items() if name.startswith(MODEL)}

    def words(state: Mapping[str, Description], name: str) -> str:
        return f"{list(state[name][0])} {state[name][1]}" if name in state else "no such tensor"

    return [
        f"{name.removeprefix(MODEL)}: {words(saved, name)} there, {words(own, name)} here"
        for name in sorted(saved.keys() | own.keys())
        if saved.get(name) != own.get(name)
    ]


def compare_groups(saved: Mapping[str, Any], engine: Engine, *, guard: bool = True) -> list[str]:
    """Name what the optimizers, schedules and (with ``guard``) guards have not in common."""
    there, here = [group["names"] for group in saved["groups"]], _group_names(engine)
    differences = []
    if [len(names) for names in there] != [len(names) for names in here]:
        sizes = [[len(names) for names in groups] for groups in (there, here)]
        differences.append(f"parameters of the optimizer's groups: {sizes[0]} there, {sizes[1]} here")
    elif there != here:
        pair = next(
            (a, b)
            for one, other in zip(there, here, strict=True)
            for a, b in zip(one, other, strict=True)
            if a != b
        )
        differences.append(f"a parameter of the optimizer: {pair[0]} there, {pair[1]} here")
    if (saved["scheduler"] is None) != (engine.scheduler is None):
        differences.append("only one of the two has a learning-rate schedule")
    if guard and (saved["guard"] is None) != (engine.token_loss_kit.loss_guard is None):
        differences.append("only one of the two has a loss guard")
    return differences


def compare_values(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Name the entries of two flat dicts that differ."""
    absent = "nothing"
    return [
        f"{name}: {saved.get(name, absent)!r} there, {own.get(name, absent)!r} here"
        for name in sorted(saved.keys() | own.keys())
        if saved.get(name, absent) != own.get(name, absent)
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one: ``{"optim": {"lr": 1}}`` -> ``{"optim.lr": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _optimised(engine: Engine) -> dict[str, Tensor]:
    return {
        name: parameter
        for names, group in zip(_group_names(engine), engine.optimizer.param_groups, strict=True)
        for name, parameter in zip(names, group["params"], strict=True)
    }


def _group_names(engine: Engine) -> list[list[str]]:
    model = unwrap_model(engine.model)
    reshard(model)
    names = {id(parameter): _plain(name) for name, parameter in model.named_parameters()}
    return [
        # A parameter from outside the model is known by its place.
        [
            names.get(id(parameter), f"group {number} parameter {place}")
            for place, parameter in enumerate(group["params"])
        ]
        for number, group in enumerate(engine.optimizer.param_groups)
    ]


def _changing(model: nn.Module) -> set[int]:
    learning = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return {id(value) for value in (*learning, *model.buffers())}


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
