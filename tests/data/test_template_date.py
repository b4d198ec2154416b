"""A template that prints the date is held to one day: what it renders is what it renders on that day."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from tokennorm.data import (
    ChatDataset,
    ChatEncoder,
    Conversation,
    EncodeSettings,
    can_hold_date,
    encoding_fingerprint,
    shows_date,
    with_date,
)
from tokennorm.errors import ConfigError

# As in Llama 3.2 (double quotes, a variable that may be given) and gpt-oss.
DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    "{%- endif %}{%- endif %}"
    "{{ '<|im_start|>system\n' + date_string }}"
    "{{ strftime_now( ' %Y-%m-%d, it\\'s \"%H:%M\" o\\'clock') }}<|im_end|>\n"
)
DAY = "2025-02-28"


class ThatDay(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> ThatDay:
        return cls(2025, 2, 28, tzinfo=tz)


@pytest.fixture
def dated(make_tokenizer: Any) -> Any:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = DATED + tokenizer.chat_template
    return tokenizer


CHAT = Conversation(
    messages=({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Paris"}), source="a:1"
)


def test_it_renders_what_it_renders_on_that_day(dated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = ChatEncoder(dated, date=DAY).encode(CHAT)
    today = ChatEncoder(dated).encode(CHAT)
    assert held.input_ids != today.input_ids
    text = dated.decode(held.input_ids)
    assert "28 Feb 2025 2025-02-28, it's \"00:00\" o'clock" in text
    monkeypatch.setattr(chat_template_utils, "datetime", ThatDay)
    assert ChatEncoder(dated).encode(CHAT) == held
    (turn,) = [i for i, one in enumerate(held.supervised) if one and not held.supervised[i - 1]]
    assert dated.decode(held.input_ids[turn:]).startswith("Paris")


def test_a_date_that_is_given_as_a_template_option_stays(dated: Any) -> None:
    encoder = ChatEncoder(dated, date=DAY, template_options={"date_string": "someday"})
    assert "system\nsomeday 2025-02-28" in dated.decode(encoder.encode(CHAT).input_ids)


def test_a_template_for_chats_with_tools_and_generation_blocks_is_held_as_well(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer("chatml")
    block = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    head = "{{ strftime_now('%Y') }}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tokenizer.chat_template = {"default": head + block, "tool_use": "tools " + head + block}
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    with_tools = Conversation(messages=CHAT.messages, source="b", tools=tools)
    for chat, start in ((CHAT, "1999"), (with_tools, "tools 1999")):
        encoded = ChatEncoder(tokenizer, date="1999-12-31").encode(chat)
        assert tokenizer.decode(encoded.input_ids).startswith(start)
        assert any(encoded.supervised)


def test_which_templates_show_a_date_and_which_can_be_held(make_tokenizer: Any, dated: Any) -> None:
    assert (shows_date(dated), can_hold_date(dated)) == (True, True)
    tokenizer = make_tokenizer("chatml")
    assert (shows_date(tokenizer), can_hold_date(tokenizer)) == (False, True)
    tokenizer.chat_template = "{% set form = '%Y' %}{{ strftime_now(form) }}" + tokenizer.chat_template
    assert (shows_date(tokenizer), can_hold_date(tokenizer)) == (True, False)
    assert with_date(tokenizer.chat_template, DAY) == tokenizer.chat_template
    with pytest.raises(ConfigError, match=r"the date '28\.2\.2025' can't be read"):
        ChatEncoder(dated, date="28.2.2025")


def test_sets_workers_cache_and_streams_know_the_day(
    dated: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = [CHAT] * 3

    def ids(**options: Any) -> list[list[int]]:
        found = ChatDataset.encode(chats, dated, max_length=200, cache=tmp_path, **options)
        return [sample.input_ids.tolist() for sample in found]

    held = ids(date=DAY)
    assert ids(date=DAY, workers=1) == held
    assert ids(date="2025-03-01") != held
    assert ids() != held
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    settings = [EncodeSettings(max_length=9, date=day) for day in (DAY, "2025-03-01", None, DAY)]
    marks = [encoding_fingerprint(dated, one) for one in settings]
    assert len(set(marks)) == 3
    assert marks[0] == marks[3]
