"""Mixed precision: float32 weights and sums of gradients around arithmetic in half the bits."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokennorm.engine.clipping import gradient_kind
from tokennorm.engine.objective import Batch, Objective, ObjectiveOutput
from tokennorm.engine.sharding import is_sharded
from tokennorm.errors import ConfigError, NonFiniteError

__all__ = [
    "Autocast",
    "AutocastObjective",
    "autocast_dtype",
    "build_scaler",
    "fixed_divisor",
    "precision_notes",
    "step_with_scaler",
    "unscale_gradients",
]

Autocast = Literal["none", "bfloat16", "float16"]
"""What matrix products are computed in; weights, sums of gradients and losses keep their own dtype."""

# Below fp16's smallest normal number a loss scale has no use: some thirty overflows in a row.
_SMALLEST_SCALE = 2.0**-14


def autocast_dtype(name: Autocast) -> torch.dtype | None:
    """Return the dtype that a configuration names.

    Raises:
        ConfigError: an unknown name.
    """
    known: dict[str, torch.dtype | None] = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"autocast is {name!r}", fix=f"give {', '.join(known)}")
    return known[name]


class AutocastObjective:
    """Runs an objective under ``torch.autocast``: training, dummies and evaluation alike.

    Weights of record, their gradients and the reduction over ranks stay as they are (float32); backward runs in
    the dtypes that forward chose. A sharded model casts by its own policy
    (:func:`~tokennorm.engine.sharding.wrap_fsdp`, ``param_dtype``) and is run without autocast.

    Args:
        objective: any; its ``dummy`` is this one's too.
        dtype: bfloat16 or float16.
        device_type: where the model is.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype, device_type: str = "cpu") -> None:
        self.objective, self.dtype, self.device_type = objective, dtype, device_type

    def __call__(self, model: nn.Module, batch: Batch) -> ObjectiveOutput:
        """Return the sums of ``batch``."""
        if is_sharded(model):
            return self.objective(model, batch)
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.objective(model, batch)

    def __getattr__(self, name: str) -> Any:
        """Anything else (``dummy``, ``model_kwargs``) is the inner objective's."""
        if name == "objective":
            raise AttributeError(name)
        return getattr(self.objective, name)


def build_scaler(dtype: torch.dtype | None, device_type: str) -> torch.amp.GradScaler | None:
    """Return a loss scaler for float16, which has no room for small gradients; None for other dtypes."""
    return torch.amp.GradScaler(device_type) if dtype is torch.float16 else None


def fixed_divisor(window_tokens: int, ranks: int) -> float:
    """Return the power of two at or above a rank's part of a window: the divisor of provisional losses in fp16.

    A gradient of one token is then as large in each window, whatever came before: the loss scaler has one range
    to find, and an exact gradient's rescale rounds nothing.

    Args:
        window_tokens: the most that a window of all ranks can hold.
        ranks: among which it is divided.
    """
    return 2.0 ** math.ceil(math.log2(max(1.0, window_tokens / ranks)))


def precision_notes(model: nn.Module, dtype: torch.dtype | None) -> list[str]:
    """Say in words what the settings do to the sums of gradients; an empty list when they stay in float32.

    Args:
        model: wrapped.
        dtype: of the autocast.
    """
    trainable = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    half = sorted(str(one).removeprefix("torch.") for one in trainable if one.itemsize < 4)
    notes = []
    if half:
        kept = {torch.bfloat16: 8, torch.float16: 11}
        bits = min(kept.get(one, 8) for one in trainable if one.itemsize < 4)
        notes.append(
            f"gradients add up in {' and '.join(half)}, which rounds each sum to {bits} bits; float32 weights "
            "with autocast keep 24"
        )
    if dtype is not None and trainable and all(one.itemsize < 4 for one in trainable):
        notes.append("the trainable weights are in half precision already: autocast changes little")
    return notes


class _Part:
    """What ``GradScaler.unscale_`` reads of an optimizer, for some of its parameters."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def unscale_gradients(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Divide the loss scale out of all gradients, plain ones and DTensors of any mesh beside each other.

    ``scaler.unscale_(optimizer)`` hands all gradients of a dtype to one function, which refuses a mixture: so it
    is asked once per kind. :func:`step_with_scaler` goes on from there.

    Args:
        scaler: one that is switched off does nothing.
        optimizer: of the weights.
    """
    kinds: dict[object, list[Tensor]] = {}
    for group in optimizer.param_groups if scaler.is_enabled() else ():
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds.setdefault(gradient_kind(parameter.grad), []).append(parameter)
    # All at once: the scaler knows an optimizer by its id until its update.
    parts: list[Any] = [_Part(parameters) for parameters in kinds.values()] if len(kinds) > 1 else [optimizer]
    for part in parts:
        scaler.unscale_(part)


def step_with_scaler(
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    norm: Tensor,
    gradient_scale: float,
    *,
    ranks: int = 1,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Step unless the gradient overflowed, decide the same on every rank, and move the loss scale.

    What decides is the global norm after the rescale, not what the scaler found in this rank's own gradients: so
    an infinity that the rescale itself made is seen as well. The ranks agree by one small reduction: none steps
    where another one can't.

    Args:
        scaler: after :func:`unscale_gradients`.
        optimizer: of the weights.
        norm: global norm of the exact gradient.
        gradient_scale: what the gradients were multiplied by.
        ranks: number of ranks that train together.
        group: those ranks; None is the default group.

    Returns:
        Whether the step was skipped.

    Raises:
        NonFiniteError: the rescale factor is not finite, or the loss scale has fallen so low that an overflow is
            no longer its fault.
    """
    if not math.isfinite(gradient_scale):
        raise NonFiniteError(
            f"the factor that makes gradients exact is {gradient_scale}",
            why="every gradient would become infinite or NaN, which the loss scaler no longer looks for",
            fix="leave backward_divisor to the kit",
        )
    if _finite_everywhere(norm, ranks, group):
        optimizer.step()
        scaler.update()
        return False
    before = scaler.state_dict()
    after = before["scale"] * before["backoff_factor"]
    if after < _SMALLEST_SCALE:
        raise NonFiniteError(
            f"gradients overflow in float16 even at a loss scale of {before['scale']:g}",
            why="the model itself gives NaN or infinity, and no scale can help; the weights are as they were",
            fix="train in bfloat16, or look for bad rows with the loss guard",
        )
    scaler.update(new_scale=after)
    # The scaler counts steps since the last overflow only when it found the overflow itself.
    scaler.load_state_dict({**before, "scale": after, "_growth_tracker": 0})
    return True


def _finite_everywhere(norm: Tensor, ranks: int, group: dist.ProcessGroup | None) -> bool:
    finite = torch.isfinite(norm).to(torch.float32)
    if ranks > 1:
        # A plain gradient beside split ones is on each rank, and overflows on one if it is not yet the average.
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
    return bool(finite)
