"""What a step costs beside time: memory, and the part of the device's peak that it used (MFU)."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.engine.distributed import unwrap_model

__all__ = ["PEAK_TFLOPS", "StepCost", "WindowWork", "known_peak_tflops"]

WindowWork = Callable[[Sequence[Mapping[str, Any]]], float]
"""Counts the floating point operations of a rank's micro-batches, on the host."""

# Dense bf16 TFLOP/s without sparsity, from the makers' data sheets (fp16 where a card has no bf16); the first name
# that fits counts.
PEAK_TFLOPS = (
    *(("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0)),
    *(("A100", 312.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0), ("A10G", 70.0), ("A10", 125.0)),
    *(("V100", 125.0), ("T4", 65.0), ("MI300X", 1307.0)),
)


def known_peak_tflops(name: str) -> float | None:
    """Return the peak of a GPU by the name that torch gives it; None for one that isn't in the table."""
    words = name.replace("-", " ").split()
    for known, peak in PEAK_TFLOPS:
        if all(part in words for part in known.split()):
            return peak
    return None


class StepCost:
    """Measures steps of one model on one device.

    MFU counts the products of a causal LM's forward and backward: per token ``6 N + 12 L H S`` (Chowdhery et al.
    2022, PaLM, appendix B), N the parameters without embedding and head, L layers, H the hidden size, S the length
    of what a token attends to; frozen parameters count 4 instead of 6, since they get no gradient. The head counts
    6 for each of its weights, but for supervised tokens only: the others are never projected. Work that is done
    twice (gradient checkpointing) counts once; of experts those that a token is sent to. S is the mean length of a
    document, which is less than tokens see on average: MFU is rather too low than too high.

    Args:
        model: as trained, wrapped or not. There is no MFU without ``get_output_embeddings`` and the sizes in its
            configuration, nor for experts whose number it does not tell.
        device: where it computes.
        peak_tflops: of one device; by default that of a known GPU.
        ranks: devices that share the work.
        work: counts a window of a model that is no causal LM, in place of all this.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        peak_tflops: float | None = None,
        ranks: int = 1,
        work: WindowWork | None = None,
    ) -> None:
        self._device, self._count = device, work
        if peak_tflops is None and device.type == "cuda":
            peak_tflops = known_peak_tflops(torch.cuda.get_device_name(device))
        self._peak = None if peak_tflops is None else peak_tflops * 1e12 * ranks
        self._body, self._head, self._attention = _costs(unwrap_model(model))

    def memory_bytes(self) -> int:
        """Return what this rank takes: the most of its GPU's tensors since the start, or its process on a CPU."""
        return _memory(self._device)

    def measure(
        self,
        window: Sequence[Mapping[str, Any]],
        *,
        total_tokens: float,
        effective_tokens: float,
        seconds: float,
        memory_bytes: int | None = None,
    ) -> dict[str, float]:
        """Return ``memory_bytes`` and, when it is known, ``mfu`` of one window.

        Args:
            window: this rank's micro-batches, on the host (their lengths stand for those of all ranks).
            total_tokens: of all ranks.
            effective_tokens: supervised ones of all ranks.
            seconds: that the window took.
            memory_bytes: of the rank that takes the most; by default of this one.
        """
        memory = self.memory_bytes() if memory_bytes is None else memory_bytes
        measured: dict[str, float] = {"memory_bytes": memory}
        if self._peak is not None and seconds > 0:
            work = self._work(window, total_tokens, effective_tokens)
            if work:
                measured["mfu"] = work / (seconds * self._peak)
        return measured

    def _work(self, window: Sequence[Mapping[str, Any]], total_tokens: float, effective_tokens: float) -> float:
        """Of all ranks; 0 where it can't be told."""
        if self._count is not None:
            own = sum(int(batch["total_tokens"]) for batch in window)
            return self._count(window) * total_tokens / own if own else 0.0
        if not self._body:
            return 0.0
        body = (self._body + self._attention * _mean_length(window)) * total_tokens
        return body + self._head * effective_tokens


def _costs(model: nn.Module) -> tuple[float, float, float]:
    """FLOPs per token of the body, per supervised token of the head, and per token and length of attention."""
    config: Any = getattr(model, "config", None)
    sizes = [getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size")]
    get_head = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if callable(get_head) else None
    if head is None or not all(isinstance(size, int) for size in sizes):
        return 0.0, 0.0, 0.0
    outside = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    outside |= {id(p) for p in head.parameters()}
    experts = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "experts"]
    routed = {id(p) for module in experts for p in module.parameters()}
    share = _routed_share(config) if routed else 1.0
    if share is None:
        return 0.0, 0.0, 0.0
    body = sum(
        _per_weight(p) * _weights(p) * (share if id(p) in routed else 1.0)
        for p in model.parameters()
        if id(p) not in outside
    )
    head_weight: Tensor = head.weight
    layers, hidden = sizes
    assert isinstance(layers, int)
    assert isinstance(hidden, int)
    return float(body), float(_per_weight(head_weight) * _weights(head_weight)), 12.0 * layers * hidden


def _routed_share(config: Any) -> float | None:
    """The part of a layer's experts that a token is sent to; None where the configuration doesn't tell."""
    counts = (getattr(config, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    experts = next((count for count in counts if isinstance(count, int) and count > 0), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts is not None and isinstance(chosen, int) else None


def _per_weight(parameter: Tensor) -> int:
    # A product and a sum forward, as many for the gradient of the input, and for that of the weight.
    return 6 if parameter.requires_grad else 4


def _weights(parameter: Tensor) -> int:
    # One that bitsandbytes has packed holds several in a number.
    state: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def _mean_length(window: Sequence[Mapping[str, Any]]) -> float:
    tokens = documents = 0
    for batch in window:
        positions = batch.get("position_ids")
        tokens += int(batch["total_tokens"])
        if isinstance(positions, Tensor) and positions.device.type == "cpu":
            documents += int((positions == 0).sum())
        elif isinstance(rows := batch.get("input_ids"), Tensor):
            documents += rows.shape[0]
    return tokens / documents if documents else 0.0


def _memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on a GPU since the start, what this process holds now on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        # Where there is no /proc: the most so far, in bytes on macOS and in KiB elsewhere.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024
