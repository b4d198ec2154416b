"""What a patched model carries with it, and how one forward pass is tied to its head."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tokennorm.errors import PatchError
from tokennorm.kit.patch_head import CALL_ATTRIBUTE, DeferringHead

__all__ = [
    "OWN_LOSS_ATTRIBUTE",
    "STATE_ATTRIBUTE",
    "PatchState",
    "answering",
    "check_thread",
    "lost_patch",
    "patched_head",
]

STATE_ATTRIBUTE = "_tokennorm_patch"
# Where transformers keeps a loss function that is set on an instance. The patched class does not read it.
OWN_LOSS_ATTRIBUTE = "_loss_function"


def lost_patch(*_: Any, **__: Any) -> Any:
    """Stands at :data:`OWN_LOSS_ATTRIBUTE`, for a copy of the model's ``__dict__`` in an unpatched class."""
    raise PatchError(
        "this copy of a patched model has lost the patch",
        why="its loss would be a mean over the micro-batch where losses of tokens are expected.",
        fix="call apply_chunked_token_loss_patch on the copy, or copy the model with copy.deepcopy or pickle.",
    )


@dataclass(kw_only=True)
class PatchState:
    """Kept in the model's ``__dict__``, so a copy of the model has a copy of it.

    Attributes:
        head: name of the head among the model's modules.
        own_loss: the loss function that was set on the instance, or None for the family's.
        chunk_size, output_cls, on_request: as given to the patch.
        probe_due: whether the probe still has to run, at the first forward with labels.
        call, thread: what answers head and loss function while a forward runs, and in which thread; else None.
        reported: operations already logged as making the logits real.
    """

    head: str
    chunk_size: int | None
    output_cls: type | None
    on_request: bool = False
    own_loss: Any = None
    probe_due: bool = False
    call: Any = None
    thread: int | None = None
    reported: set[str] = field(default_factory=set)


def patched_head(model: nn.Module, state: PatchState) -> DeferringHead:
    """The head that answers with deferred logits.

    Raises:
        PatchError: it was replaced since.
    """
    head = model.get_submodule(state.head)
    if not isinstance(head, DeferringHead):
        raise PatchError(
            f"the head {state.head!r} of {type(model).__name__} was replaced after the patch, by a "
            f"{type(head).__name__}",
            why="the loss would be computed by another module than the one that was checked.",
            fix="remove_chunked_token_loss_patch(model) and apply it again, after adapters and resizing.",
        )
    return head


def check_thread(state: PatchState) -> None:
    """Refuse a second forward at the same time, as ``torch.nn.DataParallel`` runs them."""
    if state.thread not in (None, threading.get_ident()):
        raise PatchError(
            "two threads run the forward of one patched model at the same time",
            why="their losses would be mixed up.",
            fix="use DistributedDataParallel instead of DataParallel, or a copy of the model for each thread.",
        )


@contextmanager
def answering(model: nn.Module, call: Any) -> Iterator[None]:
    """Let ``call`` answer the model's head and loss function.

    Raises:
        PatchError: another thread runs this model's forward.
    """
    state: PatchState = model.__dict__[STATE_ATTRIBUTE]
    check_thread(state)
    head = patched_head(model, state)
    state.call = head.__dict__[CALL_ATTRIBUTE] = call
    state.thread = threading.get_ident()
    try:
        yield
    finally:
        state.call = state.thread = None
        head.__dict__.pop(CALL_ATTRIBUTE, None)
