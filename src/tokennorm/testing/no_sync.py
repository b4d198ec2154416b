"""Refuse, or count, every operation that makes the host wait for the device; works on the CPU too.

On an accelerator an ``.item()`` or a boolean-mask index stops the host until all queued work is done. On the CPU
the same call costs nothing, so a test there would not notice it. :class:`RefuseHostSync` knows the operations, not
their cost: code that runs under it on the CPU does not synchronise on an accelerator either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokennorm.errors import TokenNormError

__all__ = ["HostSyncError", "RefuseHostSync"]

# Their result, or its shape, is needed on the host. (nonzero_static is not among them: the host gives its size.)
_SYNCHRONISING = frozenset(
    {
        "_local_scalar_dense",  # .item(), float(), int(), bool(), if, tolist of an accelerator tensor
        "is_nonzero",
        "equal",
        "allclose",
        "nonzero",
        "nonzero_numpy",
        "argwhere",
        "masked_select",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "unique_dim_consecutive",
        "repeat_interleave",  # without output_size
        "bincount",
        "_assert_scalar",
    }
)
_INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
)
# On the CPU these do not reach the dispatcher.
_READING_METHODS = frozenset({"tolist", "numpy", "__array__", "cpu", "__dlpack__"})


class HostSyncError(TokenNormError, AssertionError):
    """Code that promised not to wait for the device would have waited."""


class RefuseHostSync:
    """Context in which an operation that synchronises host and device raises :class:`HostSyncError`.

    Covers ``item`` and its relatives, ``tolist``, ``numpy``, ``nonzero``, boolean masks, ``masked_select``,
    ``unique``, ``equal``, ``repeat_interleave`` without ``output_size``, ``bincount``, and blocking copies between
    the CPU and an accelerator. Not covered: explicit synchronisation (``torch.cuda.synchronize``), and what a
    compiled graph or a process group does inside.

    Args:
        refuse: False to let everything run and only record it in :attr:`syncs`.
    """

    def __init__(self, *, refuse: bool = True) -> None:
        self.syncs: list[str] = []
        self._refuse = refuse
        self._modes = (_Calls(self), _Operators(self))

    def __enter__(self) -> RefuseHostSync:
        """Start watching."""
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self, what: str) -> None:
        """Record one synchronising operation, or raise for it."""
        self.syncs.append(what)
        if self._refuse:
            raise HostSyncError(
                f"{what} makes the host wait for the device",
                why="the device runs dry while the host waits, at every micro-batch.",
                fix="keep the value in a 0-d tensor (torch.where instead of if), or count on the host.",
            )


class _Operators(TorchDispatchMode):
    """Sees what reaches the dispatcher, from C++ and from autograd too."""

    def __init__(self, owner: RefuseHostSync) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the operation if it synchronises, then run it."""
        kwargs = kwargs or {}
        if _operator_synchronises(func, args, kwargs):
            self._owner.note(str(func))
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    """Sees Python calls that end on the host without an operator when the tensor is on the CPU already."""

    def __init__(self, owner: RefuseHostSync) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call if it reads the tensor, then run it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READING_METHODS and args and isinstance(args[0], Tensor):
            self._owner.note(f"Tensor.{name}")
        return func(*args, **kwargs)


def _operator_synchronises(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.name().split("::")[-1].split(".")[0]
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and not (len(args) > 1 and isinstance(args[1], int))
    if name in _SYNCHRONISING:
        return True
    if name in _INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name == "_to_copy":
        return _blocks(args[0].device, kwargs.get("device"), kwargs.get("non_blocking", False), args[0])
    if name == "copy_":
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return _blocks(args[1].device, args[0].device, non_blocking, args[1])
    return False


def _blocks(source: torch.device, target: torch.device | None, non_blocking: bool, value: Tensor) -> bool:
    """A copy to the host blocks unless told not to; one from the host also does from pageable memory."""
    if target is None or "meta" in (source.type, target.type) or (source.type == "cpu") == (target.type == "cpu"):
        return False
    return not non_blocking if target.type == "cpu" else not (non_blocking and value.is_pinned())
