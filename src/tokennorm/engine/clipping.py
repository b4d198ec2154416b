"""The norm of a gradient that is partly split over ranks, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_gradients", "gradient_kind"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Return the global L2 norm of all gradients, and scale them down together where it exceeds ``max_norm``.

    Plain gradients, and DTensors of each mesh, are measured apart (torch refuses to mix them) and their squares
    added: one pass over each, one reduction per mesh, the same value on every rank. Plain gradients have to be
    the same on all ranks already.

    Args:
        parameters: each once; those without gradient are left alone.
        max_norm: None only measures.

    Returns:
        The norm before clipping: 0-d, on the device of the first gradient; in float32, or float64 where a gradient
        is.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            # Half precision apart, to be squared in float32.
            groups.setdefault((gradient_kind(gradient), gradient.dtype.itemsize < 4), []).append(parameter)
    norms = [_norm([p.grad for p in group if p.grad is not None]) for group in groups.values()]
    if not norms:
        return torch.zeros(())
    total = norms[0] if len(norms) == 1 else _combined(norms)
    if max_norm is not None:
        for group in groups.values():
            clip_grads_with_norm_(group, max_norm, total)
    return total


def gradient_kind(gradient: Tensor) -> object:
    """Gradients of one kind go through one call of torch's functions on lists; those of two kinds are refused."""
    return (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None


def _norm(gradients: list[Tensor]) -> Tensor:
    """Norm of gradients of one kind, as a plain tensor that is the same on every rank."""
    if gradients[0].dtype.itemsize < 4:
        # In their own dtype the norm would have two or three digits.
        wide = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(wide))
    else:
        norm = get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _combined(norms: list[Tensor]) -> Tensor:
    """The norm of norms, in the widest of their dtypes."""
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]))
