"""What operators cost, counted rather than timed."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear", "aten.baddbmm")


class OperatorCost(TorchDispatchMode):
    """Counts the multiply-adds of matrix products and remembers the largest tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func).startswith(PRODUCTS):
            left, right = [a for a in args if isinstance(a, torch.Tensor) and a.dim() == 2][-2:]
            assert left.shape[1] == right.shape[0]
            self.multiply_adds += left.shape[0] * left.shape[1] * right.shape[1]
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out
