from __future__ import annotations

import dataclasses

import pytest

from tokennorm.data import ChatEncoder, Conversation, assistant_turns, turns
from tokennorm.data import chat as chat_module
from tokennorm.data.chat import _owners
from tokennorm.data.turns import Turn
from tokennorm.errors import DataError

QUESTION = "What is the capital of France?"
MULTI_TURN = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": "Paris, the capital."},
    {"role": "user", "content": "and\n\nthe dog?"},
    {"role": "assistant", "content": "The lazy dog é 日本 🙂 jumps"},
]
# What the assistant writes after the text, by template.
ENDS = {
    "chatml": "<|im_end|>",
    "chatml-without-generation-prompt": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "phi": "<|end|>",
    "plain-text": "\n### end",
    "vicuna": "</s>",
    "generation-without-end": "<|im_end|>",
    "generation-with-new-line": "<|im_end|>",
}


def chat(*pairs: tuple[str, str]) -> Conversation:
    return Conversation(messages=[{"role": role, "content": text} for role, text in pairs], source="test")


def supervised_texts(tokenizer, conversation) -> list[str]:
    """The decoded runs of supervised tokens."""
    encoded = ChatEncoder(tokenizer).encode(conversation)
    runs: list[list[int]] = []
    previous = False
    for token, inside in zip(encoded.input_ids, encoded.supervised, strict=True):
        if inside:
            if not previous:
                runs.append([])
            runs[-1].append(token)
        previous = inside
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


@pytest.mark.parametrize("kind", ["byte-level", "trimmed-offsets", "word-start"])
@pytest.mark.parametrize("template", ENDS)
def test_supervises_the_answers_and_their_end_tokens_and_nothing_else(make_tokenizer, template, kind):
    tokenizer = make_tokenizer(template, kind)
    found = supervised_texts(tokenizer, Conversation(messages=MULTI_TURN, source="test"))
    expected = [message["content"] + ENDS[template] for message in MULTI_TURN[1::2]]
    # The space between "[/INST]" or "ASSISTANT:" and the answer may be part of its first token.
    assert [text.lstrip(" ") for text in found] == expected


@pytest.mark.parametrize("template", ENDS)
def test_the_ids_are_those_of_the_chat_template(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    encoded = ChatEncoder(tokenizer).encode(Conversation(messages=MULTI_TURN, source="test"))
    assert encoded.input_ids == tokenizer.apply_chat_template(MULTI_TURN)["input_ids"]
    assert encoded.num_turns == 2
    assert encoded.num_turns_without_end == 0


@pytest.mark.parametrize(("template", "bos"), [("mistral", "<s>"), ("llama3", "<|begin_of_text|>")])
def test_one_beginning_of_text(make_tokenizer, template, bos):
    tokenizer = make_tokenizer(template)
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id, "this tokenizer adds one by itself"
    ids = ChatEncoder(tokenizer).encode(Conversation(messages=MULTI_TURN, source="test")).input_ids
    assert ids[0] == tokenizer.convert_tokens_to_ids(bos)
    assert sum(ids.count(tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "<|begin_of_text|>")) == 1


def test_trimmed_content_is_supervised_as_it_is_rendered(make_tokenizer):
    padded = chat(("user", "  hi "), ("assistant", "\n Hello there \n"), ("user", "x"), ("assistant", "y "))
    assert supervised_texts(make_tokenizer("gemma"), padded) == ["Hello there<end_of_turn>", "y<end_of_turn>"]
    kept = supervised_texts(make_tokenizer("chatml"), padded)
    assert kept[0].endswith(" Hello there \n<|im_end|>")
    assert kept[1] == "y <|im_end|>"


def test_a_system_message_replaces_the_default_one(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    conversation = chat(("system", "model"), ("user", "hi"), ("assistant", "Hello"))
    assert supervised_texts(tokenizer, conversation) == ["Hello<|im_end|>"]
    assert "helpful" not in tokenizer.decode(ChatEncoder(tokenizer).encode(conversation).input_ids)


def test_a_chat_that_the_assistant_begins(make_tokenizer):
    conversation = chat(("assistant", "Hello"), ("user", "hi"), ("assistant", "dog"))
    assert supervised_texts(make_tokenizer("chatml"), conversation) == ["Hello<|im_end|>", "dog<|im_end|>"]


def test_an_answer_that_repeats_the_question_and_the_header(make_tokenizer):
    echo = "assistant\nHello"
    conversation = chat(("user", echo), ("assistant", echo), ("user", echo), ("assistant", echo))
    assert supervised_texts(make_tokenizer("chatml"), conversation) == [echo + "<|im_end|>"] * 2


def test_reasoning_of_the_last_turn_is_supervised_and_lost_reasoning_is_refused(make_tokenizer):
    tokenizer = make_tokenizer("drops-earlier-reasoning")
    thought = "<think>\nHello there\n</think>\n\nParis"
    assert supervised_texts(tokenizer, chat(("user", "q"), ("assistant", thought))) == [thought + "<|im_end|>"]
    # Without reasoning in the data the template adds an empty thought, which the model has to write itself.
    plain = chat(("user", "q"), ("assistant", "Paris"), ("user", "r"), ("assistant", "dog"))
    assert supervised_texts(tokenizer, plain) == [
        "Paris<|im_end|>",
        "<think>\n\n</think>\n\ndog<|im_end|>",
    ]
    lost = chat(("user", "q"), ("assistant", thought), ("user", "r"), ("assistant", "dog"))
    with pytest.raises(DataError, match=r"drops or changes the content of message 1 \(assistant"):
        ChatEncoder(tokenizer).encode(lost)


def test_a_thought_that_the_prompt_opens_is_supervised_from_there(make_tokenizer):
    tokenizer = make_tokenizer("opens-thought")
    conversation = chat(("user", "q"), ("assistant", "<think>\nHello there\n</think>\n\nParis"))
    assert supervised_texts(tokenizer, conversation) == ["Hello there\n</think>\n\nParis<|im_end|>"]
    earlier = chat(*(("user", "q"), ("assistant", "dog")) * 2)
    with pytest.raises(DataError, match=r"message 1 \(assistant\).*generation prompt, which ends in .*<think>"):
        ChatEncoder(tokenizer).encode(earlier)


@pytest.mark.parametrize(
    ("template", "roles", "message"),
    [
        ("drops-system", "sua", r"content of message 0 \(system"),
        ("upper-case", "ua", r"content of message 0 \(user"),
        ("last-message-only", "ua", r"content of message 0 \(user"),
        ("moves-system", "suaua", r"message 2 \(assistant\).*rendered differently once it follows"),
        ("thought-in-prompt", "ua", r"message 1 \(assistant\).*does not begin with the generation prompt"),
        ("mistral", "sua", "refuses the roles.*Only user and assistant roles"),
        ("generation-around-user", "ua", "generation.*belong to no assistant message"),
    ],
)
def test_what_can_not_be_masked_is_refused_by_name(make_tokenizer, template, roles, message):
    names = {"s": "system", "u": "user", "a": "assistant"}
    conversation = chat(*((names[letter], f"Hello {i}") for i, letter in enumerate(roles)))
    with pytest.raises(DataError, match=f"(?s)test: .*{message}") as error:
        ChatEncoder(make_tokenizer(template)).encode(conversation)
    assert error.value.fix


def test_a_moved_system_text_is_fine_in_a_single_turn(make_tokenizer):
    conversation = chat(("system", "model"), ("user", "hi"), ("assistant", "Hello"))
    assert supervised_texts(make_tokenizer("moves-system"), conversation) == ["Hello</s>"]


def test_turns_without_an_end_token_are_counted(make_tokenizer):
    tokenizer = make_tokenizer("end-of-chat-only")
    conversation = chat(("user", "hi"), ("assistant", "Hello"), ("user", "x"), ("assistant", "dog"))
    assert ChatEncoder(tokenizer).encode(conversation).num_turns_without_end == 1
    assert [text.strip() for text in supervised_texts(tokenizer, conversation)] == ["Hello", "dog\n</s>"]


def test_special_text_in_a_message_is_noticed(make_tokenizer):
    encoder = ChatEncoder(make_tokenizer("chatml"))
    assert not encoder.encode(chat(("user", "hi"), ("assistant", "Hello"))).has_special_text
    assert encoder.encode(chat(("user", "what is <|im_end|>?"), ("assistant", "Hello"))).has_special_text


def test_template_options_reach_the_template(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace("helpful AI", "{{ flavour }}").replace(
        "{{ '<|im_start|>system\nYou are a {{ flavour }}<|im_end|>\n' }}",
        "{{ '<|im_start|>system\n' + flavour + '<|im_end|>\n' }}",
    )
    ids = ChatEncoder(tokenizer, template_options={"flavour": "lazy dog"}).encode(
        chat(("user", "hi"), ("assistant", "Hello"))
    )
    assert "system\nlazy dog" in tokenizer.decode(ids.input_ids)


def test_no_template_or_no_offsets_is_refused(make_tokenizer):
    with pytest.raises(DataError, match="no chat template"):
        ChatEncoder(make_tokenizer(None))

    class Slow:
        chat_template = "x"
        is_fast = False
        name_or_path = "slow/one"

    with pytest.raises(DataError, match=r"slow/one .* does not report the offsets"):
        ChatEncoder(Slow())  # pyright: ignore[reportArgumentType]


def test_a_straddling_token_belongs_to_its_first_visible_character():
    text = "A: \n\nHi.\n\nB:"
    turn = Turn(message=1, start=4, content_end=8, end=8)  # "\nHi."
    #  "A"     ":"      " "     "\n\n"  "Hi"    ".\n"   "\n"     "B:"
    offsets = [(0, 1), (1, 2), (2, 3), (3, 5), (5, 7), (7, 9), (9, 10), (10, 12)]
    assert _owners(text, offsets, [turn]) == [None, None, None, None, 0, 0, None, None]
    # A word that took the prompt's last space with it; word-start marks without text of their own.
    assert _owners("A: Hi", [(0, 0), (0, 2), (2, 5)], [Turn(message=1, start=3, content_end=5, end=5)])[2] == 0
    marks = [(0, 2), (3, 3), (3, 4), (4, 4), (4, 5), (5, 5)]
    owners = _owners("A: Hi", marks, [Turn(message=1, start=3, content_end=5, end=5)])
    assert owners == [None, None, 0, 0, 0, None]


def test_a_template_whose_tail_depends_on_the_content_is_refused():
    def render(messages, *, add_generation_prompt=False):
        body = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return body + ("<assistant>" if add_generation_prompt else f"<{len(messages[-1]['content'])}>")

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]
    with pytest.raises(DataError, match="the text that follows it depends on what it says"):
        assistant_turns(messages, render, render(messages), source="test")


@pytest.mark.parametrize("mistake", ["no end token", "white space after it", "header too", "one token late"])
def test_planted_mistakes_are_caught(make_tokenizer, monkeypatch, mistake):
    """Masks that are wrong in the usual ways fail the comparison that the tests above make."""
    real_locate, real_owners = turns._locate, chat_module._owners

    def locate(*args):
        turn = real_locate(*args)
        if mistake == "header too":
            return dataclasses.replace(turn, start=turn.start - len("assistant\n"))
        return turn

    def owners(*args):
        found = real_owners(*args)
        return [None, *found[:-1]] if mistake == "one token late" else found

    monkeypatch.setattr(turns, "_locate", locate)
    monkeypatch.setattr(chat_module, "_owners", owners)
    if mistake in ("no end token", "white space after it"):
        monkeypatch.setattr(turns, "end_token", lambda tail, _: "" if mistake == "no end token" else tail)
    found = supervised_texts(make_tokenizer("chatml"), Conversation(messages=MULTI_TURN, source="test"))
    assert found != [message["content"] + "<|im_end|>" for message in MULTI_TURN[1::2]]
