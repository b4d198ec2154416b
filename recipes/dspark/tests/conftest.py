"""One tiny target and its answers for all tests of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.dspark.tests.tiny import build_target, write_answers


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_target(tmp_path_factory.mktemp("dspark"))
    write_answers(folder, folder / "shared")
    return folder
