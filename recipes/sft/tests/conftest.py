"""One tiny model and its chats for all tests of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.sft.tests.tiny import build_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("sft"))
