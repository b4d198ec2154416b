from __future__ import annotations

import json

import pytest

from tokennorm.data import Conversation, read_jsonl
from tokennorm.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello\u2028you"}]}


def write(path, *rows):
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def with_messages(*messages):
    return {"messages": list(messages)}


def calling(calls):
    return with_messages(USER, {"role": "assistant", "tool_calls": calls})


USER, ASSISTANT = GOOD["messages"]


def test_reads_rows_in_order_and_names_their_lines(tmp_path):
    path = write(tmp_path / "good.jsonl", GOOD, "", {"id": 3, **GOOD}, "   ")
    first, second = read_jsonl(path)
    assert (first.source, second.source) == ("good.jsonl:1", "good.jsonl:3")
    assert list(first.messages) == GOOD["messages"]
    assert first.roles == ("user", "assistant")


def test_a_byte_order_mark_and_windows_line_ends_are_no_data(tmp_path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + json.dumps(GOOD).encode() + b"\r\n")
    assert [conversation.source for conversation in read_jsonl(path)] == ["windows.jsonl:1", "windows.jsonl:2"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [', "not JSON: Expecting value at column 15"),
        ("[1, 2]", "the row is a list, not an object"),
        ({"prompt": "hi"}, r"no key messages and no key text \(keys: prompt\)"),
        ({"text": "hi"}, "the row is plain text, a chat is needed here"),
        ({"text": None}, "text is null, not text"),
        ({"text": " \n"}, "the text is empty"),
        ('{"text": "\\ud83d"}', "the text holds half a surrogate pair"),
        ({"messages": None}, "messages is null, not a list"),
        ({"messages": "hi"}, "messages is a str, not a list"),
        ({"messages": []}, "the list of messages is empty"),
        (with_messages("hi"), "message 0 is a str, not an object"),
        (with_messages({"role": "user"}), r"message 0 has no content \(keys: role\)"),
        (with_messages({}), r"message 0 has no role and no content \(keys: none\)"),
        (with_messages({**USER, "role": "human"}, ASSISTANT), "message 0 has the role 'human'"),
        (with_messages({**USER, "content": ["x"]}, ASSISTANT), r"message 0 \(user\) has a list as content"),
        (with_messages({**USER, "content": None}, ASSISTANT), r"message 0 \(user\) has null as content"),
        (with_messages(USER, {**ASSISTANT, "content": " \n"}), r"message 1 \(assistant\) is empty"),
        (with_messages(USER, USER), r"no assistant message among 2 \(roles: user, user\)"),
        (
            with_messages(USER, {**ASSISTANT, "weight": 0}),
            "message 1 has keys that tokennorm does not read: weight",
        ),
        (
            with_messages({**USER, "tool_calls": [{"name": "f"}]}, ASSISTANT),
            "message 0 has keys that tokennorm does not read: tool_calls",
        ),
        ({**GOOD, "documents": [{"title": "f"}]}, "the row has documents"),
        ({**GOOD, "tools": {"name": "f"}}, "tools is a dict, not a list"),
        ({**GOOD, "tools": [{"type": "function"}]}, "tool 0 has no name"),
        ({**GOOD, "tools": "[{"}, "tools is text that is not JSON: .* at column 3"),
        (calling("f"), r"message 1: tool_calls is a str, not a list"),
        (calling(["f"]), r"message 1: tool call 0 is a str, not an object"),
        (calling([{"function": {"arguments": {}}}]), "message 1: tool call 0 has no name"),
        (calling([{"name": "f", "arguments": [1]}]), "message 1: tool call 0: arguments is a list, not an object"),
        (
            calling([{"name": "f", "arguments": "{a"}]),
            "message 1: tool call 0: arguments is text that is not JSON",
        ),
        (calling([{"name": "f", "weight": 2}]), "message 1: tool call 0 has keys .*: weight"),
        (calling([{"name": "f", "type": "code"}]), "message 1: tool call 0 has the type 'code'"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"message 0 \(user\) holds half a surrogate pair at character 0",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, message):
    path = write(tmp_path / "bad.jsonl", GOOD, row)
    with pytest.raises(DataError, match=f"bad.jsonl:2: {message}"):
        read_jsonl(path)


def test_tool_calls_are_read_in_one_form():
    arguments = {"city": "Paris", "days": 2}
    long = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    for call in (
        long,
        {"name": "weather", "arguments": arguments},
        {"function": {"name": "weather", "arguments": json.dumps(arguments)}},
    ):
        built = Conversation(
            messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}], source="x"
        )
        assert built.messages[1] == {"role": "assistant", "content": "", "tool_calls": [long]}
    named = Conversation(
        messages=[USER, {"role": "assistant", "tool_calls": [{"id": "c1", **long}]}], source="x", tools="[]"
    )
    assert named.messages[1]["tool_calls"] == [{"id": "c1", **long}]
    assert named.tools is None
    # What tables put where a message has no such key.
    filled = {**ASSISTANT, "tool_calls": None, "name": None, "weight": None, "tool_call_id": []}
    assert Conversation(messages=[USER, filled], source="x").messages[1] == ASSISTANT


def test_several_bad_rows_are_listed_and_counted(tmp_path):
    path = write(tmp_path / "bad.jsonl", GOOD, *(["nonsense"] * 7), GOOD)
    with pytest.raises(DataError) as error:
        read_jsonl(path)
    text = str(error.value)
    assert "7 bad rows of 9" in text
    assert "bad.jsonl:2:" in text
    assert "bad.jsonl:6:" in text
    assert "bad.jsonl:7:" not in text
    assert "and 2 more" in text


def test_files_that_can_not_be_read(tmp_path):
    with pytest.raises(DataError, match=r"no file .*nothing\.jsonl"):
        read_jsonl(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="is not a file"):
        read_jsonl(tmp_path)
    with pytest.raises(DataError, match=r"empty\.jsonl holds no row"):
        read_jsonl(write(tmp_path / "empty.jsonl", "", " "))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(GOOD).encode() + b'\n{"messages": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        read_jsonl(latin)


def test_a_conversation_is_checked_where_it_is_built():
    with pytest.raises(DataError, match="my set: no assistant message"):
        Conversation(messages=[USER], source="my set")
    built = Conversation(messages=[USER, ASSISTANT], source="my set")
    assert built == Conversation(messages=(USER, ASSISTANT), source="my set")
