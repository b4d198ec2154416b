"""Loops of Accelerate, audited: the stock loop is found wrong, the same loop with TokenNormedBackward exact."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.audit.loop_pieces import TinyMoE, losses_of, supervised
from tokennorm.audit import AuditReport, Layout, TinyCausalLM, audit_loop, default_layouts
from tokennorm.errors import ConfigError, EmptyWindowError, KitUsageError
from tokennorm.integrations.accelerate import TokenNormedBackward, TokenNormedEvaluation
from tokennorm.kit import apply_chunked_token_loss_patch

# What tells most: uneven everything, and an epoch that ends inside a window.
FEW = tuple(
    layout
    for layout in default_layouts(ranks=(1, 2), packed=False)
    if layout.name in ("an empty micro-batch", "uneven ranks and micro-batches", "a short last window")
)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are forked from this process; and Accelerate warns where the number of threads isn't set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    forget_accelerator()


def forget_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Prepared:
    """What ``build`` leaves for ``step``, which is given model and optimizer only."""

    accelerator: Accelerator
    token_normed: TokenNormedBackward


def prepare(
    network: nn.Module, steps: int, *, scaler: float | None = None, empty_window: Any = "raise", **plugin: Any
) -> tuple[nn.Module, Any]:
    forget_accelerator()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps, **plugin),
        mixed_precision="no" if scaler is None else "fp16",
        kwargs_handlers=[AutocastKwargs(enabled=False)],
    )
    if scaler is not None:
        # Accelerate makes one on accelerators only; given one, it does on the CPU what it does there.
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scaler), True
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    network, optimizer = accelerator.prepare(network, optimizer)
    Prepared.accelerator = accelerator
    Prepared.token_normed = TokenNormedBackward(accelerator, network, empty_window=empty_window)
    return network, optimizer


def build(layout: Layout, model: type[nn.Module] = TinyCausalLM, **options: Any) -> tuple[nn.Module, Any]:
    return prepare(model(), layout.accumulation_steps, **options)


def stock(model: nn.Module, optimizer: Any, batches: list[dict[str, Tensor]]) -> float:
    """As in Accelerate's documentation, with the mean loss that the model returns."""
    accelerator, logged = Prepared.accelerator, 0.0
    for batch in DataLoaderShard(batches, batch_size=None):
        with accelerator.accumulate(model):
            loss = model(**batch).loss.nan_to_num()
            logged += accelerator.reduce(loss.detach(), "mean").item() / len(batches)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return logged


def exact(
    model: nn.Module,
    optimizer: Any,
    batches: list[dict[str, Tensor]],
    *,
    clip: float | None = None,
    router: bool = False,
) -> dict[str, float]:
    accelerator, stats = Prepared.accelerator, None
    for batch in DataLoaderShard(batches, batch_size=None):
        with accelerator.accumulate(model):
            labels = batch.pop("labels")
            outputs = model(**batch)
            stats = Prepared.token_normed.backward(
                loss_sum=losses_of(outputs.logits, labels).sum(),
                effective_tokens=supervised({"labels": labels}),
                total_tokens=labels.numel(),
                router_loss=outputs.aux_loss if router else None,
            )
            assert (stats is not None) is accelerator.sync_gradients
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    assert stats is not None
    return {"loss": stats.mean_loss, "tokens": stats.global_effective_tokens}


def audit(step: Any, build: Any = build, **options: Any) -> AuditReport:
    return audit_loop(build, step, **{"start_method": "fork", "packed": False, "layouts": FEW, **options})


def test_the_stock_loop_is_a_mean_of_means_in_windows_of_fixed_size():
    report = audit(stock)
    assert not report.exact
    assert report.diagnosis is not None
    names = {report.diagnosis.name, *report.diagnosis.also}
    assert names == {"mean_of_rank_and_micro_batch_means", "fixed_division"}, str(report)
    assert all(layout.error > 0.1 for layout in report.layouts)
    assert any("logged loss" in note for note in report.notes)


def test_exact_in_every_layout():
    """Clipped, so that the norm is that of the right gradient; the logged loss and count are compared too."""
    report = audit(functools.partial(exact, clip=0.05), layouts=None, ranks=(1, 2))
    assert report.exact, str(report)
    assert len(report.layouts) == 10
    assert not any("logged" in note for note in report.notes), report.notes


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (functools.partial(exact, router=True), {"model": TinyMoE}),
        (functools.partial(exact, clip=0.05), {"scaler": 2.0**12}),
        (exact, {"sync_each_batch": True}),
    ],
    ids=["router loss", "loss scaler, clipped", "sync at every micro-batch"],
)
def test_exact_with(step, options):
    report = audit(step, functools.partial(build, **options))
    assert report.exact, str(report)


def mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=3,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.5,
        output_router_logits=True,
        initializer_range=0.3,
    )
    return Qwen3MoeForCausalLM(config)


def build_patched(layout: Layout) -> tuple[nn.Module, Any]:
    return prepare(apply_chunked_token_loss_patch(mixture()), layout.accumulation_steps)


def patched(model: nn.Module, optimizer: Any, batches: list[dict[str, Tensor]]) -> float | None:
    """The loop of the documentation."""
    accelerator, token_normed, stats = Prepared.accelerator, Prepared.token_normed, None
    for batch in DataLoaderShard(batches, batch_size=None):
        with accelerator.accumulate(model):
            outputs = model(**batch)
            stats = token_normed.backward(
                loss_sum=outputs.loss.sum(),
                effective_tokens=(batch["labels"][:, 1:] != -100).sum(),
                total_tokens=batch["attention_mask"].sum(),
                router_loss=outputs.extra_loss,
            )
            optimizer.step()
            optimizer.zero_grad()
    assert stats is not None
    return stats.mean_loss


def test_exact_with_a_patched_mixture_of_experts():
    # Its norms compute in float32 whatever the dtype, so the float64 reference is not much better than the loop.
    report = audit(patched, build_patched, reference_model=mixture, vocabulary_size=29, layouts=FEW[::2])
    assert report.exact, str(report)


def one_window(model: nn.Module, *, labels: Tensor | None = None) -> Any:
    """One micro-batch in one process; what ``backward`` returned."""
    ids = torch.arange(1, 9).view(1, 8)
    labels = ids if labels is None else labels
    with Prepared.accelerator.accumulate(model):
        return Prepared.token_normed.backward(
            loss_sum=losses_of(model(input_ids=ids).logits, labels).sum(),
            effective_tokens=supervised({"labels": labels}),
            total_tokens=8,
        )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def test_gradients_that_nobody_cleared_are_refused():
    model, optimizer = prepare(TinyCausalLM(), 1)
    one_window(model)
    with pytest.raises(KitUsageError, match="still there"):
        one_window(model)
    optimizer.zero_grad()
    one_window(model)
    optimizer.zero_grad(set_to_none=False)
    one_window(model)


def test_accumulation_steps_may_change_between_windows_only():
    model, optimizer = prepare(TinyCausalLM(), 2)
    one_window(model)
    Prepared.accelerator.gradient_accumulation_steps = 3
    with pytest.raises(KitUsageError, match="from 2 to 3"):
        one_window(model)
    Prepared.accelerator.gradient_accumulation_steps, Prepared.accelerator.step = 2, 1
    assert one_window(model) is not None
    first = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    Prepared.accelerator.gradient_accumulation_steps, Prepared.accelerator.step = 3, 0
    for _ in range(3):
        one_window(model)
    # The same micro-batch two or three times is the same mean.
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], first)


def test_an_empty_window_is_an_error_or_moves_nothing():
    nothing = torch.full((1, 8), -100)
    model, optimizer = prepare(TinyCausalLM(), 1)
    with pytest.raises(EmptyWindowError):
        one_window(model, labels=nothing)
    model, optimizer = prepare(TinyCausalLM(), 1, empty_window="skip")
    assert not one_window(model).skipped
    optimizer.step()  # now AdamW has momentum
    optimizer.zero_grad()
    before = weights(model)
    assert one_window(model, labels=nothing).skipped
    optimizer.step()
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    assert not one_window(model).skipped
    optimizer.step()
    assert not torch.equal(weights(model), before)


def test_a_step_that_the_scaler_skips_leaves_the_next_window_right():
    plain = TinyCausalLM()
    model, optimizer = prepare(copy.deepcopy(plain), 1, scaler=2.0**12)
    before = weights(model)
    one_window(model)
    model.head.weight.grad.fill_(float("inf"))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(weights(model), before)
    optimizer.zero_grad()
    one_window(model)
    optimizer.step()
    assert not optimizer.step_was_skipped
    ids = torch.arange(1, 9).view(1, 8)
    plain(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()], [parameter.grad for parameter in plain.parameters()]
    )


def rank_of(rank: int, ranks: int) -> Any:
    """As much of an Accelerator as evaluation asks for, on a rank of a job that doesn't run."""
    return SimpleNamespace(
        num_processes=ranks,
        process_index=rank,
        gradient_state=GradientState(),
        distributed_type="MULTI_CPU",
        parallelism_config=None,
        has_lomo_optimizer=False,
        device=torch.device("cpu"),
    )


def evaluate(accelerator: Any, loader: Any) -> tuple[float, float, int]:
    """Sample i has a loss of 2**i, so the sum tells which samples were counted; and how many rows were seen."""
    evaluation, rows = TokenNormedEvaluation(accelerator), 0
    for batch in loader:
        evaluation.add(loss_sums=2.0**batch, effective_tokens=batch + 1)
        rows += len(batch)
    total = evaluation.reduce()
    return float(total.num), float(total.den), rows


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.samples))


SETUPS = [{}, {"split_batches": True}, {"even_batches": False}]


@pytest.mark.parametrize("options", SETUPS, ids=["even", "split", "uneven"])
def test_no_sample_of_an_evaluation_counts_twice_or_never(options):
    """All ranks one after the other, in one process: each sample is in exactly one of their sums."""
    Accelerator(cpu=True)
    repeated = False
    for samples, batch_size, ranks in itertools.product((1, 2, 3, 5, 7, 8, 12), (1, 2), (2, 3)):
        if options.get("split_batches"):
            batch_size *= ranks
        data = DataLoader(torch.arange(samples), batch_size=batch_size)
        num, den, rows = 0.0, 0.0, 0
        for rank in range(ranks):
            loader = prepare_data_loader(data, num_processes=ranks, process_index=rank, **options)
            mine = evaluate(rank_of(rank, ranks), loader)
            num, den, rows = num + mine[0], den + mine[1], rows + mine[2]
        assert num == 2**samples - 1, (samples, batch_size, ranks)
        assert den == samples * (samples + 1) / 2
        repeated = repeated or rows > samples
    assert repeated is options.get("even_batches", True)


def test_an_evaluation_set_of_unknown_length_is_refused_where_samples_are_repeated():
    Accelerator(cpu=True)
    for samples, ranks, refused in ((5, 2, True), (5, 1, False)):
        data = DataLoader(Stream(samples), batch_size=2)
        loader = prepare_data_loader(data, num_processes=ranks, process_index=0, dispatch_batches=False)
        if refused:
            with pytest.raises(ConfigError, match="has no length"):
                evaluate(rank_of(0, ranks), loader)
        else:
            assert evaluate(rank_of(0, ranks), loader)[0] == 2**samples - 1


def test_an_evaluation_needs_a_number_per_sample():
    with pytest.raises(KitUsageError, match=r"\[B\]"):
        TokenNormedEvaluation(rank_of(0, 1)).add(loss_sums=torch.ones(()), effective_tokens=torch.ones(()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"distributed_type": "DEEPSPEED"}, "inside one call"),
        ({"distributed_type": "MEGATRON_LM"}, "no loss to hand over"),
        ({"distributed_type": "FSDP"}, "not shown to be exact"),
        ({"distributed_type": "XLA"}, "after the rescale"),
        ({"parallelism_config": SimpleNamespace(tp_size=2, cp_size=1)}, "share tokens"),
        ({"has_lomo_optimizer": True}, "during backward"),
    ],
)
def test_what_can_not_be_exact_is_refused_with_a_reason(changes, reason):
    accelerator = SimpleNamespace(**{**vars(rank_of(0, 1)), **changes})
    with pytest.raises(ConfigError, match=reason):
        TokenNormedBackward(accelerator, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=reason):
        TokenNormedEvaluation(accelerator)


def test_a_model_that_nobody_averages_is_refused():
    with pytest.raises(KitUsageError, match=r"accelerator\.prepare returned it"):
        TokenNormedBackward(rank_of(0, 2), nn.Linear(1, 1))
    with pytest.raises(KitUsageError, match="no model"):
        TokenNormedBackward(rank_of(0, 1))


def build_hooked(layout: Layout) -> tuple[nn.Module, Any]:
    """DDP with a hook that sums; what it divides by has to be declared."""
    network, optimizer = build(layout)
    if layout.ranks > 1:
        network.register_comm_hook(None, summing)
        with pytest.raises(KitUsageError, match="averaging_factor="):
            TokenNormedBackward(Prepared.accelerator, network)
    Prepared.token_normed = TokenNormedBackward(Prepared.accelerator, network, averaging_factor=1)
    return network, optimizer


def summing(_state, bucket):  # DDP reads annotations, and not those that are strings
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def exact_and_evaluated(model: nn.Module, optimizer: Any, batches: list[dict[str, Tensor]]) -> Any:
    """An evaluation before each window: nine samples, which one rank sees once and two ranks don't."""
    accelerator = Prepared.accelerator
    loader = accelerator.prepare_data_loader(DataLoader(torch.arange(9), batch_size=2))
    num, den, rows = evaluate(accelerator, loader)
    assert (num, den) == (2**9 - 1, 45)
    assert rows == (9 if accelerator.num_processes == 1 else 6)
    return exact(model, optimizer, batches)


def test_exact_with_a_hook_that_sums_and_an_evaluation_in_between():
    report = audit(exact_and_evaluated, build_hooked)
    assert report.exact, str(report)
