from __future__ import annotations

import json

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokennorm.data import BadRows, ChatDataset, Conversation, TextDocument, hub, read_source
from tokennorm.data.encoding import DocumentEncoder, EncodeSettings
from tokennorm.errors import ConfigError, DataError, MissingDependencyError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hello there"}]}
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


@pytest.fixture(autouse=True)
def quiet_library(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_rows(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def sources(path, **options):
    return [document.source for document in read_source(path, **options).documents]


def test_a_folder_of_jsonl_files_is_read_in_the_order_of_their_names(tmp_path):
    write_rows(tmp_path / "b.jsonl", CHAT)
    write_rows(tmp_path / "a.jsonl", CHAT, {"text": "The fox."})
    (tmp_path / "README.md").write_text("no data")
    found = read_source(tmp_path).documents
    assert [document.source for document in found] == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1"]
    assert isinstance(found[0], Conversation)
    assert found[1] == TextDocument(text="The fox.", source="a.jsonl:2")


def test_plain_text_is_a_document_per_file(tmp_path):
    (tmp_path / "two.txt").write_text("Two.\n")
    (tmp_path / "one.txt").write_text("One.\n")
    assert sources(tmp_path) == ["one.txt", "two.txt"]
    (only,) = read_source(tmp_path / "two.txt").documents
    assert only == TextDocument(text="Two.\n", source="two.txt")


def test_a_saved_data_set_gives_the_rows_of_its_split(tmp_path):
    rows = [{**CHAT, "id": i} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "one")
    found = read_source(tmp_path / "one").documents
    assert [document.source for document in found] == ["one:0", "one:1", "one:2"]
    assert list(found[2].messages) == CHAT["messages"]
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list([{"text": "The fox."}])
    )
    both.save_to_disk(tmp_path / "both")
    assert len(read_source(tmp_path / "both").documents) == 3
    (text,) = read_source(f"{tmp_path / 'both'}:test").documents
    assert text.text == "The fox."
    with pytest.raises(DataError, match=r"has no split 'valid' \(splits: train, test\)"):
        read_source(f"{tmp_path / 'both'}:valid")
    with pytest.raises(DataError, match="is one split, not 'test'"):
        read_source(f"{tmp_path / 'one'}:test")


def test_a_folder_of_tables(tmp_path):
    folder = tmp_path / "tables"
    folder.mkdir()
    datasets.Dataset.from_list([CHAT, CHAT]).to_parquet(folder / "part-0.parquet")
    assert sources(folder) == ["tables:0", "tables:1"]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"can't load .*x\.parquet as a table"):
        read_source(tmp_path / "broken")


def test_tools_in_a_table_must_be_text_where_rows_differ(tmp_path):
    """Arrow gives each row the keys of all: what would be rendered is not what the data says."""

    def calling(call):
        return {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}

    same, other = calling(CALL), calling({"function": {"name": "g", "arguments": {"b": 2}}})
    datasets.Dataset.from_list([same, same]).save_to_disk(tmp_path / "same")
    (first, _) = read_source(tmp_path / "same").documents
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    datasets.Dataset.from_list([same, other]).save_to_disk(tmp_path / "filled")
    with pytest.raises(DataError, match="2 bad rows of 2") as error:
        read_source(tmp_path / "filled")
    assert "filled:0: message 1: the arguments of a tool call hold keys whose value is null" in str(error.value)
    tools = [{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 1}}]
    datasets.Dataset.from_list([{**CHAT, "tools": tools}]).save_to_disk(tmp_path / "tools")
    with pytest.raises(DataError, match="tools:0: tools hold keys whose value is null"):
        read_source(tmp_path / "tools")
    datasets.Dataset.from_list([{**CHAT, "tools": json.dumps(tools)}]).save_to_disk(tmp_path / "text")
    assert read_source(tmp_path / "text").documents[0].tools == tuple(tools)


def test_ids_go_to_the_hub_with_configuration_and_split(monkeypatch):
    calls = []

    def load(name, config, *, split):
        calls.append((name, config, split))
        if name == "owner/missing":
            raise FileNotFoundError("not there\nmore")
        return datasets.Dataset.from_list([CHAT])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert sources("owner/name") == ["owner/name:0"]
    assert sources("owner/name:test") == ["owner/name:test:0"]
    assert sources("owner/name:en:test") == ["owner/name:en:test:0"]
    assert calls == [
        ("owner/name", None, "train"),
        ("owner/name", None, "test"),
        ("owner/name", "en", "test"),
    ]
    with pytest.raises(DataError, match=r"can't load owner/missing .*FileNotFoundError: not there\n"):
        read_source("owner/missing")
    monkeypatch.setattr(hub.importlib, "import_module", lambda name: __import__("no_such_library"))
    with pytest.raises(MissingDependencyError, match=r"tokennorm\[data\]"):
        read_source("owner/name")


def test_what_is_no_source_is_refused(tmp_path):
    write_rows(tmp_path / "mixed" / "a.jsonl", CHAT)
    (tmp_path / "mixed" / "b.txt").write_text("x")
    with pytest.raises(DataError, match=r"files of several kinds: 1 \.jsonl, 1 \.txt"):
        read_source(tmp_path / "mixed")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no data"):
        read_source(tmp_path / "empty")
    for name in ("nothing.jsonl", "nothing.txt", "folder/nothing.jsonl", "/no/such/folder"):
        with pytest.raises(DataError, match="no file"):
            read_source(tmp_path / name)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"blank\.txt: the text is empty"):
        read_source(tmp_path / "blank.txt")
    with pytest.raises(DataError, match=r"a\.jsonl is one file, it has no split 'train'"):
        read_source(f"{tmp_path / 'mixed' / 'a.jsonl'}:train")


def test_bad_rows_are_an_error_or_left_out_up_to_a_share(tmp_path):
    write_rows(tmp_path / "b.jsonl", CHAT, "nonsense", CHAT, {"prompt": "x"}, *[CHAT] * 6)
    with pytest.raises(DataError, match="2 bad rows of 10 in ") as error:
        read_source(tmp_path)
    assert "b.jsonl:2: not JSON" in str(error.value)
    assert "b.jsonl:4: no key messages" in str(error.value)
    allowed = BadRows(action="skip", max_share=0.2)
    found = read_source(tmp_path, bad_rows=allowed)
    assert [document.source for document in found.documents] == [f"b.jsonl:{i}" for i in (1, 3, 5, 6, 7, 8, 9, 10)]
    (sentence,) = allowed.report(found.errors, found.num_rows, found.where)
    assert sentence.startswith("2 bad rows of 10 in ")
    assert "b.jsonl:2:" in sentence
    with pytest.raises(DataError, match=r"2 bad rows of 10 in .*, more than the share 0\.19 that is let pass"):
        read_source(tmp_path, bad_rows=BadRows(action="skip", max_share=0.19))
    write_rows(tmp_path / "none" / "x.jsonl", "nonsense")
    with pytest.raises(DataError, match="holds no row that can be used"):
        read_source(tmp_path / "none", bad_rows=BadRows(action="skip", max_share=1))
    with pytest.raises(ConfigError, match="the action is 'ignore'"):
        BadRows(action="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="largest share is 2"):
        BadRows(max_share=2)


def test_rows_that_the_template_refuses_are_bad_rows_too(make_tokenizer):
    def chat(role, source):
        return Conversation(messages=[{"role": role, "content": "x"}, *CHAT["messages"]], source=source)

    chats = [chat("user", f"d.jsonl:{i}") for i in range(4)]
    chats.insert(2, chat("tool", "d.jsonl:bad"))
    tokenizer = make_tokenizer("mistral")
    with pytest.raises(DataError, match=r"d.jsonl:bad: .*refuses the roles"):
        ChatDataset.encode(chats, tokenizer, max_length=90)
    kept = ChatDataset.encode(chats, tokenizer, max_length=90, bad_rows=BadRows(action="skip", max_share=0.2))
    assert [sample.source for sample in kept] == [f"d.jsonl:{i}" for i in range(4)]
    stats = kept.statistics
    assert (stats.num_conversations, stats.num_samples, stats.num_bad, stats.num_dropped) == (5, 4, 1, 0)
    (note,) = kept.notes
    assert "d.jsonl:bad" in note
    with pytest.raises(DataError, match="1 bad rows of 5"):
        ChatDataset.encode(chats, tokenizer, max_length=90, bad_rows=BadRows(action="skip", max_share=0.1))


class Letters:
    """A tokenizer of one token per letter; 0 ends a text."""

    eos_token_id: int | None = 0

    def __call__(self, text, verbose=True):
        return {"input_ids": [ord(letter) for letter in text]}


@settings(max_examples=60, deadline=None)
@given(text=st.text("abc", min_size=1, max_size=40), length=st.integers(2, 12), has_end=st.booleans())
def test_every_token_of_a_text_is_predicted_once_from_what_stands_before_it(text, length, has_end):
    tokenizer = Letters()
    tokenizer.eos_token_id = 0 if has_end else None
    ids = [*map(ord, text), *([0] if has_end else [])]
    encoder = DocumentEncoder(tokenizer, EncodeSettings(max_length=length))  # pyright: ignore[reportArgumentType]
    encoded = encoder.encode(TextDocument(text=text, source="t"))
    if len(ids) < 2:
        assert "1 token long" in str(encoded.error)
        return
    dataset = ChatDataset.of_encoded([encoded])
    predicted, before = [], []
    for sample in dataset:
        assert 2 <= len(sample) <= length
        labels = sample.shift_labels().tolist()
        assert labels[-1] == -100
        predicted += labels[:-1]
        before += sample.input_ids.tolist()[:-1]
    assert predicted == ids[1:]
    assert before == ids[:-1]
    assert dataset.statistics.supervised_tokens == len(ids) - 1
