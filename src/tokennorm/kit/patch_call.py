"""One forward pass of a patched model: from the head's call to the losses of all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokennorm.errors import PatchError
from tokennorm.kit.deferred_logits import DeferredLogits, HeadCall
from tokennorm.kit.deferred_recording import Recording
from tokennorm.kit.patch_head import DeferringHead, LossRequest, losses_of_logits, num_logits_of
from tokennorm.kit.patch_placeholder import OWN_LOSS, LossPlaceholder

__all__ = ["ForwardCall", "Targets"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the caller of the model wants to be learnt.

    Attributes:
        labels: ``[B, S]`` to be shifted, or None.
        shift_labels: ``[B, S]``, shifted already, or None; these win.
        ignore_index: the label of unsupervised tokens.
        num_supervised: how many targets are supervised, when the host knows it.
        logits_to_keep: the model's argument of that name.
    """

    labels: Tensor | None
    shift_labels: Tensor | None
    ignore_index: int = -100
    num_supervised: int | None = None
    logits_to_keep: int | Tensor = 0

    @property
    def shape(self) -> torch.Size:
        """``[B, S]``."""
        given = self.shift_labels if self.shift_labels is not None else self.labels
        assert given is not None
        return given.shape


@dataclass(kw_only=True)
class ForwardCall:
    """Answers the head and the loss function during one forward pass.

    Attributes:
        name: the model's class, for messages.
        targets: see :class:`Targets`.
        chunk_size: rows of logits held at once, or None.
        reported: operations that were already logged as making logits real; outlives the call.
        replace_hidden: changes the head's input; the probe's.
        losses: ``[N]`` per token, once the loss function was called.
    """

    name: str
    targets: Targets
    chunk_size: int | None
    reported: set[str]
    replace_hidden: Callable[[Tensor], Tensor] | None = None
    losses: Tensor | None = None
    head_calls: list[HeadCall] = field(default_factory=list)

    def on_head(self, head: DeferringHead, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the head's ``__call__``."""
        if len(args) != 1 or kwargs:
            return head.run(*args, **kwargs)
        (hidden,) = args
        if self.replace_hidden is not None:
            hidden = self.replace_hidden(hidden)
        assert isinstance(head, nn.Module)
        num_logits = num_logits_of(head)
        source = HeadCall(
            head,
            head.run,
            hidden,
            num_logits or 0,
            _output_dtype(hidden, getattr(head, "weight", None)),
            self._report,
        )
        self.head_calls.append(source)
        return source.logits() if num_logits else source.materialise("a head of unknown width")

    def _report(self, operation: str) -> None:
        if operation not in self.reported:
            self.reported.add(operation)
            logger.warning(
                "%s: %s needs all logits at once, so they are computed; the losses stay right.",
                self.name,
                operation,
            )

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Stand in for the model's ``loss_function``: keep the losses, give back a zero to add to."""
        del num_items_in_batch
        if self.losses is not None:
            raise PatchError(
                f"{self.name} calls its loss function more than once per forward pass",
                why="a mean over another head's tokens would be mixed with sums over this one's.",
                fix=OWN_LOSS,
            )
        if not self.head_calls:
            raise PatchError(
                f"{self.name} computed a loss from logits that the patched head did not make",
                why="its losses would be those of another head, or a mean.",
                fix="call apply_chunked_token_loss_patch again after replacing the head (or adding an adapter).",
            )
        width = _plain(lambda: logits.shape[-1])
        if vocab_size is not None and vocab_size != width:
            raise PatchError(
                f"{self.name} has {width} logits per token but tells its loss that there are {vocab_size}",
                why="the model's own loss would read the logits at the wrong places, or fail.",
                fix="set the vocabulary size in the model's config to that of its head.",
            )
        request, kept = self._request(_plain(lambda: logits.shape[:-1]), labels, shift_labels, ignore_index)
        losses = self._losses(logits, request)
        if kept is not None:
            total = self.targets.shape.numel()
            losses = losses.new_zeros(total).index_copy(0, kept.flatten().to(losses.device), losses)
        self.losses = losses
        return LossPlaceholder.zero(losses)

    def token_losses(self) -> Tensor:
        """The losses ``[B*S]``, entry ``b*S+s`` for predicting token ``s+1``.

        Raises:
            PatchError: the model never called its loss function.
        """
        if self.losses is None:
            raise PatchError(
                f"{self.name} got labels and never called self.loss_function",
                why="its loss is a mean over this micro-batch's tokens, which no window can be built from.",
                fix=OWN_LOSS,
            )
        shape = self.targets.shape
        if self.losses.numel() == shape.numel():
            return self.losses
        rows = shape[:-1].numel()
        if self.targets.shift_labels is None and self.losses.numel() == rows * (shape[-1] - 1):
            # The family shifted by itself: it has no logits for what would follow the last token.
            return F.pad(self.losses.view(rows, -1), (0, 1)).flatten()
        raise PatchError(
            f"{self.name} gave {self.losses.numel()} losses for labels of shape {list(shape)}",
            why="which token each belongs to can't be told.",
            fix=OWN_LOSS,
        )

    def _losses(self, logits: Tensor, request: LossRequest) -> Tensor:
        if not isinstance(logits, DeferredLogits):
            request.targets = request.targets.to(logits.device)
            return losses_of_logits(logits, request)
        logits.check_current()
        source = logits.source
        if logits.materialised is not None or source.output is not None:
            request.targets = request.targets.to(source.hidden.device)
            return losses_of_logits(logits.materialise("loss_function"), request)
        hidden = logits.recording.rows_of(source.hidden)
        hidden = hidden.reshape(-1, hidden.shape[-1])
        request.targets = request.targets.to(hidden.device, non_blocking=True)
        request.recording = logits.recording
        losses = source.head.run_for_losses(hidden, request)  # pyright: ignore[reportCallIssue]
        if not request.answered:
            self._report("a head whose forward was replaced or whose weights are split")
        return losses

    def _request(
        self, rows: torch.Size, labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int | None
    ) -> tuple[LossRequest, Tensor | None]:
        """One target per row of the logits; and, where only some positions have logits, which these are."""
        if ignore_index is None:
            ignore_index = self.targets.ignore_index
        if shift_labels is None:
            shift_labels = self.targets.shift_labels
        if shift_labels is None:
            if labels is None:
                raise PatchError(f"{self.name} called its loss function without labels", fix=OWN_LOSS)
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        kept = None
        if shift_labels.numel() != rows.numel():
            kept = self._kept(shift_labels, rows)
            left_out = (shift_labels != ignore_index).sum() - (
                shift_labels.flatten()[kept.flatten()] != ignore_index
            ).sum()
            # Waits for the device, but only where logits_to_keep comes with labels for more positions.
            if left_out:
                raise PatchError(
                    f"logits_to_keep leaves out {int(left_out)} positions with a supervised target",
                    why="these tokens would be counted but have no loss.",
                    fix="keep every position whose next token is supervised, or leave logits_to_keep out.",
                )
            shift_labels = shift_labels.flatten()[kept.flatten()]
        return (
            LossRequest(
                targets=shift_labels.flatten(),
                recording=Recording(last=0, dtype=torch.float32),
                ignore_index=ignore_index,
                num_supervised=self.targets.num_supervised,
                chunk_size=self.chunk_size,
            ),
            kept,
        )

    def _kept(self, shift_labels: Tensor, rows: torch.Size) -> Tensor:
        """Flat positions ``b * S + s`` that have logits, from ``logits_to_keep``."""
        keep = self.targets.logits_to_keep
        if shift_labels.shape == self.targets.shape and shift_labels.dim() == 2:
            positions = torch.arange(shift_labels.numel(), device=shift_labels.device).view(shift_labels.shape)
            if isinstance(keep, int):
                positions = positions[:, -keep:] if keep else positions
            elif keep.dim() == 1:
                positions = positions[:, keep.to(positions.device)]
            elif keep.dtype == torch.bool:
                positions = positions[keep.to(positions.device)]
            else:
                positions = positions.take_along_dim(keep.to(positions.device), dim=1)
            if positions.numel() == rows.numel():
                return positions
        raise PatchError(
            f"{self.name} has logits for {list(rows)} positions and targets for {list(shift_labels.shape)}",
            why="a target that is paired with another position's logits is a wrong loss.",
            fix="pass labels of the shape of input_ids.",
        )


def _output_dtype(hidden: Tensor, weight: Any) -> torch.dtype:
    """The dtype that a linear layer's output has here."""
    device = hidden.device.type
    if (
        hidden.dtype != torch.float64
        and torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
    ):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden.dtype, weight.dtype) if isinstance(weight, Tensor) else hidden.dtype


def _plain(read: Callable[[], Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return read()
