"""What the README and the guide for agents name exists: options, stages, files of the run folder."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tokennorm.cli.draft import STAGES
from tokennorm.recipes.dspark.config import DSparkConfig
from tokennorm.recipes.dspark.folder import StageFolder

ROOT = Path(__file__).parents[3]
README = ROOT / "recipes" / "dspark" / "README.md"
SKILL = ROOT / "skills" / "training" / "dspark" / "SKILL.md"
CHOICES = SKILL.parent / "references" / "choices.md"


@pytest.mark.parametrize("page", [README, SKILL, CHOICES], ids=lambda page: page.name)
def test_options_and_stages_that_a_guide_names_exist(page: Path) -> None:
    text = page.read_text()
    groups = vars(DSparkConfig())
    options = re.findall(r"--([a-z]+)\.([a-z0-9-]+)", text)
    options += re.findall(rf"`({'|'.join(groups)})\.(?!json)([a-z0-9_]+)\b(?!\()", text)
    assert len(options) > 5
    for group, option in options:
        names = {field.name for field in dataclasses.fields(groups[group])}
        assert option.removeprefix("no-").replace("-", "_") in names, f"{group}.{option}"
    stages = re.findall(r"tokennorm draft ([a-z]+)", text)
    assert stages
    assert set(stages) <= set(STAGES)


def test_the_run_folder_s_table_is_complete() -> None:
    parts = {name: value for name, value in vars(StageFolder).items() if isinstance(value, property)}
    for name in parts:
        path = getattr(StageFolder(Path()), name)
        assert re.search(rf"^\|.*`{re.escape(str(path))}/?`", README.read_text(), flags=re.MULTILINE), path
