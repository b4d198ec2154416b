"""What each torch function that can be recorded does to a :class:`Recording`.

Every entry of :data:`OPERATIONS` takes a :class:`Subject` and the function's other arguments, and gives a
:class:`Change`, or None when these arguments can't be recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from tokennorm.kit.deferred_recording import Recording

__all__ = ["COMMUTING", "OPERATIONS", "Change", "Subject", "functions_named"]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Deferred logits, as far as an operation has to know them."""

    recording: Recording
    shape: torch.Size
    device: torch.device


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is recorded after an operation.

    Attributes:
        recording: the new recording.
        kind: "same" for the very same tensor, "new" for a tensor of its own, "in_place" for the same tensor with
            other values, and "view" for what shares its memory with the subject, or may.
    """

    recording: Recording
    kind: Literal["same", "new", "in_place", "view"] = "new"


Operation = Callable[..., Change | None]


def _changed(recording: Recording | None, kind: Literal["new", "in_place", "view"] = "new") -> Change | None:
    return None if recording is None else Change(recording=recording, kind=kind)


def _number(value: Any) -> float | None:
    """A factor that the host knows and no gradient is wanted for."""
    if isinstance(value, int | float):
        return None if isinstance(value, bool) else float(value)
    # Reading a number from an accelerator would stall it; then the logits become real instead.
    if type(value) not in (Tensor, torch.nn.Parameter) or value.dim() or value.device.type != "cpu":
        return None
    return float(value.detach()) if value.is_floating_point() and not value.requires_grad else None


def _scaled(subject: Subject, factor: float | None, kind: Literal["new", "in_place"]) -> Change | None:
    return None if factor is None else _changed(subject.recording.times(factor), kind)


def _multiply(kind: Literal["new", "in_place"]) -> Operation:
    def operation(subject: Subject, other: Any, **options: Any) -> Change | None:
        return None if options else _scaled(subject, _number(other), kind)

    return operation


def _divide(kind: Literal["new", "in_place"]) -> Operation:
    def operation(subject: Subject, other: Any, **options: Any) -> Change | None:
        divisor = _number(other)
        return None if options or not divisor else _scaled(subject, 1.0 / divisor, kind)

    return operation


def _tanh(kind: Literal["new", "in_place"]) -> Operation:
    def operation(subject: Subject, **options: Any) -> Change | None:
        return None if options else _changed(subject.recording.tanh(), kind)

    return operation


def _cast(subject: Subject, dtype: torch.dtype, *, copy: bool = False) -> Change | None:
    if not dtype.is_floating_point:
        return None
    if dtype == subject.recording.dtype and not copy:
        return Change(recording=subject.recording, kind="same")
    return Change(recording=replace(subject.recording, dtype=dtype))


def _cast_to(dtype: torch.dtype) -> Operation:
    return lambda subject, **options: None if options else _cast(subject, dtype)


def _type(subject: Subject, dtype: Any = None, **options: Any) -> Change | None:
    return _cast(subject, dtype) if isinstance(dtype, torch.dtype) and not options else None


def _to(subject: Subject, *args: Any, copy: bool = False, **kwargs: Any) -> Change | None:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    if device not in (None, subject.device) or memory_format is not None:
        return None
    return _cast(subject, dtype or subject.recording.dtype, copy=copy)


def _contiguous(subject: Subject, **options: Any) -> Change | None:
    # Whether this copies is not known here; "view" is the answer that refuses to guess about later writes.
    return None if options else Change(recording=subject.recording, kind="view")


def _clone(subject: Subject, **options: Any) -> Change | None:
    return None if options else Change(recording=subject.recording)


def _reshape(subject: Subject, *shape: Any, **options: Any) -> Change | None:
    """``view`` and ``reshape`` that leave the vocabulary alone."""
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else list(shape)
    total, width = subject.shape.numel(), subject.shape[-1]
    if options or not total or not all(isinstance(size, int) for size in sizes) or sizes.count(-1) > 1:
        return None
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        if known <= 0 or total % known:
            return None
        sizes[sizes.index(-1)] = total // known
    if not sizes or sizes[-1] != width or math.prod(sizes) != total:
        return None
    leading = sizes[:-1]
    return _changed(subject.recording.on_rows(lambda rows: rows.reshape(*leading, rows.shape[-1])), "view")


def _flatten(subject: Subject, start_dim: int = 0, end_dim: int = -1) -> Change | None:
    dims = len(subject.shape)
    start, end = start_dim % dims, end_dim % dims
    if end == dims - 1 or start >= end:
        return None
    return _changed(subject.recording.on_rows(lambda rows: rows.flatten(start, end)), "view")


def _getitem(subject: Subject, index: Any) -> Change | None:
    """Slices and indices of the rows, and a plain slice of the vocabulary."""
    dims, width = len(subject.shape), subject.shape[-1]
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, list | bool) for part in parts):
        return None
    consumed = sum(_dims_consumed(part) for part in parts)
    ellipsis = [position for position, part in enumerate(parts) if part is Ellipsis]
    if len(ellipsis) > 1 or consumed > dims:
        return None
    at = ellipsis[0] if ellipsis else len(parts)
    parts[at : at + 1] = [slice(None)] * (dims - consumed)
    last = parts.pop()
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    first, stop, _ = last.indices(width)
    if stop <= first:
        return None
    recording = subject.recording
    if any(not isinstance(part, slice) or part != slice(None) for part in parts):
        rows = (*parts, slice(None))
        recording = recording.on_rows(lambda tensor: tensor[rows])
    recording = replace(recording, first=recording.first + first, last=recording.first + stop)
    return _changed(recording, "new" if any(isinstance(part, Tensor) for part in parts) else "view")


def _dims_consumed(part: Any) -> int:
    if part is Ellipsis or part is None:
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


def functions_named(*names: str) -> set[Any]:
    """The functions of torch and the methods of tensors that have these names."""
    found = {getattr(owner, name) for name in names for owner in (torch, Tensor) if hasattr(owner, name)}
    # torch.float is a dtype.
    return {func for func in found if callable(func)}


COMMUTING: set[Any] = functions_named("mul", "multiply", "__mul__", "__rmul__")

OPERATIONS: dict[Any, Operation] = {
    func: operation
    for names, operation in (
        (("mul", "multiply", "__mul__", "__rmul__"), _multiply("new")),
        (("mul_", "multiply_", "__imul__"), _multiply("in_place")),
        (("div", "divide", "true_divide", "__truediv__"), _divide("new")),
        (("div_", "divide_", "true_divide_", "__itruediv__"), _divide("in_place")),
        (("tanh",), _tanh("new")),
        (("tanh_",), _tanh("in_place")),
        (("float",), _cast_to(torch.float32)),
        (("double",), _cast_to(torch.float64)),
        (("half",), _cast_to(torch.float16)),
        (("bfloat16",), _cast_to(torch.bfloat16)),
        (("to",), _to),
        (("type",), _type),
        (("contiguous",), _contiguous),
        (("clone",), _clone),
        (("view", "reshape"), _reshape),
        (("flatten",), _flatten),
        (("__getitem__",), _getitem),
    )
    for func in functions_named(*names)
}
