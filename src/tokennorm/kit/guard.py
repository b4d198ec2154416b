"""A guard that keeps broken and exploding micro-batches out of a window: :class:`PerTokenLossGuard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tokennorm.errors import DistributedError, KitUsageError
from tokennorm.kit.counts import Count, supports_float64
from tokennorm.kit.guard_history import LossHistory
from tokennorm.kit.window import agreed, fingerprint

__all__ = ["GuardVerdict", "PerTokenLossGuard"]

# Of the message: loss sum and tokens of the ranks with a finite loss, ranks with another one, three slots in which
# the ranks agree, and the tokens of all ranks.
_LOSS_SUM, _TOKENS, _NON_FINITE, _AGREEMENT, _ALL_TOKENS, _WIDTH = 0, 1, 2, 3, 6, 7


@dataclass(frozen=True, kw_only=True)
class GuardVerdict:
    """What the guard decided about one micro-batch index, the same on every rank but for the ``own`` fields.

    Attributes:
        step: what the caller said; for reports.
        reason: why it was refused, None when it takes part.
        loss: loss per token (nats) over all ranks whose loss is finite; None without a token among them.
        limit: what the loss had to exceed to be a spike; None while nothing was called a spike.
        non_finite_ranks: number of ranks whose loss was NaN or infinite.
        own_loss_sum: this rank's sum, NaN or infinite as it was.
        own_offence: this rank's micro-batch is (one of) those that the refusal is about.
        tokens: what all ranks' losses are counted in; a rank whose count is not finite adds 1.
    """

    step: int
    reason: Literal["non-finite", "spike"] | None
    loss: float | None
    limit: float | None
    non_finite_ranks: int
    own_loss_sum: float
    own_offence: bool
    tokens: float

    @property
    def admitted(self) -> bool:
        """Whether the micro-batch takes part, on all ranks."""
        return self.reason is None


class PerTokenLossGuard:
    """Decides, before backward and on all ranks together, whether the micro-batches of one index take part.

    A *micro-batch index* is what all ranks run at the same time. It is refused on all of them when the loss of any
    rank is NaN or infinite, or when their common loss per token (sum over sum, as in the objective) is more than
    ``spike_multiplier`` times the median of the last ``window_size`` ones. Refusing together is what keeps ranks
    in step: each replaces its forward by a dummy one, so a sharded model issues the same collectives everywhere.

    Cost: one all-reduce of seven float64 numbers (none for one rank) and one wait for the device per micro-batch.

    Args:
        device: where the losses are.
        spike_multiplier: see :class:`~tokennorm.kit.guard_history.LossHistory`, also for the next two.
        window_size: micro-batch indices that are remembered.
        min_history: how many of them must be there before any is called a spike.
        group: the ranks that decide together; None: the default group (or this process alone).
        group_world_size: their number, checked against the group when given.

    Raises:
        KitUsageError: an argument is out of range, or contradicts the group.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        spike_multiplier: float,
        window_size: int,
        min_history: int,
        group: dist.ProcessGroup | None = None,
        group_world_size: int | None = None,
    ) -> None:
        self.history = LossHistory(
            spike_multiplier=spike_multiplier, window_size=window_size, min_history=min_history
        )
        self.group = group
        self.last: GuardVerdict | None = None
        """The latest verdict."""
        self.refused_total = 0
        """Micro-batch indices refused so far, those before a resume included."""
        self._ranks = _ranks(group, group_world_size)
        device = torch.device(device)
        self._device = device if supports_float64(device) else torch.device("cpu")

    def check(self, loss_sum: Tensor, token_count: Count, *, step: int = 0) -> bool:
        """Judge one micro-batch; a collective call, and one wait for the device.

        Args:
            loss_sum: 0-d, this rank's sum of per-token losses; its graph is not touched.
            token_count: what it is counted in: a number, or a 0-d tensor. 0 on a rank without tokens.
            step: kept in the verdict, :attr:`last`.

        Returns:
            True: take part. False: on every rank, run a dummy micro-batch instead and count that.

        Raises:
            DistributedError: the ranks don't measure with the same limit.
        """
        limit = self.history.limit
        with torch.inference_mode(False), torch.no_grad():
            own, message = self._message(loss_sum, token_count, limit)
            if self._ranks > 1:
                dist.all_reduce(message, group=self.group)
            # Both in one copy, so that the host waits for the device once.
            values = torch.cat([own, message]).tolist()
        own_sum, own_tokens, reduced = values[0], values[1], values[2:]
        if not agreed(reduced, _AGREEMENT):
            raise DistributedError(
                f"the ranks measure spikes with different limits; here it is {limit} nats per token",
                why="one would refuse what another takes, and their gradients would belong to different windows",
                fix="build the guard with the same settings on every rank, and load the same checkpoint",
            )
        self.last = self._judge(own_sum, own_tokens, reduced, limit, step)
        self.refused_total += not self.last.admitted
        if self.last.loss is not None and self.last.reason != "non-finite":
            self.history.add(self.last.loss)
        return self.last.admitted

    def _message(self, loss_sum: Tensor, token_count: Count, limit: float | None) -> tuple[Tensor, Tensor]:
        if loss_sum.dim() != 0:
            raise KitUsageError(
                f"the guard got a loss of shape {list(loss_sum.shape)}",
                fix='pass the sum of the per-token losses: outputs["loss"].sum().',
            )
        tokens = token_count.detach() if isinstance(token_count, Tensor) else torch.tensor(float(token_count))
        own = torch.stack([value.to(self._device, torch.float64) for value in (loss_sum.detach(), tokens)])
        # Masked before the sum: added up, one rank's NaN would hide what the others have.
        finite = own.isfinite().all()
        mark = fingerprint((self.history.spike_multiplier, limit))
        agreement = own.new_tensor([1.0, mark, mark * mark])
        everyones = own[1:].where(own[1:].isfinite(), 1.0)
        message = torch.cat([own.where(finite, 0.0), (~finite).to(own.dtype)[None], agreement, everyones])
        assert message.numel() == _WIDTH
        return own, message

    def _judge(
        self, own_sum: float, own_tokens: float, reduced: list[float], limit: float | None, step: int
    ) -> GuardVerdict:
        tokens, non_finite = reduced[_TOKENS], int(reduced[_NON_FINITE])
        loss = reduced[_LOSS_SUM] / tokens if tokens > 0 else None
        reason: Literal["non-finite", "spike"] | None = None
        own_offence = False
        if non_finite:
            reason = "non-finite"
            own_offence = not torch.tensor([own_sum, own_tokens]).isfinite().all()
        elif loss is not None and limit is not None and loss > limit:
            reason = "spike"
            # The common loss is an average of the ranks' own, so at least one of them is above the limit.
            own_offence = own_tokens > 0 and own_sum / own_tokens > limit
        return GuardVerdict(
            step=step,
            reason=reason,
            loss=loss,
            limit=limit,
            non_finite_ranks=non_finite,
            own_loss_sum=own_sum,
            own_offence=bool(own_offence),
            tokens=reduced[_ALL_TOKENS],
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide as this one would: plain values."""
        return {"losses": list(self.history.losses), "refused_total": self.refused_total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; the settings are this guard's own."""
        self.history.replace(state["losses"])
        self.refused_total = int(state["refused_total"])


def _ranks(group: dist.ProcessGroup | None, declared: int | None) -> int:
    joined = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size(group) if joined else 1
    if size < 1 or (declared is not None and declared != size):
        raise KitUsageError(
            f"group_world_size is {declared}, but the guard's group has {size} ranks"
            if size >= 1
            else f"this process (rank {dist.get_rank()}) is not a member of the guard's group",
            why="ranks that don't decide together run different numbers of collectives, and hang.",
            fix="pass group= the ranks that train together, and group_world_size= their number or None.",
        )
    return size
