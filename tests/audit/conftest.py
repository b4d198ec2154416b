from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.audit.loops import Loop
from tokennorm.audit import AuditReport, audit_loop


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Ranks are forked from this process: what they need is imported, and no thread pool is at work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def audit() -> Callable[..., AuditReport]:
    """Audit a loop of the catalogue, forked (no new process has to import torch)."""

    def run(loop: Loop, **options: Any) -> AuditReport:
        return audit_loop(loop.build, loop.step, **{"start_method": "fork", **loop.options, **options})

    return run
