"""Give a model the attention of ``varlen.py``, once it was seen to compute what the model's own attention does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.errors import PatchError
from tokennorm.kit.document_attention import by_kernel, each_document, kernel_serves
from tokennorm.kit.document_layout import DocumentLayout
from tokennorm.kit.patch_target import unwrapped
from tokennorm.kit.varlen import (
    VARLEN_ATTENTION,
    AttentionShape,
    AttentionWatch,
    register_varlen_attention,
    watched,
)

__all__ = ["use_varlen_attention"]

# Documents of the two rows that the check runs on.
_ROWS = ((1, 4, 7), (5, 6, 1))
_KERNEL_WINDOW = 3
_FIX = 'leave its attention as it is, or choose another: model.set_attn_implementation("sdpa") or "eager"'


def use_varlen_attention(
    model: Any,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    require_kernel: bool = False,
    compare: bool = True,
) -> Any:
    """Let packed rows attend inside their documents only, without a square mask.

    Documents begin where ``position_ids`` start anew, and there must be no ``attention_mask`` and no cache; any
    other forward pass (padded rows, generation) is computed as with ``sdpa``. On CUDA (Ampere or later) in half
    precision it is one call of ``torch.nn.attention.varlen`` per layer, elsewhere one of
    ``scaled_dot_product_attention`` per run of documents of equal length. Once per forward pass and kind of mask
    the host waits for the device, right after transformers did.

    Grouped heads, any scale, sliding windows and chunks are computed. Dropout on the weights, softcaps, sinks,
    biases and layers that see later tokens are refused: here where the layers show it, and in the forward pass at
    the latest. The model runs on 24 tokens, and its logits must be those it had before.

    Call it before DDP and ``fully_shard``, on a model that is not compiled. What ``save_pretrained`` writes does
    not name the attention.

    Args:
        model: a model of transformers 5, perhaps with adapters.
        device: where training will compute, if the model is not there yet.
        dtype: what training will compute in, if not in the dtype of the weights (autocast).
        require_kernel: refuse a model, device or dtype that the kernel does not take.
        compare: False leaves the check out; for a rank without weights, where another rank makes it.

    Returns:
        The same ``model``.

    Raises:
        PatchError: the model's attention can't be chosen, or is not this one, or the kernel is wrong on
            ``device``. The model keeps the attention it had.
        MissingDependencyError: transformers is not installed.
    """
    register_varlen_attention()
    inner = unwrapped(model)
    _check_choosable(inner)
    if not compare:
        inner.set_attn_implementation(VARLEN_ATTENTION)
        return model
    before = {id(config): (config, config._attn_implementation) for config in _configs(inner)}
    try:
        shapes = _compare(inner)
        parameter = next(inner.parameters())
        where = torch.device(parameter.device if device is None else device)
        _check_kernel(shapes, where, dtype or parameter.dtype, required=require_kernel)
    except BaseException:
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation
        raise
    return model


def _check_choosable(model: Any) -> None:
    name = type(model).__name__
    if not callable(getattr(model, "set_attn_implementation", None)) or not model._can_set_attn_implementation():
        raise PatchError(
            f"the attention of {name} can't be chosen",
            why="it is not called through transformers' AttentionInterface, so a square mask is what it gets",
            fix="leave its attention as it is",
        )
    if not getattr(model, "_supports_sdpa", False):
        raise PatchError(
            f"{name} does not support sdpa",
            why="its attention does more than plain causal attention, which would be left out",
            fix='leave its attention as it is ("eager")',
        )
    if any(getattr(it, "_compiled_call_impl", None) is not None for it in model.modules()):
        raise PatchError(f"{name} is compiled", fix="choose its attention first, then compile")


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every configuration that names an attention; some more than once."""
    named: list[Any] = [getattr(it, "config", None) for it in model.modules()]
    waiting = [config for config in named if hasattr(config, "_attn_implementation")]
    while waiting:
        config = waiting.pop()
        yield config
        waiting += [sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None]


def _compare(model: Any) -> set[AttentionShape]:
    """Switch over, and compare logits of packed rows with those of before; return what the layers compute."""
    name = type(model).__name__
    with _as_in_evaluation(model), torch.no_grad(), torch.random.fork_rng():
        watch = AttentionWatch()
        token = watched.set(watch)
        try:
            if model.config._attn_implementation == VARLEN_ATTENTION:
                # Chosen before: it is not compared with itself.
                model.set_attn_implementation("sdpa")
            want = _logits(model)
            model.set_attn_implementation(VARLEN_ATTENTION)
            got = _logits(model)
            # In training mode a layer says how much dropout it wants, and is refused.
            for module in watch.modules:
                module.training = True
            _logits(model)
        except PatchError:
            raise
        except Exception as error:
            raise PatchError(
                f"{name} can't run on packed rows with this attention: {type(error).__name__}: {error}", fix=_FIX
            ) from error
        finally:
            watched.reset(token)
    if watch.elsewhere or not watch.modules:
        calls = watch.elsewhere + len(watch.modules)
        raise PatchError(
            f"{watch.elsewhere} of {calls} calls of {name}'s attention on packed rows would use a square mask"
            if calls
            else f"no layer of {name} attends through transformers' AttentionInterface",
            why="only masks that are causal inside documents, and nothing else, can do without",
            fix=_FIX,
        )
    if watch.unknown:
        raise PatchError(
            f"the attention of {name} is given {', '.join(sorted(watch.unknown))}, which is not known here",
            fix=_FIX,
        )
    error, tolerance = _distance(got, want), _tolerance(want.dtype)
    # "not <=": a NaN is a difference.
    if not error <= tolerance:
        raise PatchError(
            f"with variable-length attention {name}'s logits differ by {error:.1e} of their norm (allowed: "
            f"{tolerance:.0e})",
            why="it would train another model",
            fix=_FIX,
        )
    return watch.shapes


@contextmanager
def _as_in_evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _logits(model: Any) -> Tensor:
    device = next(model.parameters()).device
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    length = sum(_ROWS[0])
    ids = (torch.arange(len(_ROWS) * length).view(len(_ROWS), length) * 7919 + 3) % vocabulary
    positions = torch.stack([torch.cat([torch.arange(it) for it in row]) for row in _ROWS])
    # Not a patched model's losses: without labels a model gives logits.
    return model(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False).logits


def _check_kernel(
    shapes: Iterable[AttentionShape], device: torch.device, dtype: torch.dtype, *, required: bool
) -> None:
    """Compare the kernel with the definition, forward and backward, on random tokens of the model's shapes."""
    for shape in shapes:
        if not kernel_serves(device, dtype, shape.head_dim, shape.value_dim):
            if required:
                raise PatchError(
                    f"PyTorch's variable-length kernel does not take {dtype} heads of {shape.head_dim} (value: "
                    f"{shape.value_dim}) on {device}",
                    fix="it takes half precision and heads of up to 256 in steps of 8, on CUDA, Ampere or later",
                )
            continue
        for window in (None, _KERNEL_WINDOW):
            error = kernel_error(shape, window, device, dtype)
            if not error <= _tolerance(dtype):
                raise PatchError(
                    f"PyTorch's variable-length kernel is off by {error:.1e} on {device}: {shape}, {window=}",
                    why="training would follow another model's gradients",
                    fix=_FIX,
                )


def kernel_error(shape: AttentionShape, window: int | None, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative difference of the kernel's output and gradients from the definition in float32."""
    lengths = tuple(length for row in _ROWS for length in row)
    rows = (len(_ROWS), sum(_ROWS[0]))
    layout = DocumentLayout.of(lengths, shape=rows, window=window, device=device)
    generator = torch.Generator().manual_seed(20240229)
    sizes = [(shape.heads, shape.head_dim), (shape.key_heads, shape.head_dim), (shape.key_heads, shape.value_dim)]
    drawn = [torch.randn(sum(lengths), *it, generator=generator).to(device, dtype) for it in sizes]
    upstream = torch.randn(sum(lengths), shape.heads, shape.value_dim, generator=generator).to(device, dtype)
    results = []
    ways: tuple[tuple[Any, torch.dtype], ...] = ((by_kernel, dtype), (each_document, torch.float32))
    for attend, wide in ways:
        leaves = [it.detach().to(wide).requires_grad_() for it in drawn]
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            query, key, value = leaves
            out = attend(query, key, value, layout, shape.scale)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(wide))])
    # The kernel's, and the definition's.
    return max(_distance(got, want) for got, want in zip(*results, strict=True))


def _distance(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
