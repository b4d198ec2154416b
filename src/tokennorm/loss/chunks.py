"""One pass over the supervised rows, a chunk of logits at a time: losses, and gradients in the same place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokennorm.loss.products import Products
from tokennorm.loss.row_math import RowLoss

__all__ = ["ChunkPlan", "Gradients", "Needs", "default_chunk_size", "run_chunks"]

# Bytes of one chunk of float32 logits. On a CPU larger chunks gain nothing and cost memory; an accelerator wants
# enough rows in a product to be busy.
_CHUNK_BYTES_CPU = 96 * 2**20
_CHUNK_BYTES_ACCELERATOR = 512 * 2**20
# On a CPU the passes over a chunk go block by block, so that each block stays in a core's cache.
_BLOCK_BYTES_PER_THREAD = 2**20


def default_chunk_size(num_rows: int, vocabulary: int, device: torch.device) -> int:
    """Rows of logits held at once: what fits the memory budget, shared out evenly over the chunks.

    Args:
        num_rows: supervised rows, N.
        vocabulary: number of rows of the head, V.
        device: where the product runs.
    """
    budget = _CHUNK_BYTES_CPU if device.type == "cpu" else _CHUNK_BYTES_ACCELERATOR
    most = max(1, budget // (4 * vocabulary))
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks))


@dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """Everything but the three differentiable tensors.

    Attributes:
        row_loss: the loss of one row of logits.
        products: how to multiply.
        rows: ``[n]`` indices of the supervised rows among the N; None when all are supervised.
        labels: ``[n]``, of the supervised rows, inside the vocabulary.
        weights: ``[n]`` factor of each supervised row's loss, or None.
        chunk_size: rows of logits held at once.
        sum_rows: return the sum rather than ``[N]``.
        gradients: whether autograd was on where the operator was called.
    """

    row_loss: RowLoss
    products: Products
    rows: Tensor | None
    labels: Tensor
    weights: Tensor | None
    chunk_size: int
    sum_rows: bool
    gradients: bool


class Gradients(NamedTuple):
    """Gradients in the accumulate dtype: hidden ``[n, D]`` (supervised rows only), weight, bias."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Needs(NamedTuple):
    """Which of the three gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class PassOutput(NamedTuple):
    """Results of the supervised rows ``[n]``, and the gradients."""

    loss: Tensor
    z: Tensor | None
    stats: list[Tensor]
    gradients: Gradients


def run_chunks(
    plan: ChunkPlan, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Needs, upstream: Tensor | None
) -> PassOutput:
    """One pass over the supervised rows: losses, and the gradients that ``needs`` asks for.

    ``upstream`` is the gradient that reaches each supervised row ``[n]`` (None: 1).
    """
    products, accumulate = plan.products, plan.products.accumulate_dtype
    num_rows, vocabulary = plan.labels.shape[0], weight.shape[0]
    weight = products.operand(weight)
    factors = plan.weights if upstream is None else upstream if plan.weights is None else upstream * plan.weights
    factors = None if factors is None else factors.to(accumulate)
    with_gradient = any(needs)

    def new(*shape: int, dtype: torch.dtype = accumulate) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=hidden.device)

    loss = new(num_rows)
    z = new(num_rows) if plan.row_loss.z_loss else None
    stats = [new(num_rows, dtype=torch.bool if name == "is_top1" else accumulate) for name in plan.row_loss.stats]
    grad_hidden = new(num_rows, hidden.shape[1]) if needs.hidden else None
    grad_weight = new(*weight.shape) if needs.weight else None
    grad_bias = torch.zeros(vocabulary, dtype=accumulate, device=hidden.device) if needs.bias else None
    if num_rows == 0 and grad_weight is not None:
        grad_weight.zero_()

    buffer = new(min(plan.chunk_size, num_rows), vocabulary)
    block = _block_rows(vocabulary, hidden.device, plan.chunk_size)
    for start in range(0, num_rows, plan.chunk_size):
        end = min(start + plan.chunk_size, num_rows)
        chunk = hidden[start:end] if plan.rows is None else hidden.index_select(0, plan.rows[start:end])
        chunk = products.operand(chunk)
        logits = products.logits(chunk, weight, bias, out=buffer[: end - start])
        for low in range(start, end, block):
            high = min(low + block, end)
            rows = slice(low, high)
            result = plan.row_loss(
                logits[low - start : high - start],
                plan.labels[rows],
                with_gradient=with_gradient,
                row_factor=None if factors is None else factors[rows],
            )
            loss[rows] = result.loss
            if z is not None and result.z is not None:
                z[rows] = result.z
            for name, value in zip(plan.row_loss.stats, stats, strict=True):
                value[rows] = result.stats[name]
        if grad_hidden is not None:
            products.grad_hidden(logits, weight, out=grad_hidden[start:end])
        if grad_weight is not None:
            products.grad_weight(logits, chunk, out=grad_weight, first=start == 0)
        if grad_bias is not None:
            grad_bias += logits.sum(dim=0)
    if plan.weights is not None:
        loss *= plan.weights
        if z is not None:
            z *= plan.weights
    return PassOutput(loss, z, stats, Gradients(grad_hidden, grad_weight, grad_bias))


def _block_rows(vocabulary: int, device: torch.device, chunk_size: int) -> int:
    if device.type != "cpu":
        return chunk_size
    return max(1, _BLOCK_BYTES_PER_THREAD // (4 * vocabulary)) * torch.get_num_threads()
