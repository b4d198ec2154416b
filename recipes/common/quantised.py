"""Frozen weights in 4 bits (QLoRA's NF4, by bitsandbytes): loading, checking and decoding them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.errors import ConfigError, MissingDependencyError

__all__ = ["decode_nf4", "keep_frozen", "nf4_settings", "quantised_layers", "require_true_decoding"]

# What rounding to a half precision leaves of a decoded weight; a wrong decoding is off by a tenth and more.
_ROUNDING = 0.01


def nf4_settings(compute_dtype: torch.dtype) -> Any:
    """Return what transformers is to be told: NF4 in blocks of 64, their scales in 8 bits (Dettmers et al. 2023,
    QLoRA, sections 3.1 and 3.2).

    Args:
        compute_dtype: of the products; weights are decoded to it each time.

    Raises:
        MissingDependencyError: bitsandbytes or accelerate is not installed.
    """
    try:
        import accelerate  # noqa: F401
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise MissingDependencyError(
            f"a base in 4 bits needs {error.name}", fix='install it: pip install "tokennorm[qlora]"'
        ) from error
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def quantised_layers(model: nn.Module) -> dict[str, Any]:
    """Return name -> linear layer of those with weights in 4 bits; an adapter's wrapper is not in the name."""
    return {
        name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None
        and not hasattr(module, "base_layer")
    }


def keep_frozen(model: nn.Module) -> None:
    """Forbid bitsandbytes to pack the weights anew on their first use in evaluation.

    It does so on CPUs with AVX512-BF16, to be faster, and rounds the scales to bfloat16 for good: an evaluation in
    between would change the model that is trained.
    """
    for layer in quantised_layers(model).values():
        layer.support_avx512bf16_for_cpu = False


def decode_nf4(weight: Any) -> Tensor:
    """Return the float32 ``[out, in]`` weight that a bitsandbytes ``Params4bit`` stands for, by the definition.

    Two codes in a byte, the first one in the high bits; each is the index of a value in [-1, 1], multiplied by the
    scale of its block of consecutive weights.
    """
    from bitsandbytes.functional import dequantize_blockwise

    state = weight.quant_state
    packed = weight.detach().reshape(-1).view(torch.uint8)
    count = math.prod(state.shape)
    codes = torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1)[:count]
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
    values = state.code.float()[codes.long()]
    return (values * scales.float().repeat_interleave(state.blocksize)[:count]).reshape(state.shape)


def require_true_decoding(model: nn.Module) -> None:
    """Compare what bitsandbytes computes with the definition, once for each shape of layer in ``model``.

    (bitsandbytes 0.50 decodes wrongly on CPUs where a layer's inputs are no multiple of 64, and says nothing.)

    Args:
        model: quantised, on the device that will compute.

    Raises:
        ConfigError: they differ, or it fails, naming the layer.
    """
    seen = set()
    for name, layer in quantised_layers(model).items():
        shape = tuple(layer.weight.quant_state.shape)
        if shape in seen:
            continue
        seen.add(shape)
        where = f"{name} ({shape[0]} x {shape[1]})"
        fix = "train the adapters on a base in half precision (--model.dtype bfloat16)"
        try:
            difference = _difference(layer)
        except RuntimeError as error:
            raise ConfigError(f"bitsandbytes can't compute {where} on this device: {error}", fix=fix) from error
        if not difference < _ROUNDING:
            raise ConfigError(
                f"bitsandbytes computes {where} with weights {difference:.0%} off",
                why="on this device it decodes 4-bit weights of that shape wrongly, so the model would be another",
                fix=fix,
            )


def _difference(layer: Any) -> float:
    """Relative, between the weights that the layer computes with and those of the definition."""
    truth = decode_nf4(layer.weight)
    # Called as it will be, on the first rows of the identity.
    rows = min(64, truth.shape[1])
    inputs = torch.eye(rows, truth.shape[1], device=truth.device, dtype=layer.compute_dtype or torch.float32)
    with torch.no_grad():
        computed = layer(inputs).float()
    if layer.bias is not None:
        computed = computed - layer.bias.float()
    return float((computed - truth[:, :rows].T).norm() / truth[:, :rows].norm())
