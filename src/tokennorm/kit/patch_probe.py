"""Does a patched model compute what the unpatched one does? Asked on 8 tokens, before it is trusted.

Only head and loss are in question, so the head's input is cut off from the base model: it becomes a leaf, enlarged
until the logits are big enough for a softcap to matter, and the gradients are those of this leaf and of the head.
Each token's reference loss comes from the family's own loss function, called with that one token supervised.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tokennorm.errors import PatchError
from tokennorm.kit.patch_call import ForwardCall, Targets
from tokennorm.kit.patch_output import with_token_losses
from tokennorm.kit.patch_placeholder import OWN_LOSS
from tokennorm.kit.patch_state import STATE_ATTRIBUTE, PatchState, answering, patched_head

__all__ = ["probe"]

_ROWS, _LENGTH = 2, 4
# Largest logit that the probe works with: enough for softcaps of 15 to 50 to bend it.
_LARGEST_LOGIT = 20.0
# Upstream gradients of the tokens' losses: uneven, one of them 0.
_UPSTREAM = (1.0, 0.5, 0.0, 2.0, 1.5, 0.25, 3.0, 0.75)


@dataclass(kw_only=True)
class _ReferenceCall:
    """Lets the unpatched head and loss run, and watches."""

    family_loss: Any
    hidden: list[Tensor] = field(default_factory=list)
    token_losses: list[Tensor] = field(default_factory=list)

    def on_head(self, head: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return head.run(*args, **kwargs)
        hidden = args[0].detach()
        with torch.no_grad():
            largest = head.run(hidden).abs().max().float()
        factor = torch.where(largest > 0, (_LARGEST_LOGIT / largest).clamp(min=1.0), torch.ones_like(largest))
        leaf = (hidden * factor.to(hidden.dtype)).requires_grad_(torch.is_grad_enabled())
        self.hidden.append(leaf)
        return head.run(leaf)

    def loss_function(self, logits: Any, labels: Any = None, *args: Any, **kwargs: Any) -> Any:
        shifted = kwargs.get("shift_labels")
        given = shifted if shifted is not None else labels
        for position in range(given.numel()):
            alone = torch.full_like(given, -100)
            alone.view(-1)[position] = given.reshape(-1)[position]
            if shifted is not None:
                loss = self.family_loss(logits, labels, *args, **{**kwargs, "shift_labels": alone})
            else:
                loss = self.family_loss(logits, alone, *args, **kwargs)
            # A mean over nothing is nan: this label is predicted nowhere.
            if not bool(loss.isnan()):
                self.token_losses.append(loss)
        return self.family_loss(logits, labels, *args, **kwargs)


def probe(model: nn.Module, run: Callable[[dict[str, Any]], Any]) -> None:
    """Compare the patched model with the unpatched one.

    Args:
        model: a patched model with weights.
        run: calls it with the given arguments.

    Raises:
        PatchError: they differ, or the unpatched model can't be run on 8 tokens, or its loss function is never
            reached.
    """
    state: PatchState = model.__dict__[STATE_ATTRIBUTE]
    name = type(model).__name__
    head = patched_head(model, state)
    assert isinstance(head, nn.Module)
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    inputs = _inputs(model, head)
    labels = inputs["labels"]
    reference = _ReferenceCall(family_loss=model.loss_function)
    with _undisturbed(model, head), torch.inference_mode(False), torch.set_grad_enabled(not sharded):
        torch.manual_seed(0)
        with answering(model, reference):
            try:
                expected = run(inputs)
            except Exception as error:
                raise PatchError(
                    f"the unpatched {name} fails on {_ROWS} x {_LENGTH} tokens with labels: "
                    f"{type(error).__name__}: {error}",
                    why="the patch compares itself with it and can't.",
                    fix=OWN_LOSS,
                ) from error
        if not reference.token_losses or not reference.hidden:
            what = "never calls self.loss_function" if not reference.token_losses else "never calls its head"
            raise PatchError(
                f"{name} {what} when it is given labels",
                why="there is no place at which its logits could be replaced by their losses.",
                fix=OWN_LOSS,
            )
        leaves: list[Tensor] = []

        def replace_hidden(hidden: Tensor) -> Tensor:
            del hidden
            leaf = reference.hidden[len(leaves)].detach().requires_grad_(torch.is_grad_enabled())
            leaves.append(leaf)
            return leaf

        torch.manual_seed(0)
        call = ForwardCall(
            name=name,
            targets=Targets(labels=labels, shift_labels=None),
            # Small and uneven, so that 8 tokens are several chunks.
            chunk_size=3,
            reported=state.reported,
            replace_hidden=replace_hidden,
        )
        with answering(model, call):
            outputs = run(inputs)
        got = with_token_losses(outputs, call.token_losses(), output_cls=None, as_tuple=False)
        _compare(name, expected, reference, got, leaves, head, labels, differentiate=not sharded)


def _compare(
    name: str,
    expected: Any,
    reference: _ReferenceCall,
    got: Any,
    leaves: list[Tensor],
    head: nn.Module,
    labels: Tensor,
    *,
    differentiate: bool,
) -> None:
    losses, extra = got.loss.view(labels.shape), got.extra_loss
    supervised = labels[:, 1:] != -100
    token_losses = losses[:, :-1][supervised]
    want = torch.stack([loss.to(losses.dtype) for loss in reference.token_losses])
    tolerance = _tolerance(reference.hidden[0])
    if want.shape != token_losses.shape:
        raise _refusal(name, f"{len(want)} tokens have a loss in the unpatched model, {len(token_losses)} here")
    _check(name, "the losses", token_losses, want, tolerance)
    elsewhere = losses.detach().clone()
    elsewhere[:, :-1][supervised] = 0
    if bool(elsewhere.count_nonzero()):
        raise _refusal(name, "positions without a target have a loss")
    total = token_losses.detach().mean() + (0 if extra is None else extra.detach())
    _check(name, "the model's loss", total, expected.loss.to(total.dtype), tolerance)
    if not differentiate:
        return
    upstream = torch.tensor(_UPSTREAM[: len(want)], dtype=want.dtype, device=want.device)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    gradients = [
        torch.autograd.grad((upstream * values).sum(), [*inputs, *parameters], allow_unused=True)
        for values, inputs in ((token_losses, leaves), (want, reference.hidden))
    ]
    for index, (mine, theirs) in enumerate(zip(*gradients, strict=True)):
        if mine is None and theirs is None:
            continue
        like = mine if mine is not None else theirs
        assert like is not None
        what = "the gradient of " + ("the head's input" if index < len(leaves) else "the head's parameters")
        zeros = torch.zeros_like(like)
        _check(name, what, zeros if mine is None else mine, zeros if theirs is None else theirs, tolerance)


def _check(name: str, what: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Refuse a relative L2 difference above the tolerance."""
    got, want = got.detach().to(torch.float64), want.detach().to(torch.float64)
    scale = float(want.norm())
    error = float((got - want).norm())
    if not error <= tolerance * max(scale, 1e-30):
        raise _refusal(name, f"{what} differ by {error:.3g}, {error / max(scale, 1e-30):.3g} of their size")


def _refusal(name: str, what: str) -> PatchError:
    return PatchError(
        f"the patched {name} differs from the unpatched one on 8 tokens: {what}",
        why="training would follow another loss than the model's.",
        fix=OWN_LOSS,
    )


def _tolerance(hidden: Tensor) -> float:
    """Relative difference that rounding explains."""
    if hidden.dtype == torch.float64:
        # The loss of transformers casts its logits to float32, ours doesn't.
        return 1e-5
    if hidden.dtype == torch.float32:
        # An accelerator may multiply float32 with 10 bits of mantissa.
        return 1e-4 if hidden.device.type == "cpu" else 1e-2
    return 5e-2


def _inputs(model: Any, head: nn.Module) -> dict[str, Any]:
    """8 ordinary tokens, one of their labels ignored."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = [getattr(text, "vocab_size", None), getattr(head, "out_features", None)]
    vocabulary = min([size for size in sizes if isinstance(size, int)] or [_ROWS * _LENGTH])
    special = _special_tokens(config) | _special_tokens(text)
    ordinary = [token for token in range(min(vocabulary, 4096)) if token not in special] or [0]
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = getattr(embeddings, "weight", None)
    device = weight.device if isinstance(weight, Tensor) else next(model.parameters()).device
    tokens = [ordinary[(3 * index + 1) % len(ordinary)] for index in range(_ROWS * _LENGTH)]
    input_ids = torch.tensor(tokens, device=device).view(_ROWS, _LENGTH)
    labels = input_ids.clone()
    labels[0, 1] = -100
    inputs: dict[str, Any] = {"input_ids": input_ids, "labels": labels}
    if getattr(config, "use_cache", False) or getattr(text, "use_cache", False):
        inputs["use_cache"] = False
    if not getattr(config, "return_dict", True):
        inputs["return_dict"] = True
    return inputs


def _special_tokens(config: Any) -> set[int]:
    """Ids that stand for something else than text (padding, images)."""
    found: set[int] = set()
    for key, value in vars(config).items() if config is not None else ():
        if key.endswith(("_token_id", "_token_index", "_token_ids")):
            found.update(
                it for it in (value if isinstance(value, list | tuple) else [value]) if isinstance(it, int)
            )
    return found


@contextmanager
def _undisturbed(model: nn.Module, head: nn.Module) -> Iterator[None]:
    """Leave random numbers, buffers and training mode as they were; no dropout inside the head meanwhile."""
    accelerators = sorted(
        {it.device for it in model.parameters() if it.device.type not in ("cpu", "meta")}, key=str
    )
    device_type = accelerators[0].type if accelerators else "cuda"
    devices = [it.index if it.index is not None else 0 for it in accelerators]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in head.modules()]
    python_state = random.getstate()
    for module, _ in modes:
        module.training = False
    try:
        with torch.random.fork_rng(devices, device_type=device_type):
            yield
    finally:
        random.setstate(python_state)
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
