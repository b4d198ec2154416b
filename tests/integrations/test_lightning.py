"""Lightning's automatic optimisation, audited: stock found wrong, the same module with token_loss exact."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, strategies
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.audit.loop_pieces import TinyMoE, losses_of, supervised
from tokennorm.audit import (
    AuditReport,
    Layout,
    TinyCausalLM,
    audit_loop,
    collate,
    default_layouts,
    make_samples,
)
from tokennorm.errors import ConfigError, EmptyWindowError, KitUsageError, MissingDependencyError
from tokennorm.integrations.lightning import TokenNormalisation, TokenNormedModule
from tokennorm.integrations.lightning.evaluation import EvaluationSums
from tokennorm.kit import TokenNormedLossKit

pytestmark = [
    # Lightning flattens loaders with a class of torch's that torch has deprecated since.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # A single rank of the audit is in a process group too; Lightning takes that for several and warns, although it
    # was told to reduce.
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log.*sync_dist=True"),
    # These loaders need no workers; and Lightning knows about repeated samples, which are left out here.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
]

Batches = list[dict[str, Tensor]]

FEW = tuple(
    layout
    for layout in default_layouts(ranks=(1, 2), packed=False)
    if layout.name in ("an empty micro-batch", "uneven ranks and micro-batches", "a short last window")
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are forked from this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Loader:
    """Batches as they are: not a list (Lightning takes that for several loaders), and nothing to sample from."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stock(LightningModule):
    """As in Lightning's documentation, with the mean loss that the model returns."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.adam = torch.optim.AdamW(network.parameters(), lr=0.01)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        return self.network(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self(**batch).loss.nan_to_num()
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.adam


class Exact(TokenNormedModule, Stock):
    router = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch["input_ids"], batch["attention_mask"])
        return self.token_loss(
            loss_sum=losses_of(outputs.logits, batch["labels"]).sum(),
            effective_tokens=supervised(batch),
            total_tokens=batch["attention_mask"].sum(),
            router_loss=outputs.aux_loss if self.router else None,
        )


class ExactWithRouter(Exact):
    router = True


class Manual(Stock):
    """The example of the documentation: no integration, the kit alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False
        self.accumulate = 1

    def on_train_start(self) -> None:
        self.kit = TokenNormedLossKit(self.device, self.trainer.world_size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        last = (batch_idx + 1) % self.accumulate == 0 or self.trainer.is_last_batch
        losses = losses_of(self(batch["input_ids"], batch["attention_mask"]).logits, batch["labels"])
        loss = self.kit.accumulate_microbatch(
            loss_sum=losses.sum(), effective_tokens=len(losses), total_tokens=batch["attention_mask"].sum()
        )
        local = not last and self.trainer.world_size > 1
        with self.trainer.strategy.block_backward_sync() if local else contextlib.nullcontext():
            self.manual_backward(loss)
        if last:
            stats = self.kit.reduce_window()
            self.kit.rescale_gradients(self.parameters(), stats)
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.kit.reset()
            self.log("train_loss", stats.mean_loss)


def build(
    layout: Layout, module: type[LightningModule] = Exact, network: type[nn.Module] = TinyCausalLM
) -> tuple[nn.Module, Any]:
    built = module(network())
    built.layout = layout  # type: ignore[assignment]
    return built, built.adam


def quiet_trainer(ranks: int = 1, **options: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "devices": ranks,
            "strategy": "ddp" if ranks > 1 else "auto",
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def fit(module: Any, _optimizer: Any, batches: Batches, **options: Any) -> float:
    """A window is an epoch; a short one has fewer batches than the Trainer accumulates."""
    steps = module.layout.accumulation_steps
    trainer = quiet_trainer(module.layout.ranks, accumulate_grad_batches=steps, **options)
    trainer.fit(module, Loader(batches))
    return trainer.callback_metrics["train_loss"].item()


def audit(build: Any, step: Any = fit, **options: Any) -> AuditReport:
    return audit_loop(build, step, **{"start_method": "fork", "packed": False, "layouts": FEW, **options})


def test_the_stock_loop_is_a_mean_of_means_in_windows_of_fixed_size():
    report = audit(functools.partial(build, module=Stock))
    assert not report.exact
    assert report.diagnosis is not None
    names = {report.diagnosis.name, *report.diagnosis.also}
    assert names == {"mean_of_rank_and_micro_batch_means", "fixed_division"}, str(report)
    assert any("logged loss" in note for note in report.notes)


def test_exact_in_every_layout():
    """Clipped, so that the norm is that of the right gradient; the logged loss is compared too."""
    report = audit(build, functools.partial(fit, gradient_clip_val=0.05), layouts=None, ranks=(1, 2))
    assert report.exact, str(report)
    assert len(report.layouts) == 10
    assert not any("logged" in note for note in report.notes), report.notes


class ScalerWithoutAutocast(MixedPrecision):
    """The loss scaler of 16-mixed, on the CPU."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**12))

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast("cpu", enabled=False)


def fit_with_scaler(module: Any, optimizer: Any, batches: Batches) -> float:
    return fit(module, optimizer, batches, plugins=[ScalerWithoutAutocast()], gradient_clip_val=0.05)


def fit_manually(module: Any, optimizer: Any, batches: Batches) -> float:
    module.accumulate = module.layout.accumulation_steps
    trainer = quiet_trainer(module.layout.ranks)
    trainer.fit(module, Loader(batches))
    return trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize(
    ("build", "step"),
    [
        (functools.partial(build, module=ExactWithRouter, network=TinyMoE), fit),
        (build, fit_with_scaler),
        (functools.partial(build, module=Manual), fit_manually),
    ],
    ids=["router loss", "loss scaler, clipped", "manual optimisation with the kit"],
)
def test_exact_with(build, step):
    report = audit(build, step)
    assert report.exact, str(report)
    assert not any("logged" in note for note in report.notes), report.notes


class Evaluated(Exact):
    """Sample i has i + 1 tokens and a loss of 2**i, so the mean tells which samples were counted."""

    rows = 0

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.rows += len(batch)
        self.log_token_loss(f"loss {dataloader_idx}", loss_sums=2.0**batch, effective_tokens=batch + 1)

    test_step = validation_step


def mean_of_first(samples: int) -> float:
    return (2**samples - 1) / (samples * (samples + 1) / 2)


def fit_and_evaluate(module: Any, optimizer: Any, batches: Batches) -> float:
    """Two validation sets while training, another one afterwards; two ranks see 10 of 9 and 6 of 5 samples."""
    ranks = module.layout.ranks
    sets = [DataLoader(torch.arange(9), batch_size=2), DataLoader(torch.arange(5), batch_size=2)]
    trainer = quiet_trainer(ranks, accumulate_grad_batches=module.layout.accumulation_steps)
    trainer.fit(module, Loader(batches), sets)
    assert module.rows == (14 if ranks == 1 else 8)
    metrics = trainer.callback_metrics
    assert metrics["loss 0"].item() == pytest.approx(mean_of_first(9), rel=1e-12)
    assert metrics["loss 1"].item() == pytest.approx(mean_of_first(5), rel=1e-12)
    loss = metrics["train_loss"].item()
    for run in (trainer.validate, trainer.test):
        (results,) = run(module, DataLoader(torch.arange(7), batch_size=2), verbose=False)
        assert results["loss 0"] == pytest.approx(mean_of_first(7), rel=1e-12)
    module.rows = 0
    return loss


def test_the_loss_of_an_evaluation_counts_each_sample_once():
    report = audit(functools.partial(build, module=Evaluated), fit_and_evaluate)
    assert report.exact, str(report)


def test_no_sample_of_an_evaluation_counts_twice_or_never():
    """All ranks one after the other: each sample is in exactly one of their sums."""
    repeated = 0
    for samples, ranks, shuffle in itertools.product((1, 2, 3, 5, 8, 12), (2, 3), (False, True)):
        num = 0.0
        for rank in range(ranks):
            sampler = DistributedSampler(torch.arange(samples), ranks, rank, shuffle=shuffle)
            loader = DataLoader(torch.arange(samples), batch_size=2, sampler=sampler)
            loaders = SimpleNamespace(flattened=[loader])
            trainer: Any = SimpleNamespace(
                validating=True, _evaluation_loop=SimpleNamespace(_combined_loader=loaders)
            )
            sums = EvaluationSums()
            for batch in loader:
                sums.add(trainer, "loss", loss_sums=2.0**batch, effective_tokens=batch + 1, prog_bar=False)
            num += float(sums._sums["loss"].num)
            repeated += len(sampler)
        assert num == 2**samples - 1, (samples, ranks, shuffle)
        repeated -= samples
    assert repeated > 0


def some_batches(*numbers: tuple[int, ...]) -> Batches:
    samples = make_samples(29)
    return [collate([samples[number] for number in batch], packed=False) for batch in numbers]


def train(batches: Batches, module: type[Exact] = Exact, **options: Any) -> tuple[Exact, Trainer]:
    torch.manual_seed(0)
    built = module(TinyCausalLM())
    built.adam = torch.optim.SGD(built.parameters(), lr=0.5)
    trainer = quiet_trainer(**options)
    trainer.fit(built, Loader(batches))
    return built, trainer


def by_definition(batches: Batches, windows: list[list[int]]) -> tuple[nn.Module, list[float], list[float]]:
    """Plain gradient descent in float64 on the mean over each window's tokens; the windows' sums and counts."""
    torch.manual_seed(0)
    model = TinyCausalLM().double()
    sums, counts = [], []
    for window in windows:
        losses = torch.cat(
            [losses_of(model(b["input_ids"], b["attention_mask"]).logits, b["labels"])
             for b in (batches[place] for place in window)]
        )  # fmt: skip
        model.zero_grad()
        losses.mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        sums.append(losses.sum().item())
        counts.append(len(losses))
    return model, sums, counts


def assert_same_weights(module: Exact, model: nn.Module) -> None:
    for ours, theirs in zip(module.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


class Watcher(Callback):
    """Comes before ours, and sees what it did all the same."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(nn.utils.get_total_norm(gradients).item())


class Keeper(Exact):
    """Keeps what was logged at the end of each epoch."""

    def on_train_start(self) -> None:
        self.kept: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.kept.append(self.trainer.callback_metrics["train_loss_epoch"].item())

    def on_train_end(self) -> None:
        self.kept.append(self.trainer.callback_metrics["train_loss_epoch"].item())


def test_whole_epochs_with_a_schedule_of_accumulation():
    batches = some_batches((0,), (1, 2), (11,), (10, 3), (4,))
    watcher = Watcher()
    scheduler = GradientAccumulationScheduler({0: 1, 1: 3})
    # The third batch has no supervised token, and is a window of its own in the first epoch.
    callbacks = [watcher, scheduler, TokenNormalisation(empty_window="skip", prog_bar=False)]
    module, _ = train(batches, Keeper, callbacks=callbacks, max_epochs=2)
    windows = [[0], [1], [3], [4], [0, 1, 2], [3, 4]]
    model, sums, counts = by_definition(batches, windows)
    assert_same_weights(module, model)
    want = [sum(sums[:4]) / sum(counts[:4]), sum(sums[4:]) / sum(counts[4:])]
    assert module.kept == pytest.approx(want, rel=1e-5)
    assert len(watcher.norms) == 7
    assert watcher.norms[2] == 0
    last = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert watcher.norms[-1] == pytest.approx(last, rel=1e-4)


class Quitter(Exact):
    """Ends its first epoch inside a window."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None


def test_an_epoch_that_ends_early_leaves_nothing_for_the_next_one():
    batches = some_batches((0,), (1, 2), (5,), (10, 3))
    module, _ = train(batches, Quitter, accumulate_grad_batches=2, max_epochs=2)
    # The third batch ran backward, and Lightning throws its gradient away.
    model, _, _ = by_definition(batches, [[0, 1], [0, 1], [2, 3]])
    assert_same_weights(module, model)


def test_an_empty_window_is_an_error_or_moves_nothing():
    batches = some_batches((0,), (11,))
    with pytest.raises(EmptyWindowError):
        train(batches)
    module, _ = train(batches, callbacks=[TokenNormalisation(empty_window="skip")])
    assert_same_weights(module, by_definition(batches, [[0]])[0])


class PlainLoss(Exact):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (
            Stock.training_step(self, batch, batch_idx) if batch_idx else super().training_step(batch, batch_idx)
        )


class WithoutCallback(Exact):
    def configure_callbacks(self) -> list[Callback]:
        return []


class Confused(Exact):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.token_loss(loss_sum=torch.ones(()), effective_tokens=1, total_tokens=1)


class LogsInTraining(Exact):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.log_token_loss("loss", loss_sums=torch.ones(1), effective_tokens=torch.ones(1))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (PlainLoss, "of 2 micro-batches of this optimizer step, 1 went through token_loss"),
        (WithoutCallback, "no TokenNormalisation callback"),
        (LogsInTraining, "outside of validation_step"),
    ],
)
def test_misuse_is_refused(module, message):
    with pytest.raises(KitUsageError, match=message):
        train(some_batches((0,), (1,)), module, accumulate_grad_batches=2)


def test_token_loss_belongs_into_training():
    trainer = quiet_trainer()
    with pytest.raises(KitUsageError, match="outside of training"):
        trainer.validate(Confused(TinyCausalLM()), Loader(some_batches((0,))), verbose=False)


class ManualByMistake(Exact):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.automatic_optimization = False


def test_manual_optimisation_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="TokenNormedLossKit in training_step"):
        train(some_batches((0,)), ManualByMistake)


def test_lbfgs_is_refused():
    module = Exact(TinyCausalLM())
    module.adam = torch.optim.LBFGS(module.parameters())
    with pytest.raises(ConfigError, match="several times"):
        quiet_trainer().fit(module, Loader(some_batches((0,))))


class Unknown:
    """A strategy of somebody else's."""


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (strategies.DeepSpeedStrategy, "inside one call"),
        (strategies.FSDPStrategy, "not shown to be exact"),
        (strategies.ModelParallelStrategy, "share tokens"),
        (strategies.XLAStrategy, "after the rescale"),
        (Unknown, "was not measured"),
    ],
)
def test_what_can_not_be_exact_is_refused_with_a_reason(strategy, reason):
    callback = TokenNormalisation()
    # Without their libraries and devices most of them can't be made.
    trainer: Any = SimpleNamespace(strategy=object.__new__(strategy), callbacks=[callback])
    with pytest.raises(ConfigError, match=reason):
        callback.setup(trainer, Exact(TinyCausalLM()), "fit")


def test_without_lightning_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("tokennorm.integrations.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingDependencyError, match=r"tokennorm\[integrations\]"):
        importlib.import_module("tokennorm.integrations.lightning")
