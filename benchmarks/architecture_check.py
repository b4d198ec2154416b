"""Patched against unpatched, for one model: each token's loss, the extra loss, the gradient of each parameter.

The unpatched side is the model's own: its mean loss times the number of supervised tokens, and the cross-entropies
of its own logits. The upstream gradients of the tokens are uneven in one comparison and uniform in the other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.shrunk_models import VOCABULARY
from tokennorm.errors import PatchError
from tokennorm.kit import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch

ROWS, LENGTH = 3, 24
CHUNK = 16
# Relative L2: what two unpatched orders of summation may differ by.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-9}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Outcome for one dtype.

    Attributes:
        outcome: "right", "materialised" (right, with all logits at once), "refused" or "wrong".
        by_logits: largest difference, relative L2, from what the unpatched model's logits give: each token's loss,
            and the gradients of all parameters for an uneven upstream.
        by_loss: the same from the unpatched model's own loss: the total with the extra loss, and its gradients.
        detail: why it was refused, or what materialised, or what is wrong.
        has_extra: whether the family added a loss of its own.
    """

    outcome: str
    by_logits: float = 0.0
    by_loss: float = 0.0
    detail: str = ""
    has_extra: bool = False


class LogitsWatcher(TorchDispatchMode):
    """Notes every tensor that holds a logit of each vocabulary entry for at least ``rows`` tokens."""

    def __init__(self, widths: set[int], rows: int) -> None:
        super().__init__()
        self.widths, self.rows = widths, rows
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            wide = isinstance(leaf, Tensor) and leaf.dim() >= 2 and leaf.shape[-1] in self.widths
            if wide and leaf.numel() // leaf.shape[-1] >= self.rows:
                self.seen.append(f"{func} {list(leaf.shape)}")
        return result


def inputs_for(model: Any) -> dict[str, Any]:
    """Ordinary tokens, about a third of the labels ignored."""
    generator = torch.Generator().manual_seed(1)
    low, high = 8, VOCABULARY - 60
    input_ids = torch.randint(low, high, (ROWS, LENGTH), generator=generator)
    labels = input_ids.clone()
    labels[0, : LENGTH // 2] = -100
    labels[1, 3:7] = -100
    labels[2, -1] = -100
    inputs: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
    if hasattr(model.config.get_text_config(), "use_cache"):
        inputs["use_cache"] = False
    return inputs


def compare(model: Any) -> Verdict:
    """Patch the model and compare it with a copy that is not, both in training mode.

    Raises:
        Exception: whatever the unpatched model raises.
    """
    model.train()
    unpatched = copy.deepcopy(model)
    inputs = inputs_for(model)
    own = _run(unpatched, inputs)
    if not isinstance(own.loss, Tensor) or not bool(own.loss.isfinite()):
        raise ValueError(f"the unpatched loss is {own.loss}")
    try:
        apply_chunked_token_loss_patch(model, chunk_size=CHUNK)
    except PatchError as error:
        return Verdict(outcome="refused", detail=error.what)
    try:
        return _compare(model, unpatched, own, inputs)
    except Exception as error:
        return Verdict(outcome="wrong", detail=f"{type(error).__name__}: {error}")
    finally:
        remove_chunked_token_loss_patch(model)


def _run(model: Any, inputs: dict[str, Any]) -> Any:
    """The model's outputs, with the same random numbers each time."""
    torch.manual_seed(3)
    return model(**inputs)


def _compare(model: Any, unpatched: Any, own: Any, inputs: dict[str, Any]) -> Verdict:
    """Compare a patched model with what the unpatched one gave."""
    labels = inputs["labels"]
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    supervised = targets != -100
    count = int(supervised.sum())
    weights = torch.rand(targets.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights[::5] = 0.0

    with LogitsWatcher({own.logits.shape[-1], VOCABULARY}, count - 1) as watcher:
        got = _run(model, inputs)
        mine = (got.loss * weights.to(got.loss.dtype)).sum()
        mine_gradients = _gradients(model, mine)
    logits = own.logits.reshape(-1, own.logits.shape[-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    reference = F.cross_entropy(logits.to(wide), targets, reduction="none")
    gradients = _gradients(unpatched, (reference * weights.to(wide)).sum(), keep=True)
    by_logits = {
        "losses of tokens": _error([got.loss], [reference]),
        "gradients, uneven upstream": gradient_error(model, mine_gradients, gradients),
        "losses where nothing is supervised": float(got.loss.detach()[~supervised].abs().max()),
    }

    got = _run(model, inputs)
    extra = got.extra_loss
    total = got.loss.sum() + (0 if extra is None else count * extra)
    own_total = own.loss * count
    own_extra = own.loss - reference.sum() / count
    by_loss = {
        "total loss": _error([total], [own_total]),
        "extra loss": float(((own_extra - (0 if extra is None else extra)) / own.loss).detach().abs()),
        "gradients of the total loss": gradient_error(
            model, _gradients(model, total), _gradients(unpatched, own_total)
        ),
    }
    limits = [
        (by_logits, TOLERANCES[torch.promote_types(own.logits.dtype, torch.float32)]),
        # The loss of transformers casts its logits to float32.
        (by_loss, TOLERANCES[torch.float32] if own.loss.dtype == torch.float32 else TOLERANCES[torch.float64]),
    ]
    wrong = {name: error for errors, limit in limits for name, error in errors.items() if not error <= limit}
    return Verdict(
        outcome="wrong" if wrong else "materialised" if watcher.seen else "right",
        by_logits=max(by_logits.values()),
        by_loss=max(by_loss.values()),
        detail="; ".join(f"{name}: {error:.1e}" for name, error in wrong.items()) or "".join(watcher.seen[:1]),
        has_extra=extra is not None,
    )


def _gradients(model: Any, loss: Tensor, *, keep: bool = False) -> list[Tensor]:
    """Gradient of every parameter, zeros where there is none."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep)
    return [
        torch.zeros_like(parameter) if gradient is None else gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]


def gradient_error(model: Any, got: list[Tensor], want: list[Tensor]) -> float:
    """The larger of two relative L2 differences: of all gradients together, and of the head's alone.

    The body's gradients are often many times larger, and would hide the head's.
    """
    head = model.get_output_embeddings()
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    chosen = [index for index, parameter in enumerate(trained) if id(parameter) in of_head]
    alone = _error([got[index] for index in chosen], [want[index] for index in chosen])
    return max(_error(got, want), alone)


def _error(got: list[Tensor], want: list[Tensor]) -> float:
    """Global relative L2 difference."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(got, want, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return (difference / size) ** 0.5 if size else difference**0.5
