"""Watch one loop on one rank: the gradients that the optimizer reads, and those that clipping found."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from tokennorm.audit.unwrap import full, parameters_by_name
from tokennorm.errors import AuditError

__all__ = ["ClipRecord", "Observer", "WindowRecord", "as_logged", "torch_optimizers"]

Gradients = dict[str, Tensor | None]

_CLIP = "clip_grads_with_norm_"


@dataclass(frozen=True, kw_only=True)
class ClipRecord:
    """One call of torch's clipping by norm: the gradients it found and what it was told."""

    max_norm: float
    norm_type: float
    total_norm: float
    gradients_before: Gradients


@dataclass(kw_only=True)
class WindowRecord:
    """What one rank saw of one window."""

    parameters: dict[str, Tensor]
    steps: list[Gradients] = field(default_factory=list)
    clips: list[ClipRecord] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    changed_keys: tuple[str, ...] = ()


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers inside what ``build`` returned: itself, a wrapper's ``.optimizer``, or several.

    Raises:
        AuditError: there is none.
    """
    if isinstance(optimizer, Optimizer) and not isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        return [optimizer]
    if isinstance(optimizer, Sequence):
        return [found for item in optimizer for found in torch_optimizers(item)]
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        raise AuditError(
            f"build returned a {type(optimizer).__name__} where the audit expects an optimizer",
            why="the audit reads the gradients at the moment when the optimizer reads them.",
            fix="return (model, optimizer) with a torch.optim.Optimizer, or something that wraps one.",
        )
    return torch_optimizers(inner)


class Observer:
    """Collects a :class:`WindowRecord` per window while the loop under test runs."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._parameters = parameters_by_name(model)
        self._record: WindowRecord | None = None
        self._stepped: set[int] = set()
        for one in torch_optimizers(optimizer):
            one.register_step_pre_hook(self._before_step)

    @contextlib.contextmanager
    def window(self) -> Iterator[WindowRecord]:
        """Everything the loop does inside belongs to one window."""
        self._record = WindowRecord(parameters={name: full(p) for name, p in self._parameters.items()})
        self._stepped = set()
        with self._watch_clipping():
            yield self._record
        self._record = None

    def _gradients(self) -> Gradients:
        return {name: None if p.grad is None else full(p.grad) for name, p in self._parameters.items()}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._record is None:
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._note_step(optimizer)
            return None

        def noting(*inputs: Any, **options: Any) -> Any:
            # Backward happens in here, inside the step; the optimizer reads the gradients afterwards.
            result = closure(*inputs, **options)
            self._note_step(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": noting}
        return (args[0], noting, *args[2:]), kwargs

    def _note_step(self, optimizer: Optimizer) -> None:
        assert self._record is not None
        # Several optimizers (of disjoint parameters) share a step: each adds what it is about to read.
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = {
            name: None if p.grad is None else full(p.grad) for name, p in self._parameters.items() if id(p) in mine
        }
        if not self._record.steps or id(optimizer) in self._stepped:
            self._record.steps.append({})
            self._stepped = set()
        self._stepped.add(id(optimizer))
        self._record.steps[-1].update(found)

    @contextlib.contextmanager
    def _watch_clipping(self) -> Iterator[None]:
        """Put a note-taker around the two functions that every spelling of torch's clipping ends in."""
        norm, clip = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
        public = torch.nn.utils.clip_grads_with_norm_
        # Also where it was imported by its name.
        holders = [module for module in list(sys.modules.values()) if _holds(module, public)]
        norm_type = 2.0

        def noting_norm(tensors: Any, kind: float = 2.0, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal norm_type
            norm_type = float(kwargs.get("norm_type", kind))
            return norm(tensors, kind, *args, **kwargs)

        def noting_clip(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            if self._record is not None:
                self._record.clips.append(
                    ClipRecord(
                        max_norm=float(max_norm),
                        norm_type=norm_type,
                        total_norm=float(full(torch.as_tensor(total_norm))),
                        gradients_before=self._gradients(),
                    )
                )
            clip(parameters, max_norm, total_norm, foreach)

        clip_grad._get_total_norm = noting_norm
        clip_grad._clip_grads_with_norm_ = noting_clip
        for module in holders:
            vars(module)[_CLIP] = noting_clip
        try:
            yield
        finally:
            clip_grad._get_total_norm = norm
            clip_grad._clip_grads_with_norm_ = clip
            for module in holders:
                vars(module)[_CLIP] = public


def _holds(module: Any, function: Any) -> bool:
    """Whether a module has the function under its own name; asking lazy modules would load them."""
    return getattr(module, "__dict__", {}).get(_CLIP) is function


def as_logged(returned: Any) -> dict[str, float]:
    """The numbers that a step returned: a loss, or a mapping with ``loss``, ``grad_norm``, ``tokens``."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        returned = {"loss": returned}
    numbers = {}
    for name in ("loss", "grad_norm", "tokens"):
        value = returned.get(name)
        if isinstance(value, Tensor):
            value = full(value).item() if value.numel() == 1 else None
        if isinstance(value, (int, float)):
            numbers[name] = float(value)
    return numbers


def changed_keys(before: Iterable[Any], after: Iterable[Any]) -> tuple[str, ...]:
    """Keys of micro-batches (mappings) whose value a step changed or removed."""
    changed = set()
    for old, new in zip(before, after, strict=False):
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        for key, value in old.items():
            same = key in new and (
                torch.equal(value, new[key])
                if isinstance(value, Tensor) and isinstance(new[key], Tensor)
                else value is new[key] or isinstance(value, Tensor) is isinstance(new[key], Tensor)
            )
            if not same:
                changed.add(str(key))
    return tuple(sorted(changed))
