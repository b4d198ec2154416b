"""What the wrapper divides gradients by: the one number, declared or measured, and nowhere else.

DDP and FSDP average over their group, Accelerate and Lightning divide by accumulation steps as well, a comm hook
may sum. The kit multiplies by this number, so that what is left is the sum over the ranks that hold different
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tokennorm.errors import KitUsageError

__all__ = ["averaging_factor_or_default", "measure_averaging"]

_DECLARE = "declare the number instead: TokenNormedLossKit(..., averaging_factor=...)."


def averaging_factor_or_default(declared: float | None, dp_world_size: int) -> float:
    """The declared factor, checked; without one ``dp_world_size``, which is what DDP and FSDP divide by."""
    if declared is None:
        return float(dp_world_size)
    if isinstance(declared, bool) or not isinstance(declared, int | float) or not math.isfinite(declared):
        raise KitUsageError(f"averaging_factor is {declared!r}, not a finite number")
    if declared <= 0:
        raise KitUsageError(
            f"averaging_factor is {declared}",
            why="it is what the wrapper divides gradients by: 1 if it sums, the number of ranks if it averages.",
            fix="leave it out, or let kit.measure_averaging(wrapped_model) find it.",
        )
    return float(declared)


def measure_averaging(
    wrapped_model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    backward: Callable[[Tensor], Any] | None = None,
) -> float:
    """Find what the wrapper around a model divides gradients by, with one backward pass through the wrapper.

    For the length of this call the model's forward is the sum of its own trainable parameters, times a number
    that differs between ranks. Then every gradient element is known on every rank, and what the wrapper makes of
    it, against the true sum over ranks, is the factor. The model's real forward never runs; existing gradients,
    forwards and the random state are as before afterwards. Memory: one set of gradients, as in training.

    Args:
        wrapped_model: a plain model, one in ``DistributedDataParallel``, or one with ``fully_shard`` units.
        group: the ranks that hold different tokens (their gradients should be summed). None: the default group.
            Every rank of the group must call.
        backward: how the loop calls backward, when that divides too: ``accelerator.backward``. No loss scaler
            may be active in it. Default: ``loss.backward()``.

    Returns:
        The factor, the same on every rank.

    Raises:
        KitUsageError: parts of the model have different factors, a part is not reduced at all, or the wrapper
            can't be measured without changing it (static graph, comm hooks with state, FSDP1, DataParallel,
            a wrapper whose gradient sync is switched off).
    """
    _refuse_unmeasurable(wrapped_model)
    parameters = {name: p for name, p in wrapped_model.named_parameters() if p.requires_grad}
    if not parameters:
        raise KitUsageError("the model has no trainable parameter", fix="measure after unfreezing; " + _DECLARE)
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)
    # Rank 0 weighs as much as all others together and one more: any group without it sums to something else, so
    # ranks that are never reduced with each other can't look alike. The marks sum to 2 * ranks, and average to
    # 2, exactly in every dtype.
    mark = ranks + 1.0 if rank == 0 else 1.0
    with _kept_gradients(list(parameters.values())), torch.enable_grad():
        with _probing_forwards(wrapped_model, mark):
            loss = wrapped_model()
            (backward or Tensor.backward)(loss)
        lowest, highest = _observed(parameters, group)
    return _one_factor(list(parameters), lowest, highest, true_sum=2.0 * ranks)


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """A module whose forward is replaced: its own parameters, and the wrapped modules right below it."""

    root: nn.Module
    own: list[tuple[nn.Module, str]]
    below: list[nn.Module]


def _units(wrapped_model: nn.Module) -> list[_Unit]:
    """One unit per module whose call runs a wrapper's hooks: below DDP, each FSDP2 module, and the model."""
    seen: set[int] = set()
    units: list[_Unit] = []

    def visit(callee: nn.Module) -> None:
        root = callee.module if isinstance(callee, DistributedDataParallel) else callee
        own: list[tuple[nn.Module, str]] = []
        below: list[nn.Module] = []
        stack: list[nn.Module] = [root]
        while stack:
            module = stack.pop()
            if module is not root and isinstance(module, DistributedDataParallel | FSDPModule):
                below.append(module)
                continue
            for name, parameter in module._parameters.items():
                # A tied weight counts once: twice would double its gradient.
                if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    own.append((module, name))
            stack.extend(reversed(list(module.children())))
        units.append(_Unit(root=root, own=own, below=below))
        for module in below:
            visit(module)

    visit(wrapped_model)
    return units


@contextmanager
def _probing_forwards(wrapped_model: nn.Module, mark: float) -> Iterator[None]:
    """Replace each unit's forward on the instance; put back whatever was there, also after an error."""
    units = _units(wrapped_model)
    before = [(unit.root, unit.root.__dict__.get("forward")) for unit in units]
    try:
        for unit in units:
            unit.root.__dict__["forward"] = _probe(unit, mark)
        yield
    finally:
        for root, forward in before:
            if forward is None:
                root.__dict__.pop("forward", None)
            else:
                root.__dict__["forward"] = forward


def _probe(unit: _Unit, mark: float) -> Callable[..., Tensor]:
    def forward(*_args: object, **_kwargs: object) -> Tensor:
        total: Tensor | None = None
        # Looked up at call time: inside an FSDP2 unit the parameters are the gathered ones. In the order of
        # registration, so that gradients arrive in about the order of real training (DDP derives its buckets
        # from the first backward).
        for module, name in unit.own:
            parameter = module._parameters[name]
            assert parameter is not None
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = local.sum(dtype=torch.promote_types(local.dtype, torch.float32)) * mark
            total = part if total is None else total + part.to(total.device)
        for callee in unit.below:
            part = callee()
            total = part if total is None else total + part.to(total.device)
        return torch.zeros((), requires_grad=True) if total is None else total

    return forward


@contextmanager
def _kept_gradients(parameters: list[Tensor]) -> Iterator[None]:
    """Take gradients away and bring them back, values included (DDP's may be views into its buckets)."""
    kept = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient, values in kept:
            parameter.grad = gradient
            if gradient is not None and values is not None:
                gradient.detach().copy_(values)


def _observed(
    parameters: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[list[float], list[float]]:
    """Smallest and largest gradient element of each parameter, over the ranks that hold some of it."""
    lowest, highest = [math.inf] * len(parameters), [-math.inf] * len(parameters)
    device = torch.device("cpu")
    missing: list[str] = []
    for index, (name, parameter) in enumerate(parameters.items()):
        gradient = parameter.grad
        device = parameter.device
        if gradient is None:
            missing.append(name)
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if local.numel():
            low, high = torch.aminmax(local.detach().float())
            lowest[index], highest[index] = low.item(), high.item()
    # Two messages in one: MIN of the lowest and of the negated highest. NaN marks a missing gradient.
    message = torch.tensor(
        [*lowest, *(-value for value in highest), -float(len(missing))], dtype=torch.float32, device=device
    )
    if dist.is_initialized():
        dist.all_reduce(message, op=dist.ReduceOp.MIN, group=group)
    *values, worst = message.tolist()
    if worst < 0:
        raise KitUsageError(
            f"{-worst:.0f} trainable parameters got no gradient on a rank; on this one: {missing[:5]}",
            why="their factor can't be seen.",
            fix="measure with gradient sync switched on (not inside no_sync); otherwise " + _DECLARE,
        )
    half = len(parameters)
    return values[:half], [-value for value in values[half:]]


def _one_factor(names: list[str], lowest: list[float], highest: list[float], true_sum: float) -> float:
    by_factor: dict[float, list[str]] = {}
    unreduced: list[str] = []
    for name, low, high in zip(names, lowest, highest, strict=True):
        if low > high:
            continue  # a parameter without elements
        if not (math.isfinite(low) and low > 0 and high - low <= 0.01 * high):
            unreduced.append(f"{name} ({low:g} ... {high:g})")
        else:
            by_factor.setdefault(_snapped(true_sum / low), []).append(name)
    if unreduced:
        raise KitUsageError(
            f"the gradients of {len(unreduced)} parameters differ between ranks (or within the tensor) after "
            f"backward: {', '.join(unreduced[:5])}",
            why="nobody reduces them, so the ranks' weights drift apart and no factor puts that right.",
            fix="put the whole model into the wrapper (e.g. DistributedDataParallel around the outermost module).",
        )
    if len(by_factor) > 1:
        listed = "; ".join(
            f"{factor:g}: {len(group)} parameters ({', '.join(group[:3])})" for factor, group in by_factor.items()
        )
        raise KitUsageError(
            f"parts of the model have different averaging factors: {listed}",
            why="one rescale can't be right for all of them.",
            fix="set FSDP2's divide factor on every unit (set_gradient_divide_factor is not recursive), and wrap "
            "all parts over the same ranks.",
        )
    return next(iter(by_factor))


def _snapped(factor: float) -> float:
    """The whole number that is meant: a reduction in bfloat16 leaves 3.98 of a 4."""
    whole = round(factor)
    return float(whole) if whole >= 1 and abs(factor - whole) <= min(0.01 * whole, 0.3) else factor


def _refuse_unmeasurable(wrapped_model: nn.Module) -> None:
    for name, module in wrapped_model.named_modules():
        reason = _reason_against(module)
        if reason:
            where = f"module {name!r}" if name else "the model"
            raise KitUsageError(f"{where} can't be measured: {reason}", fix=_DECLARE)


def _reason_against(module: nn.Module) -> str | None:
    if isinstance(module, DataParallel):
        return "DataParallel splits batches, and a probe has none."
    if type(module).__name__ == "FullyShardedDataParallel":
        return "FSDP1 replaces parameters by flat ones. (FSDP2, fully_shard, can be measured.)"
    if isinstance(module, DistributedDataParallel):
        if module.static_graph:
            return "DDP(static_graph=True) would record the probe's graph as the model's."
        if not module.require_backward_grad_sync:
            return "DDP's gradient sync is switched off (no_sync)."
        for _, state in module._comm_hooks:
            if state is not None and not isinstance(state, dist.ProcessGroup):
                return f"its comm hook keeps state ({type(state).__name__}), which a probe would change."
    if isinstance(module, FSDPModule):
        for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", []):
            if not (group.reduce_grads and group.all_reduce_grads):
                return "the unit's gradient sync is switched off (set_requires_gradient_sync)."
    return None
