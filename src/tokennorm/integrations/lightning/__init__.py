"""Lightning: the division by accumulate_grad_batches and ranks undone, exactly, under automatic optimisation.

Tested with lightning 2.6 (the package ``lightning``, not ``pytorch_lightning``) and torch 2.13: one device and DDP
(gloo), float32, also with a loss scaler.

Lightning averages: it divides what ``training_step`` returns by ``accumulate_grad_batches`` (also in the short
window at the end of an epoch), DDP divides by the number of ranks, and the loss of an epoch is a mean of batch
means. Under manual optimisation only DDP divides: there the loop is your own, and ``TokenNormedLossKit`` is all it
needs (docs/integrations.md).
"""

from tokennorm.errors import MissingDependencyError

try:
    import lightning.pytorch  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(
        "tokennorm.integrations.lightning needs the library lightning",
        fix='pip install "tokennorm[integrations]"',
    ) from error

from tokennorm.integrations.lightning.callback import TokenNormalisation
from tokennorm.integrations.lightning.module import TokenNormedModule

__all__ = ["TokenNormalisation", "TokenNormedModule"]
