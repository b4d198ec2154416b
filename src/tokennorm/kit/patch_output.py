"""What a patched model returns: the family's own output class with one more field.

It stays a ModelOutput: DDP takes outputs apart and builds them anew, and drops plain attributes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

from tokennorm.errors import PatchError
from tokennorm.kit.deferred_logits import DeferredLogits
from tokennorm.kit.patch_placeholder import OWN_LOSS, LossPlaceholder

__all__ = ["check_output_class", "output_class_for", "with_token_losses"]


@functools.cache
def output_class_for(family: type) -> type:
    """The family's output class plus ``extra_loss``."""
    if "extra_loss" in {field.name for field in dataclasses.fields(family)}:
        return family
    cls = dataclasses.make_dataclass(
        f"TokenLoss{family.__name__}",
        [("extra_loss", "Tensor | None", dataclasses.field(default=None))],
        bases=(family,),
        namespace={"__reduce__": _reduce_output, "__module__": __name__},
    )
    cls.__doc__ = (
        f"{family.__name__} whose ``loss`` is ``[B*S]``, one entry per token; ``extra_loss`` is what the model "
        "adds to its loss, 0-d, or None."
    )
    return cls


def _reduce_output(output: Any) -> Any:
    return _rebuild_output, (type(output).__bases__[0], dict(output.items()))


def _rebuild_output(family: type, fields: dict[str, Any]) -> Any:
    return output_class_for(family)(**fields)


def check_output_class(output_cls: Any) -> None:
    """Refuse an ``output_cls`` that would lose what the patch returns."""
    from transformers.utils.generic import ModelOutput

    if not (isinstance(output_cls, type) and issubclass(output_cls, ModelOutput)):
        raise PatchError(
            f"output_cls must be a subclass of transformers' ModelOutput, not {output_cls!r}",
            why="DDP drops the fields of anything else.",
        )
    names = (
        {field.name for field in dataclasses.fields(output_cls)} if dataclasses.is_dataclass(output_cls) else set()
    )
    if missing := {"loss", "extra_loss"} - names:
        raise PatchError(f"output_cls {output_cls.__name__} has no field {' and '.join(sorted(missing))}")


def with_token_losses(outputs: Any, losses: Tensor, *, output_cls: type | None, as_tuple: bool) -> Any:
    """Put the losses ``[B*S]`` where the family put its placeholder, and the family's extra loss beside them.

    Args:
        outputs: what the family's forward returned.
        losses: per-token losses.
        output_cls: the class asked for, or None for the family's own plus ``extra_loss``.
        as_tuple: whether the caller asked for ``return_dict=False``: ``(loss, ...fields that are not None)``, with
            the extra loss, if any, last.
    """
    if isinstance(outputs, tuple):
        extra = _extra_of(outputs[0])
        rest = tuple(value for value in outputs[1:] if not isinstance(value, DeferredLogits))
        return (losses, *rest) if extra is None else (losses, *rest, extra)
    fields = dict(outputs.items())
    extra = _extra_of(fields.get("loss"))
    # Logits that were never computed can't be returned; those that were would make callers depend on the family.
    fields.pop("logits", None)
    fields = {name: value for name, value in fields.items() if not isinstance(value, DeferredLogits)}
    fields["loss"] = losses
    if extra is not None:
        fields["extra_loss"] = extra
    if output_cls is None:
        output_cls = output_class_for(type(outputs))
    else:
        known = {field.name for field in dataclasses.fields(output_cls)}
        fields = {name: value for name, value in fields.items() if name in known}
    result = output_cls(**fields)
    return result.to_tuple() if as_tuple else result


def _extra_of(loss: Any) -> Tensor | None:
    if not isinstance(loss, LossPlaceholder):
        raise PatchError(
            "the model's output does not hold the loss that its loss function gave it",
            why="what happened to it in between can't be told, so neither can each token's loss.",
            fix=OWN_LOSS,
        )
    return loss.extra
