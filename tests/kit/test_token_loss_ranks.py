"""Two gloo ranks, spawned once: exact gradients under DDP and FSDP2, one collective, and ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.kit.window_toy import (
    DUMMY,
    WINDOWS,
    Micro,
    ToyLM,
    gradients,
    reference_gradients,
    relative_error,
    run_window,
)
from tokennorm.errors import EmptyWindowError, TokenNormError
from tokennorm.kit import TokenNormedLossKit
from tokennorm.loss import LossTerm
from tokennorm.testing import spawn_ranks

# (counted, router, weighted)
MODES = [
    (False, None, False),
    (False, "tokens", False),
    (False, "tokens", True),
    (True, None, False),
    (True, "routed", False),
    (True, "routed", True),
]


def share(window: list[Micro], rank: int, ranks: int) -> list[Micro]:
    """This rank's micro-batches, padded so that all ranks have the same number."""
    longest = -(-len(window) // ranks)
    mine = window[rank::ranks]
    return [*mine, *[DUMMY] * (longest - len(mine))]


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: ToyLM) -> nn.Module:
    fully_shard(model.mix)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {"ddp": ddp, "fsdp": fsdp}


def train_windows(
    rank: int, ranks: int, wrap: Callable[[Any], nn.Module], dtype: torch.dtype, mode: tuple[bool, Any, bool]
) -> float:
    """Largest relative gradient error over the windows; rank 1 has no supervised token in the last one."""
    counted, router, weighted = mode
    kit, model = TokenNormedLossKit("cpu", ranks), wrap(ToyLM(dtype))
    worst = 0.0
    expected = reference_gradients(WINDOWS, weighted=weighted, router=router)
    for window, reference in zip(WINDOWS, expected, strict=True):
        model.zero_grad()
        # Only the last window is shared with dummies, and they carry routed tokens of their own: none counted.
        mine = share(window, rank, ranks)
        if router == "routed" and len(window) % ranks:
            continue
        # One rank counts on the host, the other on the device: the sums are the same.
        run_window(kit, model, mine, counted=counted, router=router, weighted=weighted, as_tensors=rank == 1)
        stats = kit.reduce_window()
        kit.rescale_gradients(model.parameters(), stats)
        kit.reset()
        worst = max(worst, relative_error(gradients(model), reference))
    return worst


def per_rank_divisor(rank: int, ranks: int) -> float:
    """Planted mistake: each rank divides by its own tokens, so the mean over ranks is a mean of means."""
    model, window = ddp(ToyLM()), share(WINDOWS[0], rank, ranks)
    tokens = sum(batch.supervised for batch in window)
    for batch in window:
        (model(batch)[0].sum() / tokens).backward()
    return relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0])


def forgotten_averaging(rank: int, ranks: int) -> float:
    """Planted mistake: the wrapper averages, the kit is told that it sums."""
    kit, model = TokenNormedLossKit("cpu", ranks, averaging_factor=1), ddp(ToyLM())
    run_window(kit, model, share(WINDOWS[0], rank, ranks))
    kit.rescale_gradients(model.parameters(), kit.reduce_window())
    return relative_error(gradients(model), reference_gradients(WINDOWS[:1])[0])


def collectives(rank: int, ranks: int, counted: bool) -> int:
    kit, model = TokenNormedLossKit("cpu", ranks), ToyLM()
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce:
        run_window(kit, model, share(WINDOWS[0], rank, ranks), counted=counted, router="tokens")
        kit.rescale_gradients(model.parameters(), kit.reduce_window())
        kit.reset()
    return reduce.call_count


def complaint(action: Callable[[], object]) -> str:
    try:
        action()
    except TokenNormError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def window_of(rank: int, ranks: int, kit_options: dict[str, Any], **changed: Any) -> str:
    """One micro-batch per rank, reduced: what the kit says about it."""
    kit = TokenNormedLossKit("cpu", ranks, **kit_options)
    loss = torch.tensor(1.0, requires_grad=True)

    def window() -> None:
        kit.accumulate_microbatch(**{"loss_sum": loss, "effective_tokens": 1, "total_tokens": 2, **changed})
        kit.reduce_window()

    return complaint(window)


def disagreements(rank: int, ranks: int) -> dict[str, str]:
    def term(weight: float = 1.0) -> LossTerm:
        return LossTerm(numerator=torch.tensor(1.0, requires_grad=True), denominator=1, weight=weight)

    first = rank == 0
    found = {
        "divisor": window_of(rank, ranks, {}, backward_divisor=8 if first else 16),
        "divisor given or not": window_of(rank, ranks, {}, backward_divisor=8 if first else None),
        "terms": window_of(rank, ranks, {}, extra_terms={"z": term()} if first else {}),
        "many terms": window_of(rank, ranks, {}, extra_terms={f"z{i}": term() for i in range(9 if first else 8)}),
        "declared terms": window_of(
            rank, ranks, {"extra_terms": ("z",)}, extra_terms={"z": term()} if first else {}
        ),
        "weights": window_of(rank, ranks, {}, extra_terms={"z": term(1.0 if first else 2.0)}),
        "policy": window_of(rank, ranks, {"empty_window": "raise" if first else "skip"}),
        "averaging": window_of(rank, ranks, {"averaging_factor": 2 if first else 1}),
        "bad count elsewhere": window_of(rank, ranks, {}, effective_tokens=torch.tensor(-1 if first else 1)),
        "world size": complaint(lambda: TokenNormedLossKit("cpu", ranks + 1)),
        "world size 1": complaint(lambda: TokenNormedLossKit("cpu", 1)),
    }
    kit = TokenNormedLossKit("cpu", ranks)
    found["mode"] = complaint(lambda: kit.begin_window({"loss": 1}) if first else kit.reduce_window())
    kit = TokenNormedLossKit("cpu", ranks)
    kit.begin_window({"loss": 2 if first else 1})
    found["announced elsewhere"] = complaint(
        lambda: (
            kit.accumulate_microbatch(
                loss_sum=torch.tensor(1.0, requires_grad=True), effective_tokens=1, total_tokens=2
            ),
            kit.reduce_window(),
        )
    )
    lonely = [dist.new_group([0]), dist.new_group([1])]
    found["not a member"] = complaint(lambda: TokenNormedLossKit("cpu", 1, lonely[1 - rank]))
    found["own group"] = complaint(lambda: TokenNormedLossKit("cpu", 1, lonely[rank]))
    return found


def empty_windows(rank: int, ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for policy in ("raise", "skip"):
        kit, model = TokenNormedLossKit("cpu", ranks, empty_window=policy), ddp(ToyLM())
        run_window(kit, model, [DUMMY])
        try:
            stats = kit.reduce_window()
        except EmptyWindowError:
            found[policy] = "raised"
        else:
            kit.rescale_gradients(model.parameters(), stats)
            found[policy] = (stats.skipped, stats.gradient_scale)
        kit.reset()
        # One rank without tokens is no empty window.
        run_window(kit, model, [WINDOWS[0][0] if rank == 0 else DUMMY])
        found[f"{policy}, then one rank"] = kit.reduce_window().global_effective_tokens
    # A rank without any micro-batch may still take part in an evaluation.
    kit = TokenNormedLossKit("cpu", ranks)
    with torch.no_grad():
        if rank == 0:
            kit.accumulate_microbatch(loss_sum=torch.tensor(6.0), effective_tokens=3, total_tokens=3)
        found["evaluation"] = kit.reduce_window().mean_loss
    return found


def divisors(rank: int, ranks: int) -> list[tuple[float, int | float]]:
    kit, model, found = TokenNormedLossKit("cpu", ranks), ToyLM(), []
    for window in WINDOWS[:2]:
        run_window(kit, model, share(window, rank, ranks))
        stats = kit.reduce_window()
        found.append((stats.backward_divisor, stats.global_effective_tokens))
        kit.reset(discard=True)
    return found


def half_precision_shards(rank: int, ranks: int) -> list[bool]:
    """bfloat16 DTensor gradients: the exact product, rounded once."""
    kit, model = TokenNormedLossKit("cpu", ranks), fsdp(ToyLM(torch.bfloat16))
    run_window(kit, model, share(WINDOWS[0], rank, ranks))
    stats, before = kit.reduce_window(), gradients(model)
    kit.rescale_gradients(model.parameters(), stats)
    exact = [(gradient * stats.gradient_scale).bfloat16().double() for gradient in before]
    return [torch.equal(a, b) for a, b in zip(gradients(model), exact, strict=True)]


def everything(rank: int, ranks: int) -> dict[str, Any]:
    errors = {
        (name, str(dtype), mode): train_windows(rank, ranks, wrap, dtype, mode)
        for name, wrap in WRAPPERS.items()
        for dtype in (torch.float64, torch.float32)
        for mode in MODES
    }
    return {
        "errors": errors,
        "mistakes": (per_rank_divisor(rank, ranks), forgotten_averaging(rank, ranks)),
        "collectives": (collectives(rank, ranks, False), collectives(rank, ranks, True)),
        "disagreements": disagreements(rank, ranks),
        "empty": empty_windows(rank, ranks),
        "divisors": divisors(rank, ranks),
        "half": half_precision_shards(rank, ranks),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return [result.value for result in spawn_ranks(everything, 2)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_are_those_of_one_process(
    found: list[dict[str, Any]], wrapper: str, dtype: torch.dtype, mode: tuple[bool, Any, bool]
) -> None:
    floor = 1e-14 if dtype == torch.float64 else 5e-7
    assert all(0 < rank["errors"][wrapper, str(dtype), mode] < floor for rank in found)


def test_the_comparison_catches_planted_mistakes(found: list[dict[str, Any]]) -> None:
    assert all(error > 1e-2 for rank in found for error in rank["mistakes"])


def test_one_collective_per_window_and_one_more_when_counted(found: list[dict[str, Any]]) -> None:
    assert [rank["collectives"] for rank in found] == [(1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("divisor", "the ranks divided by different numbers"),
        ("divisor given or not", "1 of 2 ranks gave a `backward_divisor`"),
        ("terms", "disagree about its setup"),
        ("many terms", "disagree about its setup"),
        ("declared terms", "nothing"),
        ("weights", "gave the extra term 'z' different weights"),
        ("policy", "disagree about its setup"),
        ("averaging", "disagree about its setup"),
        ("mode", "disagree about its setup"),
        ("bad count elsewhere", "1 times over all ranks: counts given as tensors"),
        ("announced elsewhere", "1 times over all ranks: denominators accumulated on a rank differ"),
        ("world size", "dp_world_size is 3, but the default group has 2 ranks"),
        ("world size 1", "dp_world_size is 1, but the default group has 2 ranks"),
        ("not a member", "not a member of dp_group"),
        ("own group", "nothing"),
    ],
)
def test_every_rank_hears_of_a_disagreement(found: list[dict[str, Any]], case: str, message: str) -> None:
    assert all(message in rank["disagreements"][case] for rank in found)


def test_empty_windows_are_the_same_on_all_ranks(found: list[dict[str, Any]]) -> None:
    expected = {
        "raise": "raised",
        "skip": (True, 0),
        "raise, then one rank": 33,
        "skip, then one rank": 33,
        "evaluation": 2.0,
    }
    assert [rank["empty"] for rank in found] == [expected, expected]


def test_the_default_divisor_does_not_depend_on_the_rank(found: list[dict[str, Any]]) -> None:
    # 58 tokens over two ranks: 29 each, hence 32, although one rank had 33 and the other 25.
    assert [rank["divisors"] for rank in found] == [[(1024, 58), (32, 63)]] * 2


def test_half_precision_shards_are_rounded_once(found: list[dict[str, Any]]) -> None:
    assert [rank["half"] for rank in found] == [[True] * 4] * 2
