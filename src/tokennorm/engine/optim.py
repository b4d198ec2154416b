"""The optimizer and the learning-rate schedule of a run, from their configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from tokennorm.engine.clipping import gradient_kind
from tokennorm.errors import ConfigError

__all__ = ["OptimConfig", "build_optimizer", "build_scheduler", "learning_rate_factor", "warmup_steps_of"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, its learning-rate schedule and gradient clipping."""

    lr: float = 2e-5
    """Peak learning rate, reached at the end of the warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up, down to lr * min_lr_ratio at the last step."""
    warmup: float = 0.03
    """Below 1: fraction of all steps. 1 or more: number of steps. The learning rate rises linearly."""
    min_lr_ratio: float = 0.0
    """Learning rate at the last step as a fraction of the peak (ignored by "constant")."""
    weight_decay: float = 0.01
    """Decoupled weight decay of AdamW, per step times the learning rate."""
    decay_vectors: bool = False
    """Decay biases, norms and other one-dimensional parameters too (usually harmful)."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon: added to the root of the second moment, never to a token count."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; none: report the norm only."""

    def __post_init__(self) -> None:
        _require(self.lr > 0 and math.isfinite(self.lr), "optim.lr", self.lr, "a positive number such as 2e-5")
        _require(
            self.warmup >= 0 and (self.warmup < 1 or float(self.warmup).is_integer()),
            "optim.warmup",
            self.warmup,
            "a fraction in [0, 1), or a whole number of steps",
        )
        _require(
            self.schedule in ("cosine", "linear", "constant"),
            "optim.schedule",
            self.schedule,
            "cosine, linear or constant",
        )
        _require(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "a number in [0, 1]")
        _require(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "zero or a positive number")
        _require(all(0 <= beta < 1 for beta in self.betas), "optim.betas", self.betas, "two numbers in [0, 1)")
        _require(self.eps > 0, "optim.eps", self.eps, "a positive number such as 1e-8")
        _require(
            self.max_grad_norm is None or self.max_grad_norm > 0,
            "optim.max_grad_norm",
            self.max_grad_norm,
            "a positive number, or none to switch clipping off",
        )


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}", fix=f"give {allowed}")


def build_optimizer(
    parameters: nn.Module | Iterable[tuple[str, nn.Parameter]],
    config: OptimConfig,
    *,
    lr_factors: Mapping[str, float] | None = None,
) -> AdamW:
    """Make AdamW over the trainable parameters, with weight decay on matrices only.

    Args:
        parameters: a module, or ``(name, parameter)`` pairs; frozen ones are left out, and a tied one
            counts once.
        config: the hyper-parameters.
        lr_factors: factors on the learning rate by prefix of the parameter's name (``{"markov_head.": 10.0}``);
            the schedule multiplies them all alike.

    Raises:
        ConfigError: nothing is trainable, or a prefix that no trainable parameter has.
    """
    named = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters
    factors = dict(lr_factors or {})
    trainable = {id(parameter): (name, parameter) for name, parameter in named if parameter.requires_grad}
    if not trainable:
        raise ConfigError(
            "the model has no trainable parameter",
            why="every parameter has requires_grad=False, so a step could not change anything",
            fix="unfreeze what should learn (parameter.requires_grad_(True)), or add an adapter",
        )
    unused = [prefix for prefix in factors if not any(name.startswith(prefix) for name, _ in trainable.values())]
    if unused:
        raise ConfigError(
            f"a learning-rate factor for {unused[0]!r}, but no trainable parameter's name begins so",
            fix="give prefixes of the names in named_parameters()",
        )
    groups: dict[tuple[float, bool, object], list[nn.Parameter]] = {}
    for name, parameter in trainable.values():
        factor = next((value for prefix, value in factors.items() if name.startswith(prefix)), 1.0)
        # Matrices first, and those without a factor before the others: the order that checkpoints know. Split and
        # plain parameters apart, which one fused update refuses to mix.
        decayed = config.decay_vectors or parameter.ndim > 1
        groups.setdefault((factor, decayed, gradient_kind(parameter)), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0] != 1.0, group[0][0], not group[0][1]))
    # One pass over the parameters instead of five; the arithmetic is that of the plain implementation.
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for _, p in trainable.values())
    return AdamW(
        [
            {"params": own, "lr": config.lr * factor, "weight_decay": config.weight_decay if decayed else 0.0}
            for (factor, decayed, _), own in ordered
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=fused,
    )


def warmup_steps_of(config: OptimConfig, total_steps: int) -> int:
    """Return the warm-up in steps: a fraction of ``total_steps`` rounded up, or the given number."""
    return math.ceil(config.warmup * total_steps) if config.warmup < 1 else int(config.warmup)


def learning_rate_factor(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate as a function of the finished steps.

    The first step already learns (factor ``1 / warmup_steps``), the warm-up's last step runs at the peak,
    and the last step of the run at exactly ``min_lr_ratio``, which a cosine from step 0 would miss by one.
    """
    warmup = warmup_steps_of(config, total_steps)
    floor = 1.0 if config.schedule == "constant" else config.min_lr_ratio

    def factor(finished: int) -> float:
        if finished < warmup:
            return (finished + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        # The peak belongs to the warm-up's last step, or to step 0 without a warm-up.
        start = max(warmup - 1, 0)
        progress = min(1.0, (finished - start) / max(1, total_steps - 1 - start))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
        return floor + (1 - floor) * shape

    return factor


def build_scheduler(optimizer: torch.optim.Optimizer, config: OptimConfig, total_steps: int) -> LambdaLR:
    """Make the schedule for a run of ``total_steps`` optimizer steps; step it once after each of them.

    Raises:
        ConfigError: there are no steps, or the warm-up is longer than the run.
    """
    if total_steps < 1:
        raise ConfigError(
            f"the run has {total_steps} optimizer steps",
            fix="give more data, more epochs, or a smaller window",
        )
    if warmup_steps_of(config, total_steps) > total_steps:
        raise ConfigError(
            f"the warm-up takes {warmup_steps_of(config, total_steps)} steps, but the run has {total_steps}",
            why="the learning rate would never reach its peak",
            fix="give optim.warmup as a fraction below 1, or fewer steps",
        )
    return LambdaLR(optimizer, learning_rate_factor(config, total_steps))
