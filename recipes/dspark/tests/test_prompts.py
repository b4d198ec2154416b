"""The embedded prompts: always the same, spread over tasks, and never in both parts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tokennorm.data import PydocSet, load_pydoc
from tokennorm.errors import ConfigError
from tokennorm.recipes.dspark import prompts as module
from tokennorm.recipes.dspark.prompt import Prompt, hash_percent, text_hash
from tokennorm.recipes.dspark.prompt_templates import TASKS
from tokennorm.recipes.dspark.prompts import DRAWS, embedded_prompts


@pytest.fixture(scope="module")
def pydoc() -> PydocSet:
    return load_pydoc()


@pytest.fixture(scope="module", autouse=True)
def everything(pydoc: PydocSet) -> Iterator[list[Prompt]]:
    """All prompts; the library is parsed once for all tests."""
    module._all_prompts.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_pydoc", lambda: pydoc)
        yield embedded_prompts()
    module._all_prompts.cache_clear()


def test_ids_and_texts_are_unique(everything: list[Prompt]) -> None:
    assert len({prompt.id for prompt in everything}) == len(everything)
    assert len({prompt.text for prompt in everything}) == len(everything)
    assert all(prompt.text == prompt.text.strip() for prompt in everything)


def test_no_parameters_are_in_both_parts(everything: list[Prompt]) -> None:
    """The keys of every draw again, beside the part that its text is in."""
    part = {prompt.text: prompt.held_out for prompt in everything if prompt.group == "structured"}
    draws = [(task, *TASKS[task](random.Random(f"{task} {draw}"))) for task in TASKS for draw in range(DRAWS)]
    assert {text for _, _, text in draws} == set(part)
    assert crossings(draws, part) == 0
    # Split by text instead of by parameters, the usual mistake, they would cross.
    by_text = {text: hash_percent(text) < module.HELD_OUT_PERCENT for text in part}
    assert crossings(draws, by_text) > 50


def crossings(draws: list[tuple[str, str, str]], part: dict[str, bool]) -> int:
    parts: dict[tuple[str, str], set[bool]] = {}
    for task, key, text in draws:
        parts.setdefault((task, key), set()).add(part[text])
    return sum(len(found) > 1 for found in parts.values())


def test_a_key_does_not_depend_on_the_wording() -> None:
    """Few parameters: several texts of one key, and the part goes with the key, not with the text."""
    texts: dict[str, set[str]] = {}
    for draw in range(DRAWS):
        key, text = TASKS["multiplication_table"](random.Random(f"multiplication_table {draw}"))
        texts.setdefault(key, set()).add(text)
    assert max(map(len, texts.values())) > 3
    assert len(texts) > 80


def test_free_form_prompts_keep_pydocs_parts(everything: list[Prompt], pydoc: PydocSet) -> None:
    free = [prompt for prompt in everything if prompt.group == "free_form"]
    assert {p.text for p in free if p.held_out} == {pair.question for pair in pydoc.held_out}
    assert {p.text for p in free if not p.held_out} == {pair.question for pair in pydoc.train}


def test_there_are_enough_and_each_task_is_in_both_parts(everything: list[Prompt]) -> None:
    structured = Counter((prompt.task, prompt.held_out) for prompt in everything if prompt.group == "structured")
    assert len(TASKS) >= 8
    assert sum(number for (_, held_out), number in structured.items() if not held_out) >= 1500
    assert sum(number for (_, held_out), number in structured.items() if held_out) >= 200
    for task in TASKS:
        share = structured[task, True] / (structured[task, True] + structured[task, False])
        assert structured[task, True] >= 15
        assert 0.05 < share < 0.22


def test_fewer_prompts_are_the_beginning_of_more_and_tasks_take_turns() -> None:
    for group in module.GROUPS:
        few = embedded_prompts(train=60, held_out=0, groups=[group])
        many = embedded_prompts(train=150, held_out=0, groups=[group])
        assert many[:60] == few
        counts = Counter(prompt.task for prompt in few)
        assert max(counts.values()) - min(counts.values()) <= 1
    both = embedded_prompts(train=5, held_out=3)
    assert [(p.group, p.held_out) for p in both] == [
        *[("structured", False)] * 5,
        *[("structured", True)] * 3,
        *[("free_form", False)] * 5,
        *[("free_form", True)] * 3,
    ]


def test_the_prompts_are_those_that_results_were_measured_with() -> None:
    """Another prompt of the same id, or another order, would change every number that was measured."""
    structured = embedded_prompts(train=30, held_out=0, groups=["structured"])
    module._all_prompts.cache_clear()
    assert embedded_prompts(train=30, held_out=0, groups=["structured"]) == structured
    assert structured[0].text == "Write the multiplication table of 50 from 50 x 1 to 50 x 10, one line each."
    assert structured[0].id == f"structured-multiplication_table-{text_hash(structured[0].text)}"


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no embedded prompts of the group 'poems'"):
        embedded_prompts(groups=["poems"])
    with pytest.raises(ConfigError, match=r"there are \d+"):
        embedded_prompts(train=10**6)
    with pytest.raises(ConfigError, match="-1 held-out"):
        embedded_prompts(held_out=-1)
