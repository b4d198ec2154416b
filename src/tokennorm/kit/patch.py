"""A Hugging Face causal LM that returns the loss of every token, by its own forward.

The model's ``__class__`` and its head's are swapped for subclasses. With labels, the head answers with deferred
logits (``deferred_logits.py``), the family's forward does to them whatever it does, and its call of
``self.loss_function`` is answered chunk by chunk (``patch_call.py``, ``patch_head.py``). Without labels nothing is
changed. No family is known by name: a probe (``patch_probe.py``) compares each model with its unpatched self.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from tokennorm.errors import PatchError
from tokennorm.kit.patch_call import ForwardCall, Targets
from tokennorm.kit.patch_head import DeferringHead, deferring_head_class, reduce_swapped, swap_class
from tokennorm.kit.patch_output import check_output_class, with_token_losses
from tokennorm.kit.patch_probe import probe
from tokennorm.kit.patch_state import (
    OWN_LOSS_ATTRIBUTE,
    STATE_ATTRIBUTE,
    PatchState,
    answering,
    check_thread,
    lost_patch,
)
from tokennorm.kit.patch_target import causal_lm, head_of, unwrapped

__all__ = ["apply_chunked_token_loss_patch", "remove_chunked_token_loss_patch"]


def apply_chunked_token_loss_patch(
    model: Any, *, chunk_size: int | None = None, output_cls: type | None = None, on_request: bool = False
) -> Any:
    """Make a causal LM return the loss of every token, without ever holding all its logits.

    With ``labels`` (shifted by the model) or ``shift_labels`` (used as they are), the outputs have

    - ``loss`` ``[B*S]``, float32 (float64 for a float64 model), in nats: entry ``b*S+s`` is the loss of
      predicting token ``s+1`` of row ``b``; 0 where that is not supervised;
    - ``extra_loss``, 0-d: what the family adds to its loss (a router loss, already times its coefficient), or
      None;
    - no ``logits`` and, unless ``use_cache=True`` is passed, no cache (with one, transformers does not isolate the
      documents of a pack). Call the model without labels for these: then it behaves as if it were not patched.

    The model accepts ``num_supervised=``, the number of supervised targets, which saves an accelerator a
    synchronisation; and ``num_items_in_batch``, by which nothing is divided. ``ignore_index``,
    ``logits_to_keep`` and ``return_dict`` mean what they mean to the family. With ``logits_to_keep`` every
    supervised target must be at a position that is kept.

    Apply it after adapters (PEFT) and before ``fully_shard`` and DDP; a DDP or PEFT wrapper may be given, its
    model is patched. To compile, compile the base model (``model.model = torch.compile(model.model)``). Applying
    it again changes the settings.

    A probe runs the model on 8 tokens, patched and not, and compares the losses and the gradients of head and loss
    (losses only where parameters are sharded); on the meta device it waits for the first forward with labels.

    Args:
        model: a model of transformers 5, or something like it: a head and a ``self.loss_function``.
        chunk_size: rows of logits held at once; by default a memory budget decides.
        output_cls: ModelOutput dataclass to return, with fields ``loss`` and ``extra_loss``; by default the
            family's own plus ``extra_loss``.
        on_request: answer this way only a call with ``token_losses=True``, and any other as if the model were not
            patched; for a model that other code calls too.

    Returns:
        The same ``model``.

    Raises:
        PatchError: the model never reaches its loss function, has no head, differs from its unpatched self, or is
            wrapped in a way that hides its forward.
    """
    if chunk_size is not None and chunk_size < 1:
        raise PatchError(f"chunk_size must be at least 1, not {chunk_size}")
    if output_cls is not None:
        check_output_class(output_cls)
    inner = causal_lm(model)
    state: PatchState | None = inner.__dict__.get(STATE_ATTRIBUTE)
    if state is not None:
        state.chunk_size, state.output_cls, state.on_request = chunk_size, output_cls, on_request
        return model
    head_name, head = head_of(inner)
    own_loss = inner.__dict__.pop("loss_function", None) or inner.__dict__.get(OWN_LOSS_ATTRIBUTE)
    state = PatchState(
        head=head_name, chunk_size=chunk_size, output_cls=output_cls, on_request=on_request, own_loss=own_loss
    )
    inner.__dict__.update({STATE_ATTRIBUTE: state, OWN_LOSS_ATTRIBUTE: lost_patch})
    inner.__class__ = token_loss_class(type(inner))
    head.__class__ = deferring_head_class(type(head))
    try:
        _probe(inner)
    except BaseException:
        remove_chunked_token_loss_patch(inner)
        raise
    return model


def remove_chunked_token_loss_patch(model: Any) -> Any:
    """Undo :func:`apply_chunked_token_loss_patch`; a model that is not patched stays as it is.

    Args:
        model: what was given to the patch, or a copy of it.

    Returns:
        The same ``model``.
    """
    inner = unwrapped(model)
    state: PatchState | None = inner.__dict__.pop(STATE_ATTRIBUTE, None)
    if state is None:
        return model
    del inner.__dict__[OWN_LOSS_ATTRIBUTE]
    for module in (inner, inner.get_submodule(state.head)):
        for cls in type(module).__mro__:
            if cls.__bases__[:1] in ((TokenLossModel,), (DeferringHead,)):
                swap_class(module, cls, cls.__bases__[1])
                break
    if state.own_loss is not None:
        inner.loss_function = state.own_loss
    return model


class TokenLossModel:
    """Mixin that goes before a family's class. See :func:`token_loss_class`."""


@functools.cache
def token_loss_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass that a model of class ``base`` is swapped to.

    It has the family's name (what is saved with a checkpoint) and the signature of the family's forward.
    """

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, base, args, kwargs)

    def get_loss_function(self: Any) -> Any:
        call = self.__dict__[STATE_ATTRIBUTE].call
        return _family_loss(self, base) if call is None else call.loss_function

    def set_loss_function(self: Any, value: Any) -> None:
        self.__dict__[STATE_ATTRIBUTE].own_loss = value

    body = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": lambda self, protocol: reduce_swapped(self, protocol, token_loss_class),
        # The base model may be compiled; between head and loss there is nothing to gain.
        "forward": torch.compiler.disable(forward),
        "loss_function": property(get_loss_function, set_loss_function),
    }
    return type(base.__name__, (TokenLossModel, base), body)


def _family_loss(model: nn.Module, base: type) -> Any:
    """The unpatched ``loss_function``: what was set on the instance, or the family's property or method."""
    state: PatchState = model.__dict__[STATE_ATTRIBUTE]
    if state.own_loss is not None:
        return state.own_loss
    guard = model.__dict__.pop(OWN_LOSS_ATTRIBUTE)
    try:
        return vars(_class_with_loss(base))["loss_function"].__get__(model, type(model))
    finally:
        model.__dict__[OWN_LOSS_ATTRIBUTE] = guard


def _class_with_loss(base: type) -> type:
    return next(cls for cls in base.__mro__ if "loss_function" in vars(cls))


@functools.cache
def _signature(base: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(base.forward)


def _forward(model: Any, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward of a patched model."""
    state: PatchState = model.__dict__[STATE_ATTRIBUTE]
    num_supervised = kwargs.pop("num_supervised", None)
    wanted = kwargs.pop("token_losses", not state.on_request)
    check_thread(state)
    if state.call is not None:
        # The probe asks for the family's own forward.
        return base.forward(model, *args, **kwargs)
    arguments = _by_name(model, base, args, kwargs)
    if not wanted or (arguments.get("labels") is None and arguments.get("shift_labels") is None):
        return base.forward(model, *args, **kwargs)
    if state.probe_due:
        probe(model, lambda inputs: base.forward(model, **inputs))
        state.probe_due = False
    targets = Targets(
        labels=arguments.get("labels"),
        shift_labels=arguments.get("shift_labels"),
        ignore_index=arguments.get("ignore_index", -100),
        num_supervised=num_supervised,
        logits_to_keep=0 if arguments.get("logits_to_keep") is None else arguments["logits_to_keep"],
    )
    call = ForwardCall(
        name=type(model).__name__, targets=targets, chunk_size=state.chunk_size, reported=state.reported
    )
    as_tuple = not _wants_dict(model, arguments)
    with answering(model, call):
        outputs = base.forward(model, **_family_arguments(base, arguments, as_tuple=as_tuple))
    return with_token_losses(outputs, call.token_losses(), output_cls=state.output_cls, as_tuple=as_tuple)


def _by_name(model: Any, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    if not args:
        return dict(kwargs)
    signature = _signature(base)
    named = dict(signature.bind_partial(model, *args).arguments)
    named.pop(next(iter(signature.parameters)))
    if twice := sorted(named.keys() & kwargs.keys()):
        raise TypeError(f"{type(model).__name__}.forward() got multiple values for {twice}")
    return {**named, **kwargs}


def _family_arguments(base: Any, arguments: dict[str, Any], *, as_tuple: bool) -> dict[str, Any]:
    """What the family's forward gets: labels to start its loss, and none of what it can't take."""
    parameters = _signature(base).parameters
    takes_any = any(it.kind is inspect.Parameter.VAR_KEYWORD for it in parameters.values())
    arguments = dict(arguments)
    # A family that were told would divide by it.
    arguments.pop("num_items_in_batch", None)
    if arguments.get("labels") is None:
        arguments["labels"] = arguments["shift_labels"]
    if "use_cache" in parameters and arguments.get("past_key_values") is None:
        # A config's default is True. Nobody reads a cache next to losses, and with one transformers no longer
        # keeps the documents of a pack apart.
        arguments.setdefault("use_cache", False)
    for name in ("shift_labels", "ignore_index"):
        if name not in parameters and not takes_any:
            # The running call knows them.
            arguments.pop(name, None)
    if as_tuple:
        arguments["return_dict"] = True
    return arguments


def _wants_dict(model: Any, arguments: dict[str, Any]) -> bool:
    asked = arguments.get("return_dict")
    return bool(getattr(getattr(model, "config", None), "return_dict", True) if asked is None else asked)


def _probe(model: Any) -> None:
    """Run the probe now, or note that it has to run when there are weights."""
    if any(parameter.is_meta for parameter in model.parameters()):
        model.__dict__[STATE_ATTRIBUTE].probe_due = True
    else:
        probe(model, lambda inputs: model(**inputs))
