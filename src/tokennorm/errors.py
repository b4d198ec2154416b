"""Every error that a user of tokennorm can cause.

A message has three parts: what happened (with the values and their units), why it matters, and what to do
about it. Each class also derives from the builtin that fits it, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

__all__ = [
    "AuditError",
    "CheckpointError",
    "ConfigError",
    "DamagedCheckpointError",
    "DataError",
    "DistributedError",
    "EmptyWindowError",
    "KitUsageError",
    "LabelError",
    "LossUsageError",
    "MissingDependencyError",
    "NoSupervisedTokenError",
    "NonFiniteError",
    "NonFiniteSlotError",
    "PatchError",
    "RunFolderError",
    "TokenNormError",
]


class TokenNormError(Exception):
    """Base of all errors raised by tokennorm.

    Args:
        what: what happened, with the values that show it.
        why: why that matters (left out where it goes without saying).
        fix: what to do about it.
    """

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        self.what, self.why, self.fix = what, why, fix
        lines = [what]
        if why:
            lines.append(f"  Why it matters: {why}")
        if fix:
            lines.append(f"  What to do: {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self):
        """Keep the three parts when the error travels between processes."""
        return _rebuild, (type(self), self.what, self.why, self.fix)


def _rebuild(cls: type[TokenNormError], what: str, why: str | None, fix: str | None) -> TokenNormError:
    return cls(what, why=why, fix=fix)


class ConfigError(TokenNormError, ValueError):
    """A configuration value that can't work, found before anything is started."""


class LossUsageError(TokenNormError, ValueError):
    """Arguments of a loss operator that contradict each other (shapes, dtypes, ranges)."""


class LabelError(TokenNormError, ValueError):
    """A label outside the vocabulary."""


class KitUsageError(TokenNormError, RuntimeError):
    """The accounting of a window was called in an order or with values that can't be right."""


class EmptyWindowError(TokenNormError, RuntimeError):
    """A whole window, on all ranks, held no supervised token."""


class NonFiniteError(TokenNormError, FloatingPointError):
    """A loss or a gradient that is NaN or infinite where nothing masks it."""


class NonFiniteSlotError(NonFiniteError):
    """A supervised slot of a drafter whose loss is NaN or infinite."""


class PatchError(TokenNormError, RuntimeError):
    """A model that can't be made to return per-token losses, or a copy that lost the patch."""


class DataError(TokenNormError, ValueError):
    """Training data that can't be read, can't be masked, or doesn't fit the model."""


class NoSupervisedTokenError(DataError):
    """A set in which nothing is to be learned or evaluated."""


class CheckpointError(TokenNormError, RuntimeError):
    """A checkpoint that can't be written, read, or doesn't belong to this run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is not what was saved: a file is missing, cut or changed."""


class RunFolderError(TokenNormError, OSError):
    """A file of the run folder that can't be written: metrics, configuration, origin."""


class DistributedError(TokenNormError, RuntimeError):
    """Ranks that disagree, or a rank that died."""


class AuditError(TokenNormError, AssertionError):
    """A training loop whose gradient is not that of its objective, or that an audit could not run."""


class MissingDependencyError(TokenNormError, ImportError):
    """An optional library that this feature needs is not installed."""
