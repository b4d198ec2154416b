"""The patch under DDP and FSDP2: ranks with different token counts, one of them without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tokennorm.testing import spawn_ranks

V, D, B, S = 61, 16, 2, 8


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, **sizes, initializer_range=0.3)).double()


def batch_of(rank: int) -> dict[str, torch.Tensor]:
    """Rank 1 has nothing supervised, the others different numbers of tokens."""
    input_ids = torch.randint(3, V, (B, S), generator=torch.Generator().manual_seed(rank))
    labels = input_ids.clone()
    labels[:, : 2 + 3 * rank] = -100
    if rank == 1:
        labels.fill_(-100)
    return {"input_ids": input_ids, "labels": labels}


def expected_gradients(world_size: int) -> dict[str, torch.Tensor]:
    """Of the sum of all ranks' token losses, divided by the ranks as the wrappers do."""
    model = llama()
    for rank in range(world_size):
        inputs = batch_of(rank)
        logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
        targets = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].flatten()
        (F.cross_entropy(logits, targets, reduction="sum") / world_size).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_error(model: nn.Module, world_size: int) -> float:
    expected = expected_gradients(world_size)
    errors = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        want = expected[name.removeprefix("module.")]
        errors.append(float((full - want).abs().max() / want.abs().max()))
    return max(errors)


def ddp(rank: int, world_size: int, wrap_first: bool) -> dict[str, Any]:
    from torch.nn.parallel import DistributedDataParallel

    from tokennorm.kit import apply_chunked_token_loss_patch

    if wrap_first:
        model = apply_chunked_token_loss_patch(DistributedDataParallel(llama()), chunk_size=3)
    else:
        model = DistributedDataParallel(apply_chunked_token_loss_patch(llama(), chunk_size=3))
    outputs = model(**batch_of(rank))
    outputs.loss.sum().backward()
    return {"error": largest_error(model, world_size), "shape": outputs.loss.shape, "extra": outputs.extra_loss}


def fsdp(rank: int, world_size: int, order: str, dense: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from tokennorm.kit import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch

    mesh = init_device_mesh("cpu", (world_size,))
    if order == "on the meta device":
        with torch.device("meta"):
            model = llama()
    else:
        model = llama()
    before = type(model).__name__
    if order != "sharded before the patch":
        apply_chunked_token_loss_patch(model, chunk_size=3)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    # The head is a unit of its own: entering it twice on one rank alone would hang.
    fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if order == "sharded before the patch":
        apply_chunked_token_loss_patch(model, chunk_size=3)
    if order == "on the meta device":
        whole = llama()
        model.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            local = torch.distributed.tensor.distribute_tensor(whole.get_parameter(name).detach(), mesh)
            parameter.data.copy_(local)
        for name, buffer in whole.named_buffers():
            model.get_buffer(name).copy_(buffer)
    entered = []
    handle = model.lm_head.register_forward_pre_hook(lambda *_: entered.append(1))
    if order == "on the meta device":
        # The probe runs inside the first forward.
        model(**batch_of(rank))
        entered.clear()
    losses = model(**batch_of(rank)).loss
    handle.remove()
    # A product makes the upstream gradient dense: the operator then computes its chunks again in backward.
    (losses * torch.ones_like(losses) if dense else losses).sum().backward()
    error = largest_error(model, world_size)
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    remove_chunked_token_loss_patch(model)
    unpatched = model(**batch_of(0)).loss
    return {
        "error": error,
        "entered": len(entered),
        "sharded": sharded,
        "mean": unpatched.dim(),
        "name": type(model).__name__ in (before, f"FSDP{before}"),
    }


DDP = {"DDP around the patch": False, "patch through DDP": True}
FSDP = {
    "patched, then sharded": ("patched first", False),
    "patched, then sharded, dense upstream": ("patched first", True),
    "sharded, then patched": ("sharded before the patch", False),
    "on the meta device": ("on the meta device", False),
}


def everything(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """All cases in one pair of processes: starting them costs more than running them."""
    done = {name: ddp(rank, world_size, wrap_first) for name, wrap_first in DDP.items()}
    return done | {name: fsdp(rank, world_size, *case) for name, case in FSDP.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Any]]]:
    return [result.value for result in spawn_ranks(everything, 2)]


@pytest.mark.parametrize("case", DDP)
def test_ddp(ranks, case):
    for results in ranks:
        assert results[case]["error"] < 1e-12
        assert results[case]["shape"] == (B * S,)
        assert results[case]["extra"] is None


@pytest.mark.parametrize("case", FSDP)
def test_fsdp2_with_a_head_of_its_own(ranks, case):
    for results in ranks:
        assert results[case]["error"] < 1e-12
        assert results[case]["entered"] == 1
        assert results[case]["sharded"]
        # After the removal.
        assert results[case]["mean"] == 0
        assert results[case]["name"]
