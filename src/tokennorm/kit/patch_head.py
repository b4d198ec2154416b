"""A head that answers with deferred logits, and computes losses chunk by chunk when it is entered.

The head's ``__class__`` is swapped for a subclass. Its ``__call__`` hands out :class:`DeferredLogits` without
running the module; its ``forward`` runs the whole chunk loop. So the hooks around ``forward`` (FSDP2's among them)
run once per micro-batch, whatever the number of chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tokennorm.errors import PatchError
from tokennorm.kit.deferred_recording import Recording
from tokennorm.loss import LogitTransform, default_chunk_size, linear_cross_entropy
from tokennorm.loss.label_checks import check_labels

__all__ = [
    "DeferringHead",
    "LossRequest",
    "deferring_head_class",
    "losses_of_logits",
    "num_logits_of",
    "reduce_swapped",
    "swap_class",
]

CALL_ATTRIBUTE = "_tokennorm_call"
_REQUEST = "_tokennorm_request"


@dataclass(kw_only=True)
class LossRequest:
    """What the head is asked for, instead of logits, the next time it is entered.

    Attributes:
        targets: ``[N]`` int64, one per row of the hidden states that go with it.
        recording: what the model does to its logits.
        ignore_index, num_supervised, chunk_size: as in ``linear_cross_entropy``.
        answered: whether ``forward`` computed losses; a head whose ``forward`` was replaced gives real logits.
    """

    targets: Tensor
    recording: Recording
    ignore_index: int
    num_supervised: int | None
    chunk_size: int | None
    answered: bool = False


class DeferringHead:
    """Mixin that goes before the head's own class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand over to the model's running call; an ordinary head when there is none."""
        call = self.__dict__.get(CALL_ATTRIBUTE)
        if call is None:
            return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return call.on_head(self, *args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the module: hooks, then ``forward``."""
        return super().__call__(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def run_for_losses(self, hidden: Tensor, request: LossRequest) -> Tensor:
        """Enter the module once for all losses ``[N]`` of ``hidden`` ``[N, D]``.

        A head that can't be asked that way is entered for its logits.
        """
        self.__dict__[_REQUEST] = request
        try:
            output = self.run(hidden)
        finally:
            self.__dict__.pop(_REQUEST, None)
        if request.answered:
            return output
        recording = request.recording
        if recording.last > output.shape[-1]:
            raise PatchError(
                f"the head gave {output.shape[-1]} logits where {recording.last} were expected",
                why="a head that is split over devices has only a part of the vocabulary on each.",
                fix="gather its output, or use a vocabulary-parallel loss.",
            )
        return losses_of_logits(
            recording.transform(_widen(output[..., recording.first : recording.last])), request
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Losses when there is a request, logits otherwise."""
        plain = super().forward  # pyright: ignore[reportAttributeAccessIssue]
        request: LossRequest | None = self.__dict__.pop(_REQUEST, None)
        if request is None:
            return plain(*args, **kwargs)
        (hidden,) = args
        weight: Any = getattr(self, "weight", None)
        split = isinstance(weight, Tensor) and len(weight) < request.recording.last
        if split or isinstance(hidden, DTensor) or isinstance(weight, DTensor):
            # A part of the vocabulary is elsewhere; hooks gather real logits, if anything does.
            return plain(hidden)
        request.answered = True
        if getattr(plain, "__func__", None) is nn.Linear.forward and type(weight) in (Tensor, nn.Parameter):
            return _losses_of_linear(hidden, weight, getattr(self, "bias", None), request)
        return _losses_of_module(hidden, plain, request)


def _losses_of_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, request: LossRequest) -> Tensor:
    recording = request.recording
    if (recording.first, recording.last) != (0, weight.shape[0]):
        weight = weight[recording.first : recording.last]
        bias = None if bias is None else bias[recording.first : recording.last]
    transform = LogitTransform(scale=recording.scale)
    if recording.softcap is not None:
        # b * tanh(a * x) in the operator's terms, which want b > 0: tanh is odd.
        transform = LogitTransform(scale=recording.scale * recording.softcap, softcap=abs(recording.softcap))
    return linear_cross_entropy(
        hidden,
        weight,
        request.targets,
        bias=bias,
        ignore_index=request.ignore_index,
        num_supervised=request.num_supervised,
        transform=transform,
        chunk_size=request.chunk_size,
    )


def _losses_of_module(hidden: Tensor, project: Any, request: LossRequest) -> Tensor:
    """Any other head (an adapter, quantised weights): its own code per chunk, computed again in backward."""
    recording = request.recording
    rows, targets = _supervised_rows(request, recording.last - recording.first)

    def losses(chunk: Tensor, targets: Tensor) -> Tensor:
        logits = project(chunk)[..., recording.first : recording.last]
        return F.cross_entropy(recording.transform(_widen(logits)), targets, reduction="none")

    chunk_size = request.chunk_size or default_chunk_size(len(rows), recording.last, hidden.device)
    # A zero-row chunk keeps every parameter of the head in the graph.
    chunks = hidden.index_select(0, rows).split(chunk_size) if len(rows) else (hidden[:0],)
    target_chunks = targets.split(chunk_size) if len(rows) else (targets,)
    run = functools.partial(checkpoint, losses, use_reentrant=False) if torch.is_grad_enabled() else losses
    return _spread(torch.cat([run(*chunk) for chunk in zip(chunks, target_chunks, strict=True)]), rows, request)


def losses_of_logits(logits: Tensor, request: LossRequest) -> Tensor:
    """Losses ``[N]`` of real logits ``[..., V]``; unsupervised rows take no part."""
    rows, targets = _supervised_rows(request, logits.shape[-1])
    logits = _widen(logits.reshape(-1, logits.shape[-1])).index_select(0, rows)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return _spread(losses, rows, request)


def _widen(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _supervised_rows(request: LossRequest, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Indices of the supervised rows, and their labels."""
    supervised = request.targets != request.ignore_index
    check_labels(request.targets, supervised, vocabulary, request.ignore_index, request.num_supervised)
    if request.num_supervised is None:
        rows = supervised.nonzero().squeeze(1)
    else:
        rows = torch.nonzero_static(supervised, size=request.num_supervised, fill_value=0).squeeze(1)
    # A label outside the vocabulary has been reported; it must not crash the device before that is read.
    return rows, request.targets.index_select(0, rows).clamp(0, vocabulary - 1)


def _spread(losses: Tensor, rows: Tensor, request: LossRequest) -> Tensor:
    return losses.new_zeros(len(request.targets)).index_copy(0, rows, losses)


def num_logits_of(head: nn.Module) -> int | None:
    """Vocabulary size of a head, or None when it can't be told without running it."""
    width = getattr(head, "out_features", None)
    if isinstance(width, int):
        return width
    weight = getattr(head, "weight", None)
    return weight.shape[0] if isinstance(weight, Tensor) and weight.dim() == 2 else None


@functools.cache
def deferring_head_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass that a head of class ``base`` is swapped to, under the same name."""
    body = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__reduce_ex__": _reduce_head}
    return type(base.__name__, (DeferringHead, base), body)


def _reduce_head(head: nn.Module, protocol: Any) -> Any:
    return reduce_swapped(head, protocol, deferring_head_class)


def reduce_swapped(module: nn.Module, protocol: Any, make: Callable[[type], type]) -> Any:
    """Pickle (and deepcopy) a swapped module by how its class is made: no module of ours holds the class."""
    reduced: Any = nn.Module.__reduce_ex__(module, protocol)
    rebuild, (cls, *arguments), *state = reduced
    base = cls.__bases__[-1]
    if make(base) is not cls:
        # fully_shard put its own class on top, which nothing can rebuild: say so as it does.
        return rebuild, (cls, *arguments), *state
    return _revive, (make, base), *state


def _revive(make: Callable[[type], type], base: type) -> Any:
    cls: Any = make(base)
    return cls.__new__(cls)


def swap_class(module: nn.Module, old: type, new: type) -> None:
    """Make ``module`` an instance of ``new`` where it was one of ``old``, also below a class put on top since.

    ``fully_shard`` gives a module a class of its own whose last base is the class it found.
    """
    cls = type(module)
    if cls is not old:
        bases = tuple(new if base is old else base for base in cls.__bases__)
        body = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
        new = type(cls.__name__, bases, body)
    module.__class__ = new
