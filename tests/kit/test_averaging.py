"""What a wrapper divides by, measured: one process, and four gloo ranks spawned once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.kit.window_toy import WINDOWS, ToyLM, gradients, reference_gradients, relative_error, run_window
from tokennorm.errors import KitUsageError, TokenNormError
from tokennorm.kit import TokenNormedLossKit, measure_averaging
from tokennorm.testing import spawn_ranks


class Tied(ToyLM):
    """The head shares the embedding's weight; the bias is frozen; one parameter is empty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.head.weight = self.embed.weight
        self.mix.bias.requires_grad_(False)
        self.nothing = nn.Parameter(torch.zeros(0, dtype=dtype))


def test_a_plain_model_divides_by_nothing() -> None:
    assert measure_averaging(ToyLM()) == 1
    assert measure_averaging(Tied()) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_backward_that_divides_is_seen(dtype: torch.dtype) -> None:
    assert measure_averaging(ToyLM(dtype), backward=lambda loss: (loss / 3).backward()) == 3
    assert measure_averaging(ToyLM(dtype), backward=lambda loss: (loss / 48).backward()) == 48


def test_a_backward_that_multiplies_is_seen() -> None:
    assert measure_averaging(ToyLM(), backward=lambda loss: (loss * 4).backward()) == 0.25


def test_everything_is_as_before() -> None:
    model = ToyLM()
    original = model.forward
    model.forward = lambda batch: original(batch)  # as Accelerate and patches do
    replaced = model.forward
    run_window(TokenNormedLossKit("cpu", 1), model, WINDOWS[0])
    before, kept = gradients(model), [parameter.grad for parameter in model.parameters()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    random = torch.get_rng_state()
    assert measure_averaging(model) == 1
    assert model.__dict__["forward"] is replaced
    assert "forward" not in model.mix.__dict__
    assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert torch.equal(torch.get_rng_state(), random)


def test_everything_is_as_before_after_an_error() -> None:
    model = ToyLM()

    def failing(loss: Tensor) -> None:
        loss.backward()
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure_averaging(model, backward=failing)
    assert "forward" not in model.__dict__
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_kit_uses_what_it_measured() -> None:
    kit, model = TokenNormedLossKit("cpu", 1), ToyLM()
    assert kit.averaging_factor == 1
    assert kit.measure_averaging(model, backward=lambda loss: (loss / 6).backward()) == 6
    assert kit.averaging_factor == 6
    run_window(kit, model, WINDOWS[0])
    with pytest.raises(KitUsageError, match="measure_averaging was called inside a window"):
        kit.measure_averaging(model)
    assert kit.reduce_window().gradient_scale == 1024 * 6 / 58


def test_what_cannot_be_measured() -> None:
    with pytest.raises(KitUsageError, match="no trainable parameter"):
        measure_averaging(ToyLM().requires_grad_(False))
    with pytest.raises(KitUsageError, match="DataParallel splits batches"):
        measure_averaging(nn.DataParallel(ToyLM()))
    with pytest.raises(KitUsageError, match="4 trainable parameters got no gradient"):
        measure_averaging(ToyLM(), backward=lambda loss: None)


# Four ranks.


def sum_hook(state, bucket):  # DDP compares annotations with the types themselves, not with their names
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class Trunk(nn.Module):
    """A sub-module wrapped by itself, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk: nn.Module = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def shard(model: ToyLM, **options: Any) -> ToyLM:
    fully_shard(model.mix, **options)
    return fully_shard(model, **options)


def outcome(action: Callable[[], float]) -> float | str:
    try:
        return action()
    except TokenNormError as error:
        return str(error)


def measured(rank: int) -> dict[str, float | str]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    found: dict[str, float | str] = {}

    def check(name: str, model: nn.Module, **options: Any) -> None:
        found[name] = outcome(lambda: measure_averaging(model, **options))

    ddp = DistributedDataParallel
    check("ddp", ddp(ToyLM()))
    check("ddp bfloat16, tied", ddp(Tied(torch.bfloat16)))
    check("ddp and accumulation", ddp(ToyLM()), backward=lambda loss: (loss / 8).backward())
    check("ddp of two", ddp(ToyLM(), process_group=pair), group=pair)
    check("ddp of two, counted over four", ddp(ToyLM(), process_group=pair))
    summing = ddp(ToyLM())
    summing.register_comm_hook(None, sum_hook)
    check("summing hook", summing)
    check("bucket views", ddp(ToyLM(), gradient_as_bucket_view=True))
    check("fsdp", shard(ToyLM()))
    check("fsdp bfloat16", shard(ToyLM(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    check("hsdp", shard(ToyLM(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))))
    undivided = shard(ToyLM())
    for unit in undivided.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1)
    check("fsdp without division", undivided)
    root_only = shard(ToyLM())
    root_only.set_gradient_divide_factor(1)  # type: ignore[attr-defined]
    check("fsdp, root only", root_only)
    check("nothing wrapped", ToyLM())
    partly = Trunk()
    partly.trunk = ddp(partly.trunk)
    check("partly wrapped", partly)
    check("static graph", ddp(ToyLM(), static_graph=True))
    stateful = ddp(ToyLM())
    stateful.register_comm_hook(PowerSGDState(process_group=None), powerSGD_hook)
    check("comm hook with state", stateful)
    unsynced = ddp(ToyLM())
    with unsynced.no_sync():
        check("no_sync", unsynced)
    sharded_unsynced = shard(ToyLM())
    sharded_unsynced.set_requires_gradient_sync(False)  # type: ignore[attr-defined]
    check("fsdp without sync", sharded_unsynced)
    return found


def trained(rank: int, ranks: int, wrap: Callable[[ToyLM], nn.Module], **options: Any) -> float:
    """Measure first, then train the real model on a window: the relative error of its gradients."""
    model = wrap(ToyLM())
    kit = TokenNormedLossKit("cpu", ranks, **options)
    kit.measure_averaging(model)
    run_window(kit, model, WINDOWS[1][rank::ranks])
    kit.rescale_gradients(model.parameters(), kit.reduce_window())
    kit.reset()
    return relative_error(gradients(model), reference_gradients(WINDOWS[1:2])[0])


def with_summing_hook(model: ToyLM) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, sum_hook)
    return wrapped


def counted_over_more_ranks(rank: int) -> float:
    """Data-parallel pairs, and a context-parallel partner with other tokens: counts over four, DDP over four."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    kit = TokenNormedLossKit("cpu", 2, pairs[rank // 2], count_group=dist.group.WORLD)
    model = DistributedDataParallel(ToyLM())
    kit.measure_averaging(model)
    run_window(kit, model, WINDOWS[0][rank::4])
    kit.rescale_gradients(model.parameters(), kit.reduce_window())
    return relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0])


def measured_in_between(rank: int, ranks: int) -> list[bool]:
    """Gradients that are views into DDP's buckets, which the probe reduces through: are they as before?"""
    model = DistributedDataParallel(ToyLM(), gradient_as_bucket_view=True)
    run_window(TokenNormedLossKit("cpu", ranks), model, WINDOWS[0][rank::ranks])
    before = gradients(model)
    measure_averaging(model)
    return [torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True)]


def everything(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {
        "measured": measured(rank),
        "unharmed": measured_in_between(rank, ranks),
        "trained": {
            "ddp": trained(rank, ranks, DistributedDataParallel),
            "summing hook": trained(rank, ranks, with_summing_hook),
            "fsdp": trained(rank, ranks, shard),
            "hsdp": trained(rank, ranks, lambda model: shard(model, mesh=mesh)),
            "count_group": counted_over_more_ranks(rank),
        },
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return [result.value for result in spawn_ranks(everything, 4)]


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        ("ddp", 4),
        ("ddp bfloat16, tied", 4),
        ("ddp and accumulation", 32),
        ("ddp of two", 2),
        ("summing hook", 1),
        ("bucket views", 4),
        ("fsdp", 4),
        ("fsdp bfloat16", 4),
        ("hsdp", 4),
        ("fsdp without division", 1),
    ],
)
def test_measured_factor(found: list[dict[str, Any]], case: str, factor: float) -> None:
    assert [rank["measured"][case] for rank in found] == [factor] * 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fsdp, root only", r"different averaging factors: .*embed.weight.*mix.weight"),
        ("nothing wrapped", r"4 parameters differ between ranks"),
        ("partly wrapped", r"2 parameters differ between ranks.*head.weight \(1 ... 5\)"),
        ("ddp of two, counted over four", r"4 parameters differ between ranks.*\(1 ... 3\)"),
        ("static graph", "would record the probe's graph"),
        ("comm hook with state", "keeps state .PowerSGDState."),
        ("no_sync", "sync is switched off"),
        ("fsdp without sync", "sync is switched off"),
    ],
)
def test_refused(found: list[dict[str, Any]], case: str, message: str) -> None:
    for rank in found:
        with pytest.raises(KitUsageError, match=message):
            raise KitUsageError(rank["measured"][case])


@pytest.mark.parametrize("case", ["ddp", "summing hook", "fsdp", "hsdp", "count_group"])
def test_a_measured_model_trains_exactly(found: list[dict[str, Any]], case: str) -> None:
    assert all(0 < rank["trained"][case] < 1e-14 for rank in found)


def test_gradients_in_buckets_survive(found: list[dict[str, Any]]) -> None:
    assert [rank["unharmed"] for rank in found] == [[True] * 4] * 4
