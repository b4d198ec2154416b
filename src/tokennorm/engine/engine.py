"""The engine: one optimizer step from micro-batches to logged numbers, readable in one sitting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokennorm.engine.clipping import clip_gradients
from tokennorm.engine.distributed import set_gradient_sync
from tokennorm.engine.evaluate import move_to_device
from tokennorm.engine.objective import Batch, Objective, ObjectiveOutput
from tokennorm.engine.precision import step_with_scaler, unscale_gradients
from tokennorm.engine.refused import RefusedMicroBatch, dummy_maker, judged_loss
from tokennorm.errors import NonFiniteError
from tokennorm.kit import TokenNormedLossKit
from tokennorm.loss import RatioSum, merge_ratios, reduce_ratios

__all__ = ["Engine", "StepReport"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one window came to, reduced over all ranks.

    Attributes:
        step: optimizer steps finished, this one included.
        loss: mean loss per supervised token of the window in nats; None for an empty window.
        grad_norm: global norm of the exact gradient before clipping; None when the window was empty.
        lr: learning rate of the step.
        effective_tokens: supervised tokens of the window, or the sum of their weights.
        total_tokens: its tokens without padding.
        metrics: means of the extra terms and of the objective's metrics; None where nothing was counted.
        skipped: why the weights did not move ("empty window", "all refused" by the loss guard, "fp16 overflow") or
            None.
        refused: what the loss guard kept out of the window, on all ranks together.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    effective_tokens: int | float
    total_tokens: int | float
    metrics: dict[str, float | None] = field(default_factory=dict)
    skipped: str | None = None
    refused: tuple[RefusedMicroBatch, ...] = ()


class Engine:
    """Trains ``model`` on an objective, every supervised token of a window counted once.

    Args:
        model: patched and, for several ranks, wrapped (:func:`~tokennorm.engine.distributed.wrap_ddp`).
        optimizer: over the parameters that are to learn.
        objective: turns a micro-batch into sums.
        scheduler: stepped once after each optimizer step; None for a constant rate.
        scaler: for fp16; by default one that is switched off.
        device: where micro-batches go; by default where the model is.
        dp_world_size: number of ranks that hold different tokens.
        dp_group: those ranks; None is the default group.
        token_loss_kit: the accounting; by default one for this device and these ranks. Its policy for empty
            windows is the engine's: an error, or a step that moves nothing and is reported. What its loss guard
            emptied is never an error.
        backward_divisor: what provisional losses are divided by, see
            :meth:`~tokennorm.kit.TokenNormedLossKit.accumulate_microbatch`. For fp16
            :func:`~tokennorm.engine.fixed_divisor`: the kit's own follows the window before, and after a short one
            a long one may overflow.
        max_grad_norm: clip the global gradient norm to this; None reports the norm only.
        after_reduce: called after each window's reduction, where the host waits for the device anyway; raises what
            an objective found on the device and could not tell at once.
        on_refused: called on each rank for each micro-batch that the kit's loss guard refused, e.g. a
            :class:`~tokennorm.engine.refused.RefusedFolder`. With a guard, the objective needs a method
            ``dummy(batch)``: a micro-batch without supervised tokens that is run instead.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        device: torch.device | str | None = None,
        dp_world_size: int = 1,
        dp_group: dist.ProcessGroup | None = None,
        token_loss_kit: TokenNormedLossKit | None = None,
        backward_divisor: float | None = None,
        max_grad_norm: float | None = 1.0,
        after_reduce: Callable[[], None] | None = None,
        on_refused: Callable[[RefusedMicroBatch, Batch, ObjectiveOutput], None] | None = None,
    ) -> None:
        self.model, self.optimizer, self.objective, self.scheduler = model, optimizer, objective, scheduler
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.scaler = scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        self.dp_world_size, self.dp_group = dp_world_size, dp_group
        self.token_loss_kit = token_loss_kit or TokenNormedLossKit(
            device=self.device, dp_world_size=dp_world_size, dp_group=dp_group
        )
        self.backward_divisor = backward_divisor
        self.max_grad_norm, self.after_reduce = max_grad_norm, after_reduce
        self.step = 0
        self.on_refused = on_refused
        self._dummy = dummy_maker(objective, self.token_loss_kit)
        self._metrics: dict[str, RatioSum] = {}
        self._refused: list[RefusedMicroBatch] = []

    # One training step, from micro-batches to logged numbers.

    def train_step(self, window: Sequence[Batch]) -> StepReport:
        """Train on one window: this rank's micro-batches, at least one on every rank."""
        for index, batch in enumerate(window):
            # Before the forward, which prepares the reduction: DDP would reduce at every micro-batch otherwise.
            set_gradient_sync(self.model, index == len(window) - 1)
            outputs = self.forward_step(batch)
            if not self._takes_part(outputs, batch, index):
                batch = self._dummy(batch)
                outputs = self.forward_step(batch)
            self.backward_step(outputs, batch)
        self.optimizer_step()
        return self.train_post_step()

    def forward_step(self, batch: Batch) -> ObjectiveOutput:
        """Run the objective on one micro-batch."""
        return self.objective(self.model, move_to_device(batch, self.device))

    def backward_step(self, outputs: ObjectiveOutput, batch: Batch) -> None:
        """Count the micro-batch and send its provisional loss backward."""
        loss = self.token_loss_kit.accumulate_microbatch(
            loss_sum=outputs.loss_sum,
            effective_tokens=outputs.count(batch),
            total_tokens=batch["total_tokens"],
            backward_divisor=self.backward_divisor,
            extra_terms=outputs.extra_terms,
        )
        self.scaler.scale(loss).backward()
        self._metrics = merge_ratios([self._metrics, outputs.metrics])

    def optimizer_step(self) -> None:
        """Make the window's gradient exact, clip it and step. An empty window moves nothing, on any rank."""
        self._lr, self._grad_norm, self._overflow = self.optimizer.param_groups[0]["lr"], None, False
        self._stats = self.token_loss_kit.reduce_window()
        if self.after_reduce is not None:
            self.after_reduce()
        if self._stats.skipped:
            return
        unscale_gradients(self.scaler, self.optimizer)
        self.token_loss_kit.rescale_gradients(self.model.parameters(), self._stats)
        self._grad_norm = self._clip_gradients()
        self._overflow = self._step_optimizer(self._grad_norm)
        if not self._overflow:
            self.step += 1
            if self.scheduler is not None:
                self.scheduler.step()

    def train_post_step(self) -> StepReport:
        """Report the reduced values of the window, then forget it."""
        report = self._report()
        self.optimizer.zero_grad(set_to_none=True)
        self.token_loss_kit.reset()
        self._metrics, self._refused = {}, []
        return report

    # What the step is made of.

    def _takes_part(self, outputs: ObjectiveOutput, batch: Batch, index: int) -> bool:
        """Ask the loss guard, before backward; it answers the same on every rank."""
        guard = self.token_loss_kit.loss_guard
        if guard is None:
            return True
        if self.token_loss_kit.guard_loss(judged_loss(outputs), outputs.count(batch), step=self.step + 1):
            return True
        assert guard.last is not None
        refused = RefusedMicroBatch(index=index, verdict=guard.last)
        self._refused.append(refused)
        if self.on_refused is not None:
            self.on_refused(refused, batch, outputs)
        return False

    def _clip_gradients(self) -> Tensor:
        norm = clip_gradients(self.model.parameters(), self.max_grad_norm)
        # In fp16 an overflow is the scaler's everyday business: it skips the step and lowers its scale.
        if not self.scaler.is_enabled() and not bool(torch.isfinite(norm)):
            raise NonFiniteError(
                f"the gradient norm of step {self.step + 1} is {float(norm)} (loss {self._stats.mean_loss})",
                why="an optimizer step with it would turn every weight into NaN; the weights are as they were",
                fix="lower the learning rate, or look for bad rows in the data",
            )
        return norm

    def _step_optimizer(self, norm: Tensor) -> bool:
        """Step, through the scaler when there is one; return whether an overflow kept the weights in place."""
        if not self.scaler.is_enabled():
            self.optimizer.step()
            return False
        ranks, group, scale = self.dp_world_size, self.dp_group, self._stats.gradient_scale
        return step_with_scaler(self.scaler, self.optimizer, norm, scale, ranks=ranks, group=group)

    def _report(self) -> StepReport:
        stats = self._stats
        # Ranks agree on what is skipped, so either all of them reduce their metrics or none does.
        metrics = {} if stats.skipped else reduce_ratios(self._metrics, self.dp_group, device=self.device)
        skipped = "fp16 overflow" if self._overflow else None
        if stats.skipped:
            lost = any(one.verdict.tokens > 0 for one in self._refused)
            skipped = "all refused" if lost else "empty window"
        return StepReport(
            step=self.step,
            loss=stats.mean_loss,
            grad_norm=None if self._grad_norm is None else float(self._grad_norm),
            lr=self._lr,
            effective_tokens=stats.global_effective_tokens,
            total_tokens=stats.global_total_tokens,
            metrics={name: ratio.mean for name, ratio in {**stats.extra, **metrics}.items()},
            skipped=skipped,
            refused=tuple(self._refused),
        )
