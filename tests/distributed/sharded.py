"""The windows of ``exactness``, trained by the Engine on split models; run on each rank by ``test_sharded``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed.exactness import (
    VOCABULARY,
    Layout,
    batches_of,
    by_definition,
    definition_loss,
    make_model,
    relative_error,
    window_samples,
)
from tokennorm.data import Batch, Sample, collate_padded
from tokennorm.engine import (
    AutocastObjective,
    CausalLMObjective,
    DistributedConfig,
    Engine,
    OptimConfig,
    Runtime,
    build_optimizer,
    build_scaler,
    evaluate,
    wrap_model,
)
from tokennorm.engine.sharding import decoder_blocks, shard_mesh
from tokennorm.kit import TokenNormedLossKit
from tokennorm.recipes.sft.config import ModelConfig, SftConfig
from tokennorm.recipes.sft.modelling import adapt

LAYOUT = Layout(
    micro_batches=3, unsupervised_rank=True, packed=True, chunk_size=3, counted=False, dtype=torch.float64
)

STRATEGIES = {
    "FSDP2": DistributedConfig(strategy="fsdp"),
    "FSDP2, head apart, gradients split": DistributedConfig(
        strategy="fsdp", head_unit="own", accumulate="sharded"
    ),
    "HSDP 2x2, gradients split": DistributedConfig(strategy="hsdp", shard_ranks=2, accumulate="sharded"),
    "HSDP 2x2, head apart": DistributedConfig(strategy="hsdp", shard_ranks=2, head_unit="own"),
}

CHECKPOINTED = SftConfig(model=ModelConfig(gradient_checkpointing=True))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One window through the Engine on one rank.

    Attributes:
        error: global relative L2 error of the gradient against the float64 definition.
        norm_error: relative error of the reported gradient norm.
        tokens: supervised tokens that were counted.
    """

    error: float
    norm_error: float
    tokens: float


class KeepsGradients(torch.optim.SGD):
    """Keeps what reaches the optimizer, put together again, and moves nothing."""

    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.seen = [None if p.grad is None else full(p.grad).clone() for p in parameters]


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def build(
    rank: int, world_size: int, config: DistributedConfig, plain: nn.Module, **options: Any
) -> tuple[Engine, KeepsGradients]:
    """An engine around a copy of ``plain``; every rank but the first begins with other weights.

    ``options`` are the engine's, and ``change``: what is done to the copy before it is split.
    """
    kit = options.pop("kit", None) or TokenNormedLossKit("cpu", world_size)
    model = kit.apply_chunked_token_loss_patch(copy.deepcopy(plain), chunk_size=3)
    options.pop("change", lambda _: None)(model)
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size)
    wrapped = wrap_model(model, runtime, config, param_dtype=options.pop("param_dtype", None))
    optimizer = KeepsGradients([p for p in wrapped.parameters() if p.requires_grad], lr=1.0)
    options = {"objective": CausalLMObjective(), "max_grad_norm": None, **options}
    return Engine(
        model=wrapped, optimizer=optimizer, dp_world_size=world_size, token_loss_kit=kit, **options
    ), optimizer


def measure(
    engine: Engine, optimizer: KeepsGradients, batches: list[Batch], truth: list[Tensor], *, max_norm: float | None
) -> Case:
    report = engine.train_step(batches)
    norm = torch.stack([gradient.norm() for gradient in truth]).norm()
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (float(norm) + 1e-6))
    assert report.grad_norm is not None
    return Case(
        error=relative_error([g for g in optimizer.seen if g is not None], [g * factor for g in truth]),
        norm_error=abs(report.grad_norm - float(norm)) / float(norm),
        tokens=report.effective_tokens,
    )


def strategies(rank: int, world_size: int) -> dict[str, Any]:
    """Each strategy over a full and a short window; what each wrapper divides by; a wrong declaration."""
    found: dict[str, Any] = {}
    plain = make_model()
    windows = {short: batches_of(LAYOUT, world_size, rank, short=short) for short in (False, True)}
    truths = {short: by_definition(plain, samples, torch.float64) for short, (_, samples) in windows.items()}
    for name, config in STRATEGIES.items():
        engine, optimizer = build(rank, world_size, config, plain)
        found[name, "averaging"] = engine.token_loss_kit.measure_averaging(engine.model)
        units = [part for part in engine.model.modules() if isinstance(part, FSDPModule)]
        found[name, "units"] = (len(units), all(isinstance(p, DTensor) for p in engine.model.parameters()))
        for short, (batches, _) in windows.items():
            engine.max_grad_norm = 0.5 if short else None
            case = measure(engine, optimizer, batches, truths[short], max_norm=engine.max_grad_norm)
            found[name, "short, clipped" if short else "full"] = case
    # The planted mistake: an average over the shards of one replica only.
    kit = TokenNormedLossKit("cpu", world_size, averaging_factor=2.0)
    engine, optimizer = build(rank, world_size, STRATEGIES["HSDP 2x2, head apart"], plain, kit=kit)
    found["mistake"] = measure(engine, optimizer, windows[False][0], truths[False], max_norm=None)
    return found


def lonely_token(rank: int, world_size: int) -> Case:
    """A head in its own unit, one supervised token on one rank and a thousand on each of the others."""
    plain, samples = make_model(), lonely_samples(world_size)
    engine, optimizer = build(rank, world_size, STRATEGIES["HSDP 2x2, head apart"], plain)
    batch = collate_padded([samples[rank]], pad_token_id=0)
    return measure(engine, optimizer, [batch], by_definition(plain, samples, torch.float64), max_norm=None)


def lonely_samples(world_size: int) -> list[Sample]:
    """One supervised token for rank 0, a thousand for each other rank."""
    samples = []
    for owner in range(world_size):
        size = (2 if owner == 0 else 1001,)
        ids = torch.randint(1, VOCABULARY, size, generator=torch.Generator().manual_seed(owner))
        samples.append(Sample(input_ids=ids, supervised=torch.ones_like(ids) > 0, source=f"rank {owner}"))
    return samples


def tied(rank: int, world_size: int) -> tuple[int, float]:
    """A head that is the embedding: both stay in the root unit. The number of units, and the error."""
    plain: Any = make_model()
    plain.lm_head.weight = plain.model.embed_tokens.weight
    plain.config.tie_word_embeddings = True
    engine, optimizer = build(rank, world_size, STRATEGIES["FSDP2, head apart, gradients split"], plain)
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    case = measure(engine, optimizer, batches, by_definition(plain, samples, torch.float64), max_norm=None)
    return sum(isinstance(part, FSDPModule) for part in engine.model.modules()), case.error


def held_out(rank: int, world_size: int) -> tuple[float, float, bool]:
    """Evaluation where rank r holds r batches: the loss, the right one, and whether the model stays split."""
    plain = make_model()
    windows = window_samples(LAYOUT, world_size, short=False)
    rows = [
        [[sample for row in batch for sample in row] for batch in windows[owner][:owner]] for owner in range(4)
    ]
    engine, _ = build(rank, world_size, STRATEGIES["FSDP2"], plain)
    report = evaluate(engine.model, engine.objective, [collate_padded(one, pad_token_id=0) for one in rows[rank]])
    split = all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
    assert report.loss is not None
    return report.loss, definition_loss(plain, [one for mine in rows for batch in mine for one in batch]), split


def mixed_clipping(rank: int, world_size: int) -> tuple[float, float, float, list[float]]:
    """Plain gradients, and DTensors of two meshes and of two dtypes: norm, the right one, and clipped."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from tokennorm.engine import clip_gradients

    meshes = [init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (2, world_size // 2))]
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    values.append(torch.randn(7, generator=generator).bfloat16())
    tensors = [values[0], distribute_tensor(values[1], meshes[0], [Shard(0)])]
    tensors += [distribute_tensor(value, meshes[1], [Replicate(), Shard(0)]) for value in values[2:]]
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    want = float(torch.stack([value.double().norm() for value in values]).norm())
    measured = float(clip_gradients(parameters, None))
    norm = float(clip_gradients(parameters, 0.25))
    clipped = [
        float(full(p.grad).double().norm()) / float(v.double().norm())
        for p, v in zip(parameters, values, strict=True)
    ]
    return measured, norm, want, [ratio * want for ratio in clipped]


def half_precision(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """Error in half precision, float32 weights and reduction, and that of a naive loop in the same precision."""
    plain = make_model()
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    truth = by_definition(plain, samples, torch.float64)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        naive = {"DDP": naive_autocast(plain, samples, dtype), "FSDP2": by_definition(plain, samples, dtype)}
        for strategy, config in {"DDP": DistributedConfig(), "FSDP2": STRATEGIES["FSDP2"]}.items():
            objective = AutocastObjective(CausalLMObjective(), dtype)
            small = adapt(copy.deepcopy(plain).float(), CHECKPOINTED)
            options = {"objective": objective, "scaler": build_scaler(dtype, "cpu"), "param_dtype": dtype}
            engine, optimizer = build(rank, world_size, config, small, **options)
            engine.model.train()
            case = measure(engine, optimizer, batches, truth, max_norm=None)
            found[f"{strategy} {name}"] = (case.error, relative_error(naive[strategy], truth))
    return found


def naive_autocast(model: nn.Module, samples: list[Sample], dtype: torch.dtype) -> list[Tensor]:
    """As ``by_definition``, float32 under autocast."""
    model = copy.deepcopy(model).float()
    count = sum(int((sample.shift_labels() != -100).sum()) for sample in samples)
    for sample in samples:
        with torch.autocast("cpu", dtype=dtype):
            logits = model(input_ids=sample.input_ids.unsqueeze(0)).logits[0]
        (F.cross_entropy(logits.float(), sample.shift_labels(), reduction="sum") / count).backward()
    return [full(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def infinity_in_one_part(rank: int, world_size: int) -> tuple[Any, float, int, float | None]:
    """An infinity that the rescale makes in one rank's part of a gradient, which no scaler looks for."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    engine, _ = build(rank, world_size, STRATEGIES["FSDP2"], make_model().float(), scaler=scaler)
    batches, _ = batches_of(LAYOUT, world_size, rank, short=True)
    rescale = engine.token_loss_kit.rescale_gradients

    def broken(parameters: Any, stats: Any) -> None:
        parameters = list(parameters)
        rescale(parameters, stats)
        if rank == 1:
            parameters[0].grad.to_local().fill_(torch.inf)

    engine.token_loss_kit.rescale_gradients = broken  # type: ignore[method-assign]
    skipped = engine.train_step(batches)
    engine.token_loss_kit.rescale_gradients = rescale  # type: ignore[method-assign]
    report = engine.train_step(batches)
    return skipped.skipped, scaler.get_scale(), engine.step, report.grad_norm


def plain_head(rank: int, world_size: int) -> dict[str, Any]:
    """float16 autocast on a split model whose head is left whole, its gradient averaged by the loop.

    Then an infinity in one rank's part of a split gradient, and one in one rank's whole gradient.
    """
    plain: Any = make_model()
    batches, samples = batches_of(LAYOUT, world_size, rank, short=False)
    truth = by_definition(plain, samples, torch.float64)
    naive = relative_error(naive_autocast(plain, samples, torch.float16), truth)
    kit = TokenNormedLossKit("cpu", world_size)
    model: Any = kit.apply_chunked_token_loss_patch(copy.deepcopy(plain).float(), chunk_size=3)
    mesh = shard_mesh(Runtime(rank=rank, world_size=world_size))
    head = list(model.lm_head.parameters())
    for block in decoder_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(head))
    inner = CausalLMObjective()

    def objective(model: nn.Module, batch: Batch) -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return inner(model, batch)

    broken: list[tuple[int, nn.Parameter]] = []

    def average_and_break() -> None:
        for parameter in head:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        for owner, parameter in broken:
            if owner == rank:
                assert parameter.grad is not None
                gradient = parameter.grad
                (gradient.to_local() if isinstance(gradient, DTensor) else gradient).view(-1)[0] = torch.inf

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = KeepsGradients(model.parameters(), lr=1.0)
    engine = Engine(
        model=model,
        optimizer=optimizer,
        objective=objective,
        scaler=scaler,
        dp_world_size=world_size,
        token_loss_kit=kit,
        max_grad_norm=None,
        after_reduce=average_and_break,
    )
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    found: dict[str, Any] = {"kinds": kinds, "naive": naive}
    found["case"] = measure(engine, optimizer, batches, truth, max_norm=None)
    split = next(parameter for parameter in model.parameters() if isinstance(parameter, DTensor))
    for name, parameter in {"split": split, "whole": head[0]}.items():
        broken[:] = [(1, parameter)]
        found[name] = (engine.train_step(batches).skipped, scaler.get_scale(), engine.step)
    broken.clear()
    # The recipes' optimizer takes both kinds as well.
    engine.optimizer = build_optimizer(model, OptimConfig())
    found["again"] = (engine.train_step(batches).skipped, scaler.get_scale(), engine.step)
    return found


CHECKS: dict[str, Callable[[int, int], Any]] = {
    "strategies": strategies,
    "lonely token": lonely_token,
    "tied": tied,
    "held out": held_out,
    "mixed clipping": mixed_clipping,
    "half precision": half_precision,
    "infinity": infinity_in_one_part,
    "plain head": plain_head,
}


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """All checks in one spawn: starting the processes costs more than they do."""
    from tests.distributed import sharded_compiled, sharded_lora

    checks = {**CHECKS, "adapters": sharded_lora.everything, "compiled": sharded_compiled.everything}
    return {name: check(rank, world_size) for name, check in checks.items()}
