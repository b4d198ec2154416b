"""Tool calls through templates as real models have them: every mask against a text put together by hand."""

from __future__ import annotations

import dataclasses

import pytest

from tokennorm.data import ChatDataset, ChatEncoder, Conversation, tool_turns, turns
from tokennorm.errors import DataError

# Hermes and Qwen 2.5: tools in the system text, calls in tags, results in turns of the user.
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\nTools:' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{% set c = c.function %}"
    "{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.name + \'", "arguments": \' + c.arguments | tojson }}'
    "{{ '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen 3: reasoning is shown after the last question only, and a last turn without any gets an empty one.
QWEN3 = HERMES.replace(
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}",
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}",
)
# Mistral: no header and no generation prompt, results without a turn.
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.tool_calls %}{{ '[CALLS][' }}{% for c in m.tool_calls %}{{ ', ' if not loop.first else '' }}"
    "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}"
    "{% endfor %}{{ ']</s>' }}{% elif m.role == 'tool' %}{{ '[RESULT]' + m.content + '[/RESULT]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": 'Par"is', "days": 2}}}
CALL_TEXT = '{"name": "weather", "arguments": {"city": "Par\\"is", "days": 2}}'
OTHER = {"type": "function", "function": {"name": "fox", "arguments": {}}}
CHAT = [
    {"role": "user", "content": "What is the weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"sun": "</tool_call> weather"}'},
    {"role": "tool", "content": "dog"},
    {"role": "assistant", "content": "Hello there", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "content": "cat"},
    {"role": "assistant", "content": "The sun is there."},
]
CALLS = [
    f"<tool_call>\n{CALL_TEXT}\n</tool_call><|im_end|>",
    f'Hello there\n<tool_call>\n{CALL_TEXT}\n</tool_call>\n<tool_call>\n{{"name": "fox", "arguments": {{}}}}\n'
    "</tool_call><|im_end|>",
    "The sun is there.<|im_end|>",
]


def conversation(messages, tools=None) -> Conversation:
    return Conversation(messages=messages, tools=tools, source="test")


def supervised_texts(tokenizer, chat, **options) -> list[str]:
    encoded = ChatEncoder(tokenizer).encode(chat, **options)
    runs: list[list[int]] = []
    for i, inside in enumerate(encoded.supervised):
        if inside:
            if not i or not encoded.supervised[i - 1]:
                runs.append([])
            runs[-1].append(encoded.input_ids[i])
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.fixture
def with_template(make_tokenizer):
    def make(template: str, special: tuple[str, ...] = ()):
        tokenizer = make_tokenizer("chatml")
        tokenizer.chat_template = template
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        return tokenizer

    return make


# Some models have their tool tags as special tokens, some as text.
@pytest.mark.parametrize("special", [(), ("<tool_call>", "</tool_call>")])
def test_calls_are_supervised_and_results_are_not(with_template, special):
    tokenizer = with_template(HERMES, special)
    chat = conversation(CHAT, TOOLS)
    assert supervised_texts(tokenizer, chat) == CALLS
    ids = ChatEncoder(tokenizer).encode(chat).input_ids
    assert ids == tokenizer.apply_chat_template(list(chat.messages), tools=TOOLS)["input_ids"]
    assert '"parameters"' in tokenizer.decode(ids)


@pytest.mark.parametrize("mistake", ["header too", "one token late", "no end token", "result too"])
def test_planted_mistakes_are_caught(with_template, monkeypatch, mistake):
    tokenizer, chat = with_template(HERMES), conversation(CHAT, TOOLS)
    real = tool_turns.locate_tool_turn

    def moved(*args):
        turn = real(*args)
        return {
            "header too": dataclasses.replace(turn, start=turn.start - len("assistant\n")),
            "one token late": dataclasses.replace(turn, start=turn.start + 1),
            "no end token": dataclasses.replace(turn, end=turn.content_end),
            "result too": dataclasses.replace(turn, end=turn.end + 30),
        }[mistake]

    monkeypatch.setattr(turns, "locate_tool_turn", moved)
    assert supervised_texts(tokenizer, chat) != CALLS


def test_reasoning_between_calls_is_supervised_where_the_template_shows_it(with_template):
    tokenizer = with_template(QWEN3)
    thinking = [{**m, "reasoning_content": "The fox?"} if m["role"] == "assistant" else m for m in CHAT]
    thought = "<think>\nThe fox?\n</think>\n\n"
    assert supervised_texts(tokenizer, conversation(thinking, TOOLS)) == [thought + text for text in CALLS]
    # Without reasoning in the data the last turn gets an empty thought, which earlier ones do not have.
    *calls, answer = CALLS
    assert supervised_texts(tokenizer, conversation(CHAT, TOOLS)) == [*calls, "<think>\n\n</think>\n\n" + answer]


def test_reasoning_that_a_later_question_removes_is_refused_or_split(with_template):
    tokenizer = with_template(QWEN3)
    thought = "<think>\nThe fox?\n</think>\n\n"
    chat = conversation(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "Paris", "reasoning_content": "The fox?"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "dog", "reasoning_content": "The fox?"},
        ]
    )
    with pytest.raises(DataError, match=r"changes the reasoning_content of message 1 .*8 characters") as error:
        ChatEncoder(tokenizer).encode(chat)
    assert "turns: each" in str(error.value)
    assert supervised_texts(tokenizer, chat, only_last_turn=True) == [thought + "dog<|im_end|>"]
    dataset = ChatDataset.encode([chat], tokenizer, max_length=200, turns="each")
    texts = [tokenizer.decode(sample.input_ids[sample.supervised]) for sample in dataset]
    assert texts == [thought + "Paris<|im_end|>", thought + "dog<|im_end|>"]
    # The model sees the earlier turn as the template shows it then: without its reasoning.
    prompt = tokenizer.decode(dataset[1].input_ids[~dataset[1].supervised])
    assert prompt.count("Paris") == 1
    assert "fox" not in prompt
    assert (dataset.statistics.num_conversations, dataset.statistics.num_samples) == (1, 2)


def test_a_template_without_headers(with_template):
    tokenizer = with_template(MISTRAL, ("[CALLS]", "[RESULT]", "[/RESULT]"))
    chat = [
        CHAT[0],
        {"role": "assistant", "tool_calls": [OTHER, CALL]},
        {"role": "tool", "content": "dog"},
        {"role": "assistant", "content": "Hello"},
    ]
    found = supervised_texts(tokenizer, conversation(chat))
    assert [text.strip() for text in found] == [
        f'[CALLS][{{"name": "fox", "arguments": {{}}}}, {CALL_TEXT}]</s>',
        "Hello</s>",
    ]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (HERMES.replace("t | tojson", "'one'"), CHAT, TOOLS, "does not show the tool 'weather'"),
        (
            HERMES.partition("{% for c in")[0] + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}",
            CHAT[:2],
            None,
            "drops",
        ),
        (HERMES.replace("c.arguments | tojson", "'{}'"), CHAT[:2], None, "the call of weather of message 1"),
        (HERMES.replace("'\n' + m.content", "'\n'"), CHAT, None, "drops or changes the content of message"),
        (
            # Calls are closed by another token than answers, behind a second one: which is it?
            HERMES.replace("</tool_call>'", "</tool_call><|end|>\n<|eot_id|>'").replace(
                "{% endfor %}{{ '<|im_end|>\n' }}",
                "{% endfor %}{% if not m.tool_calls %}{{ '<|im_end|>\n' }}{% endif %}",
            ),
            CHAT[:2],
            None,
            "its tool calls end in another way than an answer does",
        ),
        (HERMES.replace("{{ '<tool_call>", "{{ c.name + '<tool_call>"), CHAT[:2], None, "content more than once"),
    ],
)
def test_what_can_not_be_masked_is_refused(with_template, template, messages, tools, message):
    with pytest.raises(DataError, match=f"test: .*{message}"):
        ChatEncoder(with_template(template)).encode(conversation(messages, tools))
