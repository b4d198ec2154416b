from __future__ import annotations

import threading

import pytest
import torch

from tokennorm.data import ChatDataset, Conversation, TextDocument, cache, encode_cached
from tokennorm.data.encoding import EncodeSettings, encode_documents
from tokennorm.data.workers import encode_in_workers
from tokennorm.errors import DataError

SETTINGS = EncodeSettings(max_length=40)


def chat(answer: str, source: str, role: str = "user") -> Conversation:
    return Conversation(
        messages=[{"role": role, "content": "hi"}, {"role": "assistant", "content": answer}], source=source
    )


DOCUMENTS = [
    chat("Hello", "d:1"),
    TextDocument(text="The quick brown fox jumps over the lazy dog. " * 4, source="d:2"),
    chat("The lazy dog " * 20, "d:3"),
    chat("x", "d:4", role="tool"),
    chat("what is </s>?", "d:5"),
]


def plain(encoded):
    return [
        (
            one.source,
            [(ids.tolist(), mask.tolist()) for ids, mask in one.pieces],
            (one.truncated, one.lost, one.without_end, one.special_text),
            None if one.error is None else (one.error.what, one.error.why, one.error.fix),
        )
        for one in encoded
    ]


@pytest.fixture
def counted(monkeypatch):
    """How often the documents were really encoded."""
    calls = []

    def encode(documents, tokenizer, settings, **_):
        calls.append(len(documents))
        return encode_documents(documents, tokenizer, settings)

    monkeypatch.setattr(cache, "encode_in_workers", encode)
    return calls


def test_the_second_time_everything_is_found_as_it_was(make_tokenizer, tmp_path, counted):
    tokenizer = make_tokenizer("mistral")
    expected = encode_documents(DOCUMENTS, tokenizer, SETTINGS)
    assert [one.error is not None for one in expected] == [False, False, False, True, False]
    for _ in range(2):
        found = encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path)
        assert plain(found) == plain(expected)
        assert all(
            ids.dtype == torch.int64 and mask.dtype == torch.bool for one in found for ids, mask in one.pieces
        )
    assert counted == [5]
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".lock", ".safetensors"]
    whole = ChatDataset.encode([DOCUMENTS[0], DOCUMENTS[2]], tokenizer, max_length=40, cache=tmp_path)
    again = ChatDataset.encode([DOCUMENTS[0], DOCUMENTS[2]], tokenizer, max_length=40, cache=tmp_path)
    assert again.statistics == whole.statistics
    assert counted == [5, 2]


def test_whatever_changes_the_tokens_or_their_names_is_encoded_anew(make_tokenizer, monkeypatch):
    def key(documents=DOCUMENTS, template="mistral", kind="byte-level", **settings):
        tokenizer = make_tokenizer(template, kind)
        return cache.cache_key(documents, tokenizer, EncodeSettings(**{"max_length": 40, **settings}))

    tools = Conversation(messages=DOCUMENTS[0].messages, source="d:1", tools=[{"name": "f"}])
    keys = [
        key(),
        key(DOCUMENTS[:-1]),
        key(DOCUMENTS[::-1]),
        key([chat("Hallo", "d:1"), *DOCUMENTS[1:]]),
        key([chat("Hello", "e:1"), *DOCUMENTS[1:]]),
        key([tools, *DOCUMENTS[1:]]),
        key(template="chatml"),
        key(kind="word-start"),
        key(max_length=41),
        key(turns="each"),
        key(template_options={"enable_thinking": False}),
    ]
    monkeypatch.setattr(cache, "ENCODING_VERSION", 0)
    keys.append(key())
    assert len(set(keys)) == len(keys)
    monkeypatch.undo()
    assert key() == keys[0]
    # Where the template shows the date, tomorrow is another key; elsewhere it is not.
    tokenizer = make_tokenizer("mistral")
    monkeypatch.setattr(cache.time, "strftime", lambda _: "tomorrow")
    assert key() == keys[0]
    tokenizer.chat_template += "{# strftime_now('%Y') #}"
    tomorrow = cache.cache_key(DOCUMENTS, tokenizer, SETTINGS)
    monkeypatch.setattr(cache.time, "strftime", lambda _: "today")
    assert cache.cache_key(DOCUMENTS, tokenizer, SETTINGS) != tomorrow


@pytest.mark.parametrize("damage", ["cut", "flipped mask", "flipped fact", "no file of ours"])
def test_a_damaged_file_is_made_again(make_tokenizer, tmp_path, counted, damage):
    tokenizer = make_tokenizer("mistral")
    expected = plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path))
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[:-30])
    elif damage == "no file of ours":
        path.write_bytes(b"{}")
    else:
        # One bit that the format itself can't notice.
        at = content.index(b"d:5") if damage == "flipped fact" else content.rindex(b"\x01\x01\x01")
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.warns(RuntimeWarning, match="is made again"):
        assert plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path)) == expected
    assert plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path)) == expected
    assert counted == [5, 5]


def test_of_two_at_once_one_encodes_and_the_other_waits(make_tokenizer, tmp_path, monkeypatch):
    calls, entered, go_on = [], threading.Event(), threading.Event()

    def slow(documents, tokenizer, settings, **_):
        calls.append(len(documents))
        entered.set()
        assert go_on.wait(60)
        return encode_documents(documents, tokenizer, settings)

    monkeypatch.setattr(cache, "encode_in_workers", slow)
    results = []
    tokenizer = make_tokenizer("mistral")
    threads = [
        threading.Thread(
            target=lambda: results.append(plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path)))
        )
        for _ in range(2)
    ]
    threads[0].start()
    assert entered.wait(60)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "it waits for the first"
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert calls == [5]
    assert results[0] == results[1]


def test_a_cache_that_can_not_be_written_costs_time_and_no_more(make_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    tokenizer = make_tokenizer("mistral")
    expected = plain(encode_documents(DOCUMENTS, tokenizer, SETTINGS))
    with pytest.warns(RuntimeWarning, match="no cache of encoded data"):
        assert plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path / "file")) == expected

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="could not be kept in .*No space left"):
        assert plain(encode_cached(DOCUMENTS, tokenizer, SETTINGS, folder=tmp_path / "new")) == expected
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".lock"]
    monkeypatch.setenv("TOKENNORM_CACHE", str(tmp_path))
    assert cache.default_cache_folder() == tmp_path / "encoded"


@pytest.mark.timeout(600)
def test_workers_give_what_one_process_gives(make_tokenizer):
    tokenizer = make_tokenizer("mistral")
    documents = DOCUMENTS * 2
    calls = []
    found = encode_in_workers(
        documents,
        tokenizer,
        SETTINGS,
        workers=2,
        documents_per_task=3,
        progress=lambda *call: calls.append(call),
    )
    assert plain(found) == plain(encode_documents(documents, tokenizer, SETTINGS))
    assert calls == [(3, 10), (6, 10), (9, 10), (10, 10)]
    with pytest.raises(DataError, match="no chat template"):
        encode_in_workers(documents, make_tokenizer(None), SETTINGS, workers=2, documents_per_task=3)
