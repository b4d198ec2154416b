"""The mode that refuses host synchronisation sees each kind of it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokennorm.testing import HostSyncError, RefuseHostSync

X = torch.arange(6.0).reshape(2, 3)
MASK = X > 2


def branch(x: Tensor) -> Any:
    return x if x.sum() > 0 else None


def put(x: Tensor) -> Any:
    x = x.clone()
    x[MASK] = torch.zeros(3)
    return x


def save(x: Tensor) -> Any:
    leaf = x.clone().requires_grad_()
    return (leaf[0] * leaf[1]).sum().backward()


SYNCHRONISING: list[Callable[[Tensor], Any]] = [
    lambda x: x.sum().item(),
    lambda x: float(x.sum()),
    lambda x: int(x.sum()),
    branch,
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: x.cpu(),
    lambda x: x[MASK],
    put,
    lambda x: x.nonzero(),
    lambda x: torch.where(MASK),
    lambda x: x.argwhere(),
    lambda x: x.masked_select(MASK),
    lambda x: x.unique(),
    lambda x: x.unique_consecutive(),
    lambda x: x.unique(dim=0),
    lambda x: torch.equal(x, x),
    lambda x: torch.allclose(x, x),
    lambda x: torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0),
    lambda x: torch.bincount(x.flatten().long()),
]
FREE: list[Callable[[Tensor], Any]] = [
    save,
    lambda x: torch.where(MASK, x, 0.0),
    lambda x: x.masked_fill(MASK, 1.0),
    lambda x: torch.nonzero_static(MASK, size=3),
    lambda x: x[torch.tensor([1, 0])],
    lambda x: x.index_select(0, torch.tensor([1])),
    lambda x: torch.repeat_interleave(x, torch.tensor([1, 2]), dim=0, output_size=3),
    lambda x: x.repeat_interleave(2, dim=0),
    lambda x: x.to(torch.float64),
    lambda x: x.sum().add_(3),
    lambda x: (x.shape, x.dtype, x.dim()),
]


@pytest.mark.parametrize("index", range(len(SYNCHRONISING)))
def test_refuses(index: int) -> None:
    with RefuseHostSync(), pytest.raises(HostSyncError, match="makes the host wait"):
        SYNCHRONISING[index](X)


@pytest.mark.parametrize("index", range(len(SYNCHRONISING)))
def test_counts(index: int) -> None:
    with RefuseHostSync(refuse=False) as watch:
        SYNCHRONISING[index](X)
    assert watch.syncs
    SYNCHRONISING[index](X)
    assert len(watch.syncs) < 3  # outside the context nothing is watched


@pytest.mark.parametrize("index", range(len(FREE)))
def test_lets_pass(index: int) -> None:
    with RefuseHostSync(refuse=False) as watch:
        FREE[index](X)
    assert watch.syncs == []


def test_sees_what_backward_does() -> None:
    class Peeking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * gradients[0].max().item()

    x = X.clone().requires_grad_()
    loss = Peeking.apply(x).sum()  # type: ignore[attr-defined]
    with RefuseHostSync(), pytest.raises(HostSyncError):
        loss.backward()
