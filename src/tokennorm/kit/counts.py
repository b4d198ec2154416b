"""Counts of tokens as the kit takes them: Python numbers, or 0-d tensors that stay on their device."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from tokennorm.errors import KitUsageError

__all__ = ["LARGEST_EXACT_COUNT", "Count", "is_integral", "read_count", "supports_float64"]

# A number, exact on the host; or a 0-d tensor, read by nobody until the window is over.
Count = int | float | Tensor

# Integers up to here are exact in float64, the dtype of the window's message.
LARGEST_EXACT_COUNT = 2**53


def read_count(value: object, name: str, device: torch.device) -> Count:
    """Validate one count and bring it into one of the two forms.

    A tensor on the CPU is read at once when the kit lives on an accelerator (that costs no synchronisation);
    any other tensor is only looked at for its shape and dtype: its value is checked on the device.

    Raises:
        KitUsageError: not a number, not 0-d, with a graph, boolean, negative, NaN, infinite, or above 2**53.
    """
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.requires_grad or value.dtype == torch.bool or value.is_complex():
            raise KitUsageError(
                f"{name} must be a number or a 0-d tensor without graph, not a tensor of shape "
                f"{list(value.shape)}, dtype {value.dtype}, requires_grad={value.requires_grad}",
                why="a count is one exact number for the whole micro-batch.",
                fix="pass e.g. `(shift_labels != -100).sum()`, or better the collator's Python int.",
            )
        if value.device.type != "cpu" or device.type == "cpu":
            return value
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise KitUsageError(
            f"{name} is {value!r}, not a number",
            fix="pass the collator's count as an int (or a sum of token weights as a float).",
        )
    number = int(value) if isinstance(value, Integral) else float(value)
    if not math.isfinite(number) or number < 0 or number > LARGEST_EXACT_COUNT:
        raise KitUsageError(
            f"{name} is {number}, not a count between 0 and 2**53",
            why="a count is added up exactly over the window, in float64; a wrong one scales every gradient.",
            fix="count the supervised tokens from exactly the labels that the loss sees.",
        )
    return number


def is_integral(value: Count) -> bool:
    """Whether this is a number of tokens (an integer type) rather than a sum of token weights (a float type)."""
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return isinstance(value, int)


def supports_float64(device: torch.device) -> bool:
    """Whether the device can hold float64 (Apple's MPS can't)."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True
