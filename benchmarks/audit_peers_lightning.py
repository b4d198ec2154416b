"""Lightning's automatic optimisation, as its documentation has it, and the same with TokenNormedModule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.audit_peers_evaluation import Notes, held_out_loader
from tokennorm.audit import Layout
from tokennorm.integrations.lightning import TokenNormedModule
from tokennorm.kit import apply_chunked_token_loss_patch
from tokennorm.recipes.audit.trainer_models import tiny_model

__all__ = ["ExactLoop", "StockLoop"]

Batches = list[dict[str, Tensor]]


class Stock(LightningModule):
    """Returns the model's loss and logs it, over the epoch and all ranks."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        # The audit's reference reads the router loss's coefficient from here.
        self.config: Any = network.config
        self.sgd = torch.optim.SGD(network.parameters(), lr=0.1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        return self.network(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        loss = self(**batch).loss
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        self.log("val_loss", self(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.sgd


class Exact(TokenNormedModule, Stock):
    """The same with the integration, on a model that returns its token losses."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        outputs = self(**batch)
        return self.token_loss(
            loss_sum=outputs.loss.sum(),
            effective_tokens=(batch["labels"][:, 1:] != -100).sum(),
            total_tokens=batch["attention_mask"].sum(),
            router_loss=outputs.extra_loss,
        )

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # noqa: ARG002
        losses = self(**batch).loss.view(batch["labels"].shape)
        supervised = (batch["labels"][:, 1:] != -100).sum(1)
        self.log_token_loss("val_loss", loss_sums=losses.sum(1), effective_tokens=supervised)


class Loader:
    """This rank's batches as they are: Lightning takes a list for several loaders, and has nothing to sample."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@dataclass
class StockLoop:
    """A window is an epoch; a short one has fewer batches than the Trainer accumulates."""

    model: str
    notes: Notes

    def reference_model(self) -> nn.Module:
        return Stock(tiny_model(self.model))

    def module(self) -> Any:
        return Stock(tiny_model(self.model))

    def build(self, layout: Layout) -> tuple[nn.Module, Any]:
        self.layout, self.evaluated = layout, False
        module = self.module()
        return module, module.sgd

    def step(self, module: Any, optimizer: Any, batches: Batches) -> float:  # noqa: ARG002
        """One window."""
        trainer = Trainer(
            accelerator="cpu",
            devices=self.layout.ranks,
            strategy="ddp" if self.layout.ranks > 1 else "auto",
            max_epochs=1,
            accumulate_grad_batches=self.layout.accumulation_steps,
            gradient_clip_val=1.0,
            log_every_n_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, Loader(batches))
        logged = trainer.callback_metrics["train_loss"].item()
        if not self.evaluated:
            self.evaluated = True
            (metrics,) = trainer.validate(module, held_out_loader(), verbose=False)
            self.notes.add(self.layout, metrics["val_loss"], module.network.state_dict())
        return logged


class ExactLoop(StockLoop):
    """With the integration."""

    def module(self) -> Any:
        return Exact(apply_chunked_token_loss_patch(tiny_model(self.model)))
