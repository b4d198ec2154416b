"""A plain loop of Accelerate, as its documentation has it, and the same with TokenNormedBackward."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

from benchmarks.audit_peers_evaluation import Notes, held_out_loader
from tokennorm.audit import Layout
from tokennorm.integrations.accelerate import TokenNormedBackward, TokenNormedEvaluation
from tokennorm.kit import apply_chunked_token_loss_patch
from tokennorm.recipes.audit.trainer_models import tiny_model

__all__ = ["ExactLoop", "StockLoop"]

Batches = list[dict[str, Tensor]]


@dataclass
class StockLoop:
    """``accelerator.accumulate`` around ``accelerator.backward(outputs.loss)``.

    Logged is the mean over micro-batches and ranks of the model's loss. Evaluated as in transformers' example
    ``run_clm_no_trainer``: each batch's loss repeated for its rows, ``gather_for_metrics``, and the mean.
    """

    model: str
    notes: Notes

    def reference_model(self) -> nn.Module:
        return tiny_model(self.model)

    def network(self) -> nn.Module:
        return tiny_model(self.model)

    def build(self, layout: Layout) -> tuple[nn.Module, Any]:
        # What an earlier layout in this process has configured; and Accelerate warns where threads aren't set.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.layout, self.evaluated = layout, False
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=layout.accumulation_steps)
        network = self.network()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        network, optimizer = self.accelerator.prepare(network, optimizer)
        self.prepared(network)
        return network, optimizer

    def prepared(self, network: nn.Module) -> None:
        """Nothing to add."""

    def step(self, model: nn.Module, optimizer: Any, batches: Batches) -> float:
        """One window."""
        logged = self.window(model, optimizer, batches)
        if not self.evaluated:
            self.evaluated = True
            model.eval()
            with torch.no_grad():
                loss = self.evaluate(model, self.accelerator.prepare(held_out_loader()))
            model.train()
            self.notes.add(self.layout, loss, self.accelerator.unwrap_model(model).state_dict())
        return logged

    def window(self, model: nn.Module, optimizer: Any, batches: Batches) -> float:
        accelerator, logged = self.accelerator, 0.0
        for batch in DataLoaderShard(batches, batch_size=None):  # pyright: ignore[reportArgumentType]
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                mean: Any = accelerator.reduce(loss.detach(), "mean")
                logged += mean.item() / len(batches)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return logged

    def evaluate(self, model: nn.Module, loader: Any) -> float:
        losses = []
        for batch in loader:
            loss = model(**batch).loss
            gathered: Any = self.accelerator.gather_for_metrics(loss.repeat(len(batch["labels"])))
            losses.append(gathered)
        return torch.cat(losses).mean().item()


class ExactLoop(StockLoop):
    """The same with the integration, on a model that returns its token losses."""

    def network(self) -> nn.Module:
        return apply_chunked_token_loss_patch(tiny_model(self.model))

    def prepared(self, network: nn.Module) -> None:
        self.token_normed = TokenNormedBackward(self.accelerator, network)

    def window(self, model: nn.Module, optimizer: Any, batches: Batches) -> float:
        accelerator, stats = self.accelerator, None
        for batch in DataLoaderShard(batches, batch_size=None):  # pyright: ignore[reportArgumentType]
            with accelerator.accumulate(model):
                outputs = model(**batch)
                stats = self.token_normed.backward(
                    loss_sum=outputs.loss.sum(),
                    effective_tokens=(batch["labels"][:, 1:] != -100).sum(),
                    total_tokens=batch["attention_mask"].sum(),
                    router_loss=outputs.extra_loss,
                )
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert stats is not None
        assert stats.mean_loss is not None
        return stats.mean_loss

    def evaluate(self, model: nn.Module, loader: Any) -> float:
        evaluation = TokenNormedEvaluation(self.accelerator)
        for batch in loader:
            losses = model(**batch).loss.view(batch["labels"].shape)
            evaluation.add(loss_sums=losses.sum(1), effective_tokens=(batch["labels"][:, 1:] != -100).sum(1))
        mean = evaluation.reduce().mean
        assert mean is not None
        return float(mean)
