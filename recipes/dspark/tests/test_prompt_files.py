"""A user's own prompts: read as written, split once and for all, every bad line named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokennorm.errors import ConfigError, DataError
from tokennorm.recipes.dspark.prompts import Prompt, read_prompts


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "own.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_prompts_and_chats(tmp_path: Path) -> None:
    system, first = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}
    chat = [system, first, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Why?"}]
    answered = [*chat, {"role": "assistant", "content": "Because."}]
    path = write(
        tmp_path,
        {"prompt": "Write a poem", "held_out": False, "source": "ignored"},
        "",
        {"messages": answered, "id": "x", "group": "chats", "task": "why", "held_out": True},
        {"messages": [first]},
    )
    one, two, three = read_prompts(path)
    assert (one.text, one.group, one.task, one.held_out) == ("Write a poem", "own", "own", False)
    # The old answer is left out, the turns before the question are not.
    assert two == Prompt(
        id="x",
        group="chats",
        task="why",
        text="Why?",
        held_out=True,
        context=(("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi")),
    )
    assert two.messages == chat
    assert (three.text, three.context, three.held_out) == ("Hello", (), False)
    assert len({one.id, two.id, three.id}) == 3


def test_a_hash_decides_the_part_where_the_file_does_not(tmp_path: Path) -> None:
    rows = [{"prompt": f"Question {number}"} for number in range(400)]
    prompts = read_prompts(write(tmp_path, *rows), held_out_fraction=0.2)
    part = {prompt.text: prompt.held_out for prompt in prompts}
    assert 50 < sum(part.values()) < 110
    # Neither the order nor the company nor the names change it.
    named = [row | {"id": f"n{i}", "group": "g"} for i, row in enumerate(rows[::-1][:350])]
    again = read_prompts(write(tmp_path, *named), held_out_fraction=0.2)
    assert all(prompt.held_out is part[prompt.text] for prompt in again)
    assert not any(prompt.held_out for prompt in read_prompts(write(tmp_path, *rows), held_out_fraction=0))
    # However few there are, both parts have one.
    for fraction in (0.001, 0.999):
        few = read_prompts(write(tmp_path, *rows[:2]), held_out_fraction=fraction)
        assert sorted(prompt.held_out for prompt in few) == [False, True]
    with pytest.raises(DataError, match="one prompt can't be both"):
        read_prompts(write(tmp_path, rows[0]))


def test_repeated_prompts_count_once(tmp_path: Path) -> None:
    said: list[str] = []
    path = write(tmp_path, *[{"prompt": text} for text in ("a", "b", "a", "c", "b")])
    assert [prompt.text for prompt in read_prompts(path, say=said.append)] == ["a", "b", "c"]
    assert said == ["2 of 5 prompts repeat others and were left out"]
    path = write(tmp_path, {"prompt": "a"}, {"prompt": "a", "held_out": True})
    with pytest.raises(DataError, match=r"own.jsonl:2: the prompt of own.jsonl:1, once held out and once not"):
        read_prompts(path)
    path = write(tmp_path, {"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"})
    with pytest.raises(DataError, match=r"own.jsonl:2: the id 'x' is that of own.jsonl:1"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("{oops", "own.jsonl:2: not JSON"),
        ("[1]", "own.jsonl:2: the row is a list"),
        ({"text": "x"}, "own.jsonl:2: neither prompt nor messages (keys: text)"),
        ({"prompt": "x", "messages": []}, "own.jsonl:2: both prompt and messages"),
        ({"prompt": " "}, "own.jsonl:2: message 0 (user) is empty"),
        ({"prompt": 7}, "own.jsonl:2: message 0 (user) has a int as content"),
        ({"messages": []}, "own.jsonl:2: the list of messages is empty"),
        ({"messages": "x"}, "own.jsonl:2: messages is a str"),
        ({"messages": [{"role": "system", "content": "x"}]}, "own.jsonl:2: no message of the user"),
        ({"prompt": "x", "id": 3}, "own.jsonl:2: id is 3, not a text"),
        ({"prompt": "x", "group": ""}, "own.jsonl:2: group is '', not a text"),
        ({"prompt": "x", "held_out": "yes"}, "own.jsonl:2: held_out is 'yes'"),
        ({"prompt": "x", "tools": [1]}, "own.jsonl:2: the row has tools"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: Any, named: str) -> None:
    path = write(tmp_path, {"prompt": "fine"}, row)
    with pytest.raises(DataError, match=re.escape(named)):
        read_prompts(path)
    # Several at once, in one message.
    path = write(tmp_path, {"prompt": "fine"}, row, *["{"] * 6)
    with pytest.raises(DataError, match="7 bad lines in") as caught:
        read_prompts(path)
    assert named in str(caught.value)
    assert "and 2 more" in str(caught.value)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(DataError, match="can't read"):
        read_prompts(tmp_path)
    (tmp_path / "own.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"own.jsonl:2: not UTF-8"):
        read_prompts(tmp_path / "own.jsonl")
    with pytest.raises(ConfigError, match="held_out_fraction is 1"):
        read_prompts(tmp_path / "own.jsonl", held_out_fraction=1)
