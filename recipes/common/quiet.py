"""transformers without its progress bars."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

__all__ = ["quiet_transformers"]


@contextlib.contextmanager
def quiet_transformers(*, errors_only: bool = False) -> Iterator[None]:
    """Switch off the progress bars of transformers, and its warnings too where they mean nothing to a user."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    if errors_only:
        hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
