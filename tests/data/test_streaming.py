"""Streams: the same samples in the same order for any ranks, cuts, workers and interruptions."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from itertools import islice

import datasets
import pytest
import torch

from tokennorm.data import (
    BadRows,
    ChatDataset,
    EncodeSettings,
    Prefetch,
    StreamPart,
    StreamSettings,
    StreamSource,
    StreamWindows,
    hub,
    read_source,
)
from tokennorm.data.streaming.reader import SourceReader
from tokennorm.errors import ConfigError, DataError, NoSupervisedTokenError

LENGTH = 12


class Letters:
    """A tokenizer of one token per letter; 0 ends a text."""

    eos_token_id = 0
    encoded = 0

    def __call__(self, text, verbose=True):
        Letters.encoded += 1
        return {"input_ids": [ord(letter) for letter in text]}


def write(path, count, letter="a", seed=0):
    """Texts of very uneven length, some of several pieces, each told by its number."""
    generator = random.Random(seed)
    rows = [{"text": f"{letter}{i}:" + letter * generator.choice([1, 2, 3, 30])} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(path, *, parts=None, windows=None, **options):
    options = {"passes": 1, "shuffle_buffer": 7, "seed": 3, **options}
    parts = parts or [StreamPart(source=StreamSource(path))]
    cut = {
        "micro_batch_size": 1,
        "micro_batches_per_window": 4,
        "pack_length": 16,
        "pack_buffer": 5,
        "pad_token_id": 0,
    }
    settings = StreamSettings(encode=EncodeSettings(max_length=LENGTH), **options)
    return StreamWindows(parts, Letters(), settings, **{**cut, **(windows or {})})


def documents(window):
    """The documents of a window in order: source, tokens and labels."""
    found = []
    for batch in window:
        for ids, labels, places, sources in zip(
            batch["input_ids"], batch["shift_labels"], batch["position_ids"], batch["sources"], strict=True
        ):
            starts = [*(places == 0).nonzero().flatten().tolist(), len(ids)]
            for source, start, end in zip(sources, starts, starts[1:], strict=False):
                found.append((source, ids[start:end].tolist(), labels[start:end].tolist()))
    return found


@pytest.fixture
def rows(tmp_path):
    return write(tmp_path / "rows.jsonl", 50)


@pytest.mark.parametrize("pack_length", [16, None])
def test_a_pass_has_every_sample_and_token_of_the_set_once(rows, pack_length):
    whole = ChatDataset.encode(read_source(rows).documents, Letters(), max_length=LENGTH)
    batches = [batch for window in stream(rows, windows={"pack_length": pack_length}) for batch in window]
    found = documents(batches) if pack_length else []
    if pack_length:
        expected = [(s.source, s.input_ids.tolist(), s.shift_labels().tolist()) for s in whole]
        assert sorted(found) == sorted(expected)
        assert found != expected, "shuffled"
    assert Counter(s for batch in batches for row in batch["sources"] for s in row) == Counter(
        sample.source for sample in whole
    )
    for name, total in (
        ("effective_tokens", whole.statistics.supervised_tokens),
        ("total_tokens", sum(whole.lengths)),
    ):
        assert sum(batch[name] for batch in batches) == total
    assert all(b["effective_tokens"] == int((b["shift_labels"] != -100).sum()) for b in batches)
    windows = stream(rows)
    list(windows)
    assert windows.accounts()[0].statistics == whole.statistics


def test_the_order_knows_nothing_of_ranks_and_cuts(rows):
    alone = [documents(window) for window in stream(rows)]
    assert len(alone) > 5
    for ranks in (2, 3, 4):
        shares = [list(stream(rows, windows={"rank": rank, "world_size": ranks})) for rank in range(ranks)]
        for number, expected in enumerate(alone):
            views = [share[number] for share in shares]
            assert len({len(view) for view in views}) == 1, "as many micro-batches on every rank"
            together = [view[place] for place in range(len(views[0])) for view in views]
            assert documents(together) == expected
        assert all(len(share) == len(alone) for share in shares)
    cut = {"micro_batch_size": 4, "micro_batches_per_window": 1}
    assert [documents(window) for window in stream(rows, windows=cut)] == alone
    assert [documents(window) for window in stream(rows, seed=4)] != alone
    plain = [source for window in stream(rows, shuffle=False, windows={"pack_length": None}) for b in window
             for (source,) in b["sources"]]  # fmt: skip
    assert list(dict.fromkeys(plain)) == [f"rows.jsonl:{i}" for i in range(1, 51)]


@pytest.mark.parametrize("pack_length", [16, None])
def test_it_goes_on_from_any_window_on_other_ranks_to_the_same_samples(rows, pack_length):
    """Over the border of two passes, and in the middle of a row that makes several samples."""
    cut = {"pack_length": pack_length}
    whole = stream(rows, passes=2, windows=cut)
    made, places = [], [json.loads(json.dumps(whole.state_dict()))]
    for window in whole:
        made.append(window)
        places.append(json.loads(json.dumps(whole.state_dict())))
    assert any(place["rest"] for place in places)
    assert (pack_length is not None) == any(place["pending"] for place in places)
    for number in range(0, len(places), 3):
        views = []
        for rank in range(2):
            other = stream(rows, passes=2, windows={"rank": rank, "world_size": 2, **cut})
            other.load_state_dict(places[number])
            views.append(list(other))
        left = made[number:]
        assert [len(view) for view in views] == [len(left)] * 2
        for index, expected in enumerate(left):
            together = [view[index][place] for place in range(len(views[0][index])) for view in views]
            real = [batch for batch in together if batch["total_tokens"]]
            assert [b["sources"] for b in real] == [b["sources"] for b in expected]
            assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(real, expected, strict=True))
        assert other.state_dict() == places[-1], "the counts go on too"


def test_what_goes_on_encodes_the_rows_that_wait_and_no_other(rows):
    whole = stream(rows, passes=None)
    for _ in islice(whole, 30):
        pass
    state = whole.state_dict()
    before = Letters.encoded
    again = stream(rows, passes=None)
    again.load_state_dict(state)
    again.load_state_dict(state)  # as Prefetch does
    assert Letters.encoded - before == len(
        {tuple(key[:2]) for key in [*state["pending"], *filter(None, [state["rest"]])]}
    )
    assert Letters.encoded - before <= 6


def test_windows_can_be_prepared_ahead_and_the_place_is_that_of_the_taken_one(rows):
    expected = [documents(window) for window in stream(rows)]
    first = Prefetch(stream(rows), 3)
    taken = [documents(window) for window in islice(first, 3)]
    second = Prefetch(stream(rows), 3)
    second.load_state_dict(first.state_dict())
    assert taken + [documents(window) for window in second] == expected


def test_only_the_buffers_are_held_and_nothing_is_read_before_the_first_window(rows):
    class Counting(StreamSource):
        read = 0

        def __iter__(self):
            for row in super().__iter__():
                self.read += 1
                yield row

    big = write(rows.parent / "big.jsonl", 3000)
    source = Counting(big)
    windows = stream(big, parts=[StreamPart(source=source)], shuffle_buffer=40, passes=None)
    assert source.read == 0
    next(iter(windows))
    # The buffer, as many as were drawn for the window and the packing.
    assert source.read <= 40 + 2 * (4 * 16 + 5)
    reader = SourceReader(source, number=0, seed=0, buffer=40)
    start = source.read
    for drawn in range(1, 501):
        assert reader.draw() is not None
        assert reader.held <= 40
        assert source.read - start <= drawn + 40
    reader.close()


def test_sources_are_mixed_in_their_shares_and_each_is_read_once_in_a_pass(tmp_path):
    parts = [
        StreamPart(source=StreamSource(write(tmp_path / "a.jsonl", 30)), name="a", weight=Fraction(1, 2)),
        StreamPart(source=StreamSource(write(tmp_path / "b.jsonl", 20, "b")), name="b", weight=Fraction(3, 2)),
    ]
    said: list[str] = []
    windows = stream(None, parts=parts, passes=None, windows={"pack_length": None, "say": said.append})
    order, groups = [], {}
    for window in islice(windows, 60):
        for batch in window:
            ((source,),) = batch["sources"]
            order.append(source)
            groups[source[0]] = set(batch["groups"][batch["shift_labels"] != -100].tolist())
    rows = [source for source, before in zip(order, [None, *order], strict=False) if source != before]
    for start in range(0, len(rows) - 40, 7):
        share = Counter(source[0] for source in rows[start : start + 40])
        assert abs(share["a"] - 10) <= 1
    first_b = [source for source in rows if source[0] == "b"][:40]
    assert set(first_b[:20]) == set(first_b[20:]) == {f"b.jsonl:{i}" for i in range(1, 21)}
    assert first_b[:20] != first_b[20:], "each pass in an order of its own"
    assert groups == {"a": {0}, "b": {1}}
    assert any(line.startswith(f"pass 2 over {tmp_path / 'b.jsonl'} begins, after") for line in said)
    with pytest.raises(DataError, match="a stream of 2 sources, and this one has 1"):
        stream(tmp_path / "a.jsonl").load_state_dict(windows.state_dict())


def test_a_bad_row_is_named_on_all_ranks_or_left_out_and_counted(rows):
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:20], "nonsense\n", "\n", *lines[20:]]))
    for rank in range(2):
        with pytest.raises(DataError, match=r"^rows\.jsonl:21: not JSON"):
            list(stream(rows, windows={"rank": rank, "world_size": 2}))
    said: list[str] = []
    skip = BadRows(action="skip", max_share=0.02)
    windows = stream(rows, bad_rows=skip, windows={"say": said.append})
    assert len({source for window in windows for source, _, _ in documents(window)}) == 50
    (account,) = windows.accounts()
    assert account.statistics.num_bad == 1
    assert said == ["a bad row is left out: rows.jsonl:21: not JSON: Expecting value at column 1"]
    with pytest.raises(DataError, match=r"1 bad rows of 51 in .*more than the share 0\.01(.|\n)*rows\.jsonl:21"):
        list(stream(rows, bad_rows=BadRows(action="skip", max_share=0.01)))
    # One of a thousand may be bad: the third is one too many, wherever it stands.
    rows.write_text("".join([*lines[:20], *["nonsense\n"] * 3, *lines[20:]]))
    windows = stream(rows, bad_rows=BadRows(action="skip", max_share=0.002), shuffle=False)
    with pytest.raises(DataError, match="3 bad rows of the first 23 in"):
        list(windows)


def test_a_source_that_has_changed_is_named(rows):
    windows = stream(rows, passes=None)
    for _ in islice(windows, 6):
        pass
    state = windows.state_dict()
    content = rows.read_text()
    for changed in (content.replace("a1:", "a2:", 1), content.split("\n", 1)[1], content[:40]):
        rows.write_text(changed)
        with pytest.raises(DataError, match=r"rows\.jsonl has changed: the \d+ rows that the run had read"):
            stream(rows, passes=None).load_state_dict(state)
    rows.write_text(content)
    stream(rows, passes=None).load_state_dict(state)
    growing = iter(stream(rows, passes=None))
    for _ in range(20):  # into the second pass
        next(growing)
    with rows.open("a") as file:
        file.write('{"text": "more"}\n' * 3)
    with pytest.raises(
        DataError, match=r"rows\.jsonl has changed while it was read: 50 rows in the pass before, 53"
    ):
        list(islice(growing, 40))
    facts = StreamSource(rows).facts()
    rows.write_text(content)
    assert StreamSource(rows).facts() != facts


def test_a_source_without_anything_to_train_on_is_an_error_and_no_endless_search(tmp_path, make_tokenizer):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no row"):
        list(stream(tmp_path / "empty.jsonl", passes=None))
    long = {"messages": [{"role": "user", "content": "why " * 50}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "cut.jsonl").write_text(f"{json.dumps(long)}\n" * 3)
    settings = StreamSettings(encode=EncodeSettings(max_length=LENGTH))
    cut = {"micro_batch_size": 1, "micro_batches_per_window": 1, "pad_token_id": 0}
    windows = StreamWindows(
        [StreamPart(source=StreamSource(tmp_path / "cut.jsonl"))], make_tokenizer(), settings, **cut
    )
    with pytest.raises(NoSupervisedTokenError, match="in all 3 rows of"):
        list(windows)
    # A tokenizer that can't do it at all is no bad row.
    skip = StreamSettings(encode=EncodeSettings(max_length=LENGTH), bad_rows=BadRows(action="skip", max_share=1))
    with pytest.raises(DataError, match="no chat template"):
        list(
            StreamWindows(
                [StreamPart(source=StreamSource(tmp_path / "cut.jsonl"))], make_tokenizer(None), skip, **cut
            )
        )
    with pytest.raises(DataError, match="token id 97, but the model's embedding has 90 rows"):
        list(stream(write(tmp_path / "rows.jsonl", 2), vocabulary=90))


def test_texts_tables_and_the_hub_give_the_rows_that_reading_them_gives(tmp_path, monkeypatch):
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table = datasets.Dataset.from_list([{"text": f"row {i}", "id": i} for i in range(5)])
    table.save_to_disk(tmp_path / "saved")
    for folder in ("parquet", "csv", "books"):
        (tmp_path / folder).mkdir()
    table.to_parquet(tmp_path / "parquet" / "x.parquet")
    table.to_csv(tmp_path / "csv" / "x.csv")
    for name in ("b", "a"):
        (tmp_path / "books" / f"{name}.txt").write_text(f"Book {name}.")
    for name in ("saved", "parquet", "csv", "books"):
        source = StreamSource(tmp_path / name)
        assert [row.parse() for row in source] == read_source(tmp_path / name).documents
        assert [row.parse() for row in source] == [row.parse() for row in source], "as often as one likes"
        assert source.facts()["bytes"] > 0
    windows = stream(tmp_path / "parquet", passes=2)
    next(iter(windows))
    again = stream(tmp_path / "parquet", passes=2)
    again.load_state_dict(windows.state_dict())
    whole = [documents(window) for window in stream(tmp_path / "parquet", passes=2)]
    assert [documents(window) for window in again] == whole[1:]
    calls = []

    def load(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        return table.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = StreamSource("owner/name:en:test")
    assert calls == []
    assert [row.parse().source for row in source] == [f"owner/name:en:test:{i}" for i in range(5)]
    assert set(source.facts()) == {"head"}
    assert calls == [("owner/name", "en", "test", True)]

    def broken():
        yield {"text": "good"}
        raise ConnectionError("gone")

    monkeypatch.setattr("tokennorm.data.streaming.source.read_hub", lambda *_, **__: broken())
    with pytest.raises(DataError, match="owner/name: row 1 can't be read: ConnectionError: gone"):
        list(StreamSource("owner/name"))
    assert hub.looks_like_an_id("owner/name")


@pytest.mark.timeout(600)
def test_workers_encode_ahead_to_the_same_windows(rows):
    expected = [documents(window) for window in stream(rows)]
    windows = stream(rows, workers=1)
    assert [documents(window) for window in windows] == expected
    half = iter(stream(rows, workers=1))
    next(half)
    half.close()


def test_two_ranks_have_the_gradient_of_one(rows):
    """The sums of the ranks over the tokens of the window, in float64."""
    torch.manual_seed(0)
    head = torch.randn(128, 128, dtype=torch.float64, requires_grad=True)

    def gradient(views):
        total = sum(batch["effective_tokens"] for view in views for batch in view)
        parts = [
            torch.nn.functional.cross_entropy(
                head[batch["input_ids"]].flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum"
            )
            for view in views
            for batch in view
        ]
        return torch.autograd.grad(sum(parts) / total, head)[0]

    ranks = [list(stream(rows, windows={"rank": rank, "world_size": 2})) for rank in range(2)]
    windows = list(stream(rows))
    assert len({sum(b["effective_tokens"] for b in window) for window in windows}) > 3, "uneven"
    for number, window in enumerate(windows):
        expected = gradient([window])
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(gradient([rank[number] for rank in ranks]), expected, rtol=1e-12, atol=1e-15)


def test_what_can_not_work_is_refused(rows, tmp_path):
    with pytest.raises(DataError, match="no file"):
        StreamSource(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="shuffle buffer is 0"):
        stream(rows, shuffle_buffer=0)
    with pytest.raises(ConfigError, match="0 passes"):
        stream(rows, passes=0)
    with pytest.raises(ConfigError, match="-1 workers"):
        stream(rows, workers=-1)
    with pytest.raises(ConfigError, match="pack_length is 8 tokens, max_length 12"):
        stream(rows, windows={"pack_length": 8})
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        stream(rows, windows={"rank": 2, "world_size": 2})
    parts = [StreamPart(source=StreamSource(rows), weight=Fraction(0))]
    with pytest.raises(ConfigError, match="give each source a weight above 0"):
        list(stream(rows, parts=parts))
