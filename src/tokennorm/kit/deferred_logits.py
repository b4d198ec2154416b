"""Logits that have not been computed: a tensor that writes down what a model does to them.

A causal LM calls its head, changes the logits a little (a scale, a softcap, a cast, a slice) and hands them to
its loss. :class:`DeferredLogits` stands in for these logits. It holds the head's input and a :class:`Recording`
of what was done since; the loss reads the recording and computes one chunk of real logits at a time.

What can't be written down makes the logits real: right, only bigger. What would be lost silently raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tokennorm.errors import PatchError
from tokennorm.kit.deferred_operations import COMMUTING, OPERATIONS, Change, Subject, functions_named
from tokennorm.kit.deferred_recording import Recording

__all__ = ["DeferredLogits", "HeadCall"]


class HeadCall:
    """One call of a head: what went in, and what came out once somebody had to have it.

    Args:
        head: the module that was called.
        project: computes the head's real output from hidden states.
        hidden: ``[..., D]``.
        num_logits: vocabulary size V.
        dtype: of the logits.
        on_materialise: told the name of the operation that made the logits real.
    """

    def __init__(
        self,
        head: torch.nn.Module,
        project: Callable[[Tensor], Tensor],
        hidden: Tensor,
        num_logits: int,
        dtype: torch.dtype,
        on_materialise: Callable[[str], None],
    ) -> None:
        self.head, self.project, self.hidden = head, project, hidden
        self.num_logits, self.dtype = num_logits, dtype
        self._on_materialise = on_materialise
        self.output: Tensor | None = None
        # An operation that comes later, inside a no_grad block say, must not change how the head is run.
        self.gradients = torch.is_grad_enabled()

    def logits(self) -> DeferredLogits:
        """The deferred output of this call."""
        return DeferredLogits(self, Recording(last=self.num_logits, dtype=self.dtype), _Storage())

    def materialise(self, operation: str) -> Tensor:
        """The head's real output; computed once."""
        if self.output is None:
            self._on_materialise(operation)
            with torch.set_grad_enabled(self.gradients):
                self.output = self.project(self.hidden)
        return self.output


class _Storage:
    """What views of the same logits share: how often it was written to."""

    def __init__(self) -> None:
        self.version = 0


class _Tripwire(torch.autograd.Function):
    """Gives deferred logits a place in the graph where a gradient that reaches it raises instead of vanishing."""

    @staticmethod
    def forward(ctx: Any, wire: Tensor, cls: type, shape: Any, dtype: torch.dtype, source: HeadCall) -> Any:
        del ctx, wire
        return torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, shape, dtype=dtype, device=source.hidden.device
        )

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        del ctx, upstream
        raise PatchError(
            "a gradient reached logits that were never computed",
            why="it would not arrive at the head and the model.",
            fix="switch off the fused or custom autograd function that the model applies to its logits.",
        )


class DeferredLogits(torch.Tensor):
    """Logits ``[..., V]`` that exist only as a :class:`HeadCall` and a :class:`Recording`.

    Attributes:
        source: the call of the head.
        recording: what was done since.
        memory, version_seen: to notice writes through another view.
        materialised: the real logits, once an operation needed them; from then on this is what counts.
    """

    source: HeadCall
    recording: Recording
    memory: _Storage
    version_seen: int
    materialised: Tensor | None

    @staticmethod
    def __new__(cls, source: HeadCall, recording: Recording, storage: _Storage):
        """A tensor without storage, of the shape that the logits would have."""
        leading = recording.rows_of(source.hidden.detach()[..., :1]).shape[:-1]
        shape = (*leading, recording.last - recording.first)
        logits = _Tripwire.apply(
            torch.zeros((), requires_grad=source.gradients), cls, shape, recording.dtype, source
        )
        logits.source, logits.recording, logits.materialised = source, recording, None
        logits.memory, logits.version_seen = storage, storage.version
        return logits

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        with torch._C.DisableTorchFunctionSubclass():
            return f"DeferredLogits({list(self.shape)}, {self.dtype}, {self.recording})"

    def check_current(self) -> None:
        """Refuse to read logits that were overwritten through another view of them."""
        if self.version_seen != self.memory.version:
            raise PatchError(
                "the model changed its logits in place and then read them through an older view",
                why="the deferred logits don't follow a write from one view to another.",
                fix="give the recipe a per-token loss of its own for this model.",
            )

    def materialise(self, operation: str) -> Tensor:
        """The real logits, with everything that was recorded."""
        self.check_current()
        if self.materialised is None:
            output = self.source.materialise(operation)
            with torch.set_grad_enabled(self.source.gradients):
                self.materialised = self.recording.replay(output)
        return self.materialised

    def is_recordable(self) -> bool:
        """Whether more may be written down: logits that are real already stay real.

        What happens inside a ``no_grad`` block, and the head's call outside of it, could not be told apart later.
        """
        self.check_current()
        untouched = self.materialised is None and self.source.output is None
        return untouched and self.source.gradients == torch.is_grad_enabled()

    def follow(self, change: Change) -> DeferredLogits:
        """The logits after a change that was recorded."""
        if change.kind == "same":
            return self
        if change.kind == "in_place":
            self.recording = change.recording
            self.wrote()
            return self
        storage = self.memory if change.kind == "view" else _Storage()
        return DeferredLogits(self.source, change.recording, storage)

    def wrote(self) -> None:
        """Note a write to the logits: older views of them are out of date."""
        self.memory.version += 1
        self.version_seen = self.memory.version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _QUERIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        recorded = _record(func, args, kwargs)
        return _on_real_logits(func, args, kwargs) if recorded is None else recorded

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types, args, kwargs
        # This tensor has no graph of its own: what is computed from it here would have no gradient.
        raise PatchError(
            f"{func} reached the logits below the layer that records what is done to them",
            why="the gradient of the head would be lost.",
            fix="replace the fused or custom autograd function that the model applies to its logits.",
        )


def _record(func: Any, args: Any, kwargs: Any) -> DeferredLogits | None:
    """The logits after ``func``, if that can be written down."""
    operation = OPERATIONS.get(func)
    if operation is None or not args:
        return None
    if func in COMMUTING and len(args) == 2 and not isinstance(args[0], DeferredLogits):
        args = args[::-1]
    logits, *rest = args
    if not isinstance(logits, DeferredLogits) or not logits.is_recordable():
        return None
    if any(isinstance(leaf, DeferredLogits) for leaf in pytree.tree_leaves((rest, kwargs))):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        subject = Subject(recording=logits.recording, shape=logits.shape, device=logits.device)
    change = operation(subject, *rest, **kwargs)
    return None if change is None else logits.follow(change)


def _on_real_logits(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that can't be recorded on the real logits."""
    name = _name(func)
    target = args[0] if args and isinstance(args[0], DeferredLogits) else None
    if name in _RAW_MEMORY:
        raise PatchError(
            f"the model asks for the memory of its logits ({name})",
            why="what a kernel computes from it has no gradient.",
            fix="switch off the fused kernel that the model applies to its logits.",
        )
    if name == "__set__" or any(isinstance(out, DeferredLogits) for out in pytree.tree_leaves(kwargs.get("out"))):
        raise PatchError(
            f"the model writes to its logits by {name if name == '__set__' else f'{name}(out=...)'}",
            why="deferred logits can't tell their views about it.",
        )
    if target is not None and _writes_in_place(name):
        # The head's output may still be read by another recording: write to a copy.
        with torch.set_grad_enabled(target.source.gradients):
            target.materialised = target.materialise(name).clone()
        target.wrote()
    real_args, real_kwargs = pytree.tree_map_only(DeferredLogits, lambda it: it.materialise(name), (args, kwargs))
    result = func(*real_args, **real_kwargs)
    return target if target is not None and result is target.materialised else result


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _writes_in_place(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        )
    return name.endswith("_")


_RAW_MEMORY = ("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__")

_QUERIES: set[Any] = {
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse")
    ),
    *functions_named(
        "size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "__len__", "is_contiguous"
    ),
}
