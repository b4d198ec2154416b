"""What a patched model gets for its loss: a zero that tells what was added to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokennorm.errors import PatchError

__all__ = ["OWN_LOSS", "LossPlaceholder"]

# What to do with a model that the patch can't serve.
OWN_LOSS = (
    "give the recipe a per-token loss of its own (tokennorm.loss.linear_cross_entropy on the hidden states)."
)


class LossPlaceholder(torch.Tensor):
    """The zero that a model gets for its loss: what it adds to it is a loss of its own.

    Attributes:
        extra: the sum of what was added, or None.
    """

    extra: Tensor | None

    @staticmethod
    def zero(like: Tensor) -> LossPlaceholder:
        """A placeholder with the dtype and device of ``like``."""
        placeholder = torch.zeros((), dtype=like.dtype, device=like.device).as_subclass(LossPlaceholder)
        placeholder.extra = None
        return placeholder

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("add", "__add__", "__radd__", "add_", "__iadd__") and len(args) == 2 and not kwargs:
                return _add(args, in_place=name in ("add_", "__iadd__"))
            if name in ("to", "float", "double", "contiguous", "clone", "squeeze"):
                return args[0]
            if name == "__get__" and func == Tensor.data.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                raise PatchError("the model takes its loss out of the graph by .data", fix=OWN_LOSS)
            if name in ("__get__", "size", "dim", "numel", "is_floating_point", "__repr__"):
                return func(*args, **kwargs)
        raise PatchError(
            f"the model applies {name} to its loss; only adding to it can be followed",
            why="the patch can't tell what that would do to each token's loss.",
            fix=OWN_LOSS,
        )


def _add(args: tuple[Any, Any], *, in_place: bool) -> Any:
    one, other = args
    if not isinstance(one, LossPlaceholder):
        if in_place:
            return NotImplemented
        one, other = other, one
    if isinstance(other, LossPlaceholder):
        raise PatchError("the model adds its loss to itself", fix=OWN_LOSS)
    total = one if in_place else LossPlaceholder.zero(one.as_subclass(Tensor))
    if not isinstance(other, Tensor):
        if other == 0:
            total.extra = one.extra
            return total
        other = torch.full((), other, dtype=one.dtype, device=one.device)
    if other.dim():
        raise PatchError(f"the model adds a tensor of shape {list(other.shape)} to its loss", fix=OWN_LOSS)
    total.extra = other if one.extra is None else one.extra + other
    return total
