"""Multiply gradients by one 0-d tensor: plain tensors and DTensors, any mix of dtypes and devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["scale_gradients"]


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply the gradient of each parameter in place by ``scale``, without a host synchronisation.

    float32 and float64 gradients go through one ``_foreach_mul_`` per (device, dtype, mesh), by the scale in
    their own dtype. A half-precision gradient is multiplied in float32 and rounded once: the scale itself,
    rounded to bfloat16, would be off by up to 2**-9 for every parameter alike. (A gradient that lives on the CPU
    while the scale lives on an accelerator costs one synchronisation; so does CPU offloading itself.)

    Args:
        parameters: each parameter once; those without gradient are left alone.
        scale: 0-d float64 (float32 on devices without float64).
    """
    groups: dict[tuple[object, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        key = (gradient.device, gradient.dtype, mesh, gradient.layout)
        groups.setdefault(key, []).append(gradient)
    for gradients in groups.values():
        _scale_group(gradients, scale)


def _scale_group(gradients: list[Tensor], scale: Tensor) -> None:
    """Gradients of one device, dtype, layout and mesh."""
    first = gradients[0]
    real = first.dtype.to_real() if first.dtype.is_complex else first.dtype
    is_half = real.itemsize < 4
    factor = scale.to(device=first.device, dtype=torch.float32 if is_half else real)
    if is_half:
        for gradient in gradients:
            gradient.copy_(gradient.to(torch.float32).mul_(factor))
    elif first.layout is torch.strided:
        torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]
    else:
        for gradient in gradients:
            gradient.mul_(factor)
