"""Notice an additional loss of the model (a router loss) that the training loop forgets."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

__all__ = ["ExtraLossWatch"]


class ExtraLossWatch:
    """Forward hook on a patched model: keeps ``|outputs.extra_loss|`` until the micro-batch is accumulated.

    It reads nothing on the host. A copy or an unpickled model carries an inert watch: the kit it would report
    to is another process's, or counts another model.
    """

    def __init__(self) -> None:
        self._seen: Tensor | None = None
        self._model: weakref.ref[nn.Module] | None = None

    def watch(self, model: nn.Module) -> None:
        """Start noticing; a model already watched by this object is left as it is."""
        if self._model is None or self._model() is not model:
            self._model = weakref.ref(model)
            model.register_forward_hook(self)

    def take(self) -> Tensor | None:
        """What came since the last call: a 0-d tensor that is nonzero when the model added a loss; or None."""
        seen, self._seen = self._seen, None
        return seen

    def __call__(self, _model: nn.Module, _args: Any, output: Any) -> None:
        """Note the extra loss of one training forward."""
        extra = getattr(output, "extra_loss", None)
        watched = self._model is not None and self._model() is _model
        if watched and isinstance(extra, Tensor) and extra.requires_grad:
            size = extra.detach().abs()
            self._seen = size if self._seen is None else self._seen + size

    def __deepcopy__(self, memo: dict[int, Any]) -> ExtraLossWatch:
        return ExtraLossWatch()

    def __reduce__(self) -> tuple[type[ExtraLossWatch], tuple[()]]:
        return ExtraLossWatch, ()
