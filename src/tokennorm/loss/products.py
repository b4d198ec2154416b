"""The three matrix products of a linear cross-entropy, each in the dtype that keeps it right.

float32 and float64 inputs are multiplied as they are. bfloat16 and float16 inputs are multiplied in their own
dtype where the result is rounded once, and in float32 where it is accumulated over chunks. float16 gradients of
logits would lose most small probabilities (below 6e-8 they are zero), so both of their products run in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Products"]

# MKL on AMD takes four rows at once. For one to three that are left it adds up products one after the other: over
# a vocabulary of 50,000 in float32 that is off by 4e-5 to 1e-4 of the gradient, in a block by 5e-7.
_ROW_BLOCK = 4


@dataclass(frozen=True)
class Products:
    """How to multiply for one pair of hidden states and head.

    Attributes:
        dtype: of the operands of the logits' product.
        accumulate_dtype: of logits, losses and gradients: float64 for float64 operands, else float32.
    """

    dtype: torch.dtype
    accumulate_dtype: torch.dtype

    @staticmethod
    def of(hidden: Tensor, weight: Tensor) -> Products:
        """Choose by autocast's dtype where it is on, else by type promotion of the two inputs."""
        device = hidden.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            # Autocast leaves float64 alone, and so do we.
            if torch.float64 in (hidden.dtype, weight.dtype):
                dtype = torch.float64
        else:
            dtype = torch.promote_types(hidden.dtype, weight.dtype)
        return Products(dtype, torch.promote_types(dtype, torch.float32))

    def operand(self, tensor: Tensor) -> Tensor:
        """``tensor`` in the dtype of the products (itself when it has it)."""
        return tensor.detach().to(self.dtype)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, out: Tensor) -> Tensor:
        """``hidden @ weight.T + bias`` in the accumulate dtype, written to ``out`` ``[C, V]``."""
        if self.dtype == self.accumulate_dtype:
            torch.mm(hidden, weight.t(), out=out)
        elif hidden.device.type == "cuda":
            torch.mm(hidden, weight.t(), out_dtype=self.accumulate_dtype, out=out)
        else:
            out.copy_(torch.mm(hidden, weight.t()))
        if bias is not None:
            out += bias.detach()
        return out

    def grad_hidden(self, grad_logits: Tensor, weight: Tensor, *, out: Tensor) -> None:
        """``grad_logits @ weight``, written to ``out`` ``[C, D]``."""
        if self.dtype == torch.bfloat16:
            out.copy_(torch.mm(grad_logits.to(self.dtype), weight))
            return
        weight = weight.to(self.accumulate_dtype)
        split = weight.dtype == torch.float32 and weight.device.type == "cpu"
        rest = grad_logits.shape[0] % _ROW_BLOCK if split else 0
        whole = grad_logits.shape[0] - rest
        torch.mm(grad_logits[:whole], weight, out=out[:whole])
        if rest:
            padded = F.pad(grad_logits[whole:], (0, 0, 0, _ROW_BLOCK - rest))
            out[whole:].copy_(torch.mm(padded, weight)[:rest])

    def grad_weight(self, grad_logits: Tensor, hidden: Tensor, *, out: Tensor, first: bool) -> None:
        """``out += grad_logits.T @ hidden`` ``[V, D]``, accumulated in the accumulate dtype."""
        if self.dtype == torch.bfloat16 and hidden.device.type == "cuda":
            product = torch.mm(grad_logits.to(self.dtype).t(), hidden, out_dtype=self.accumulate_dtype)
            _ = out.copy_(product) if first else out.add_(product)
            return
        hidden = hidden.to(self.accumulate_dtype)
        if first:
            torch.mm(grad_logits.t(), hidden, out=out)
        else:
            out.addmm_(grad_logits.t(), hidden)
