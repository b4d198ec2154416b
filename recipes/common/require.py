"""One way to refuse a value of the configuration."""

from __future__ import annotations

from tokennorm.errors import ConfigError

__all__ = ["require"]


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Refuse a value.

    Raises:
        ConfigError: it does not hold.
    """
    if not holds:
        raise ConfigError(f"{name} is {value!r}", fix=f"give {allowed}")
