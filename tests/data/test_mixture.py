from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokennorm.data import (
    ChatDataset,
    MixtureOrder,
    Position,
    Sample,
    WindowLoader,
    fill_rate,
    pack,
    pack_buffered,
    parse_mixture,
)
from tokennorm.errors import ConfigError, DataError

WEIGHTS = st.fractions(min_value=Fraction(1, 5), max_value=3, max_denominator=6)


def test_sources_are_written_as_text():
    code, chat, rest = parse_mixture(["code=data/code.jsonl@2", "chat=owner/name:en:train", "rest=a@b.jsonl@1/3"])
    assert (code.name, code.path, code.weight) == ("code", "data/code.jsonl", 2)
    assert (chat.name, chat.path, chat.weight) == ("chat", "owner/name:en:train", 1)
    assert (rest.path, rest.weight) == ("a@b.jsonl", Fraction(1, 3))
    assert parse_mixture(["x=y@0.25"])[0].weight == Fraction(1, 4)
    for wrong, message in (
        (["code.jsonl"], "a source of the mixture is 'code.jsonl'"),
        (["a b=code.jsonl"], "a source of the mixture is 'a b=code.jsonl'"),
        (["x=y@0"], "the weight of the source x is 0"),
        (["x=y@1/0"], "the weight of the source x is 1/0"),
        (["x=y", "x=z"], "names x more than once"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_mixture(wrong)


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 12), WEIGHTS), min_size=1, max_size=4),
    epochs=st.integers(1, 7),
    shuffle=st.booleans(),
)
def test_over_the_epochs_every_sample_comes_as_often_as_its_weight_says(parts, epochs, shuffle):
    order = MixtureOrder([size for size, _ in parts], [weight for _, weight in parts], seed=3, shuffle=shuffle)
    seen = Counter(i for epoch in range(epochs) for i in order(epoch))
    start = 0
    for source, (size, weight) in enumerate(parts):
        counts = [seen[i] for i in range(start, start + size)]
        # Exactly weight * epochs passes, the last one perhaps begun.
        assert sum(counts) == (weight * size * epochs).__floor__()
        assert max(counts) - min(counts) <= 1
        assert sum(order.count(source, epoch) for epoch in range(epochs)) == sum(counts)
        start += size
    assert seen.total() == sum(len(order(epoch)) for epoch in range(epochs))
    assert max(seen, default=0) < start


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=4))
def test_every_part_of_an_epoch_has_the_shares_of_the_whole(sizes):
    order = MixtureOrder(sizes, [Fraction(1)] * len(sizes), seed=0)(0)
    owner = [source for source, size in enumerate(sizes) for _ in range(size)]
    for end in range(1, len(order) + 1):
        for source, size in enumerate(sizes):
            got = sum(owner[i] == source for i in order[:end])
            assert abs(got - size * end / len(order)) <= len(sizes) / 2


def test_without_shuffling_a_source_keeps_its_order_and_passes_differ_with_it():
    plain = MixtureOrder([3, 2], [Fraction(2), Fraction(1)], seed=0, shuffle=False)
    assert plain(0) == [0, 1, 3, 2, 0, 1, 4, 2]
    assert [i for i in plain(0) if i < 3] == [0, 1, 2, 0, 1, 2]
    shuffled = MixtureOrder([20], [Fraction(2)], seed=0)(0)
    assert shuffled[:20] != shuffled[20:]
    assert sorted(shuffled[:20]) == sorted(shuffled[20:]) == list(range(20))
    assert MixtureOrder([20], [Fraction(2)], seed=1)(0) != shuffled
    with pytest.raises(ConfigError, match="1 sources and 2 weights"):
        MixtureOrder([1], [Fraction(1)] * 2, seed=0)


def dataset(sizes=(9, 5), seed=0) -> ChatDataset:
    generator = random.Random(seed)
    samples, token = [], 1
    for source, size in enumerate(sizes):
        for i in range(size):
            length = generator.randrange(2, 17)
            samples.append(
                Sample(
                    input_ids=torch.arange(token, token + length),
                    supervised=torch.arange(length) % 2 == 1,
                    source=f"{source}:{i}",
                    group=f"s{source}",
                )
            )
            token += length
    return ChatDataset(samples)


def global_order(windows_of_ranks) -> list[tuple]:
    """Micro-batches in the order of the plan: rank 0's first, rank 1's first, ..."""
    found = []
    for window in zip(*windows_of_ranks, strict=False):
        for together in zip(*(part.batches for part in window), strict=False):
            found += [
                (batch["sources"], batch["input_ids"].tolist()) for batch in together if batch["total_tokens"]
            ]
    return found


@pytest.mark.parametrize("pack_buffer", [None, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_the_global_order_is_the_same_for_any_number_of_ranks(packed, pack_buffer):
    data = dataset()
    order = MixtureOrder([9, 5], [Fraction(1), Fraction(3, 2)], seed=1)

    def windows(rank, world_size, **changes):
        loader = WindowLoader(
            data,
            micro_batch_size=2,
            micro_batches_per_window=4,
            pad_token_id=0,
            pack_length=24 if packed else None,
            pack_buffer=pack_buffer if packed else None,
            rank=rank,
            world_size=world_size,
            **{"order": order, **changes},
        )
        return list(loader.windows(3))

    alone = global_order([windows(0, 1)])
    assert len({str(item) for item in alone}) > 8
    for world_size in (2, 3, 4):
        assert global_order([windows(rank, world_size) for rank in range(world_size)]) == alone
    # A rank that went its own way would be seen.
    other = MixtureOrder([9, 5], [Fraction(1), Fraction(3, 2)], seed=2)
    assert global_order([windows(0, 2), windows(1, 2, order=other)]) != alone


@pytest.mark.parametrize("pack_length", [None, 40])
def test_every_token_carries_the_place_of_its_source(pack_length):
    data = dataset()
    names = {}
    for sample in data:
        names |= dict.fromkeys(sample.input_ids.tolist(), sample.group)
    loader = WindowLoader(
        data, micro_batch_size=3, micro_batches_per_window=2, pad_token_id=0, pack_length=pack_length
    )
    assert loader.group_names == ("s0", "s1")
    for window in loader.windows(1):
        for batch in window.batches:
            for token, group in zip(batch["input_ids"].flatten(), batch["groups"].flatten(), strict=True):
                expected = -1 if token == 0 else loader.group_names.index(names[int(token)])
                assert int(group) == expected
    ungrouped = ChatDataset([Sample(input_ids=s.input_ids, supervised=s.supervised, source="x") for s in data])
    (window, *_) = WindowLoader(
        ungrouped, micro_batch_size=3, micro_batches_per_window=2, pad_token_id=0, pack_length=pack_length
    ).windows(1)
    assert "groups" not in window.batches[0]


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(lengths=LENGTHS, buffer=st.integers(1, 25))
def test_buffered_rows_hold_every_document_once_and_none_waits_long(lengths, buffer):
    rows = list(pack_buffered(enumerate(lengths), 20, buffer))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 for row in rows)
    assert rows == naive_rows(lengths, 20, buffer)
    for number, row in enumerate(rows):
        # The oldest that was left opens each row, so nothing is overtaken for more than `buffer` rows.
        assert row[0] == min(i for later in rows[number:] for i in later)


def naive_rows(lengths, pack_length, buffer) -> list[tuple[int, ...]]:
    """The same by search: the oldest, then always the longest that fits."""
    waiting, coming, rows = [], list(range(len(lengths))), []
    while waiting or coming:
        while coming and len(waiting) < buffer:
            waiting.append(coming.pop(0))
        row = [waiting.pop(0)]
        while fitting := [i for i in waiting if lengths[i] <= pack_length - sum(lengths[j] for j in row)]:
            chosen = max(fitting, key=lambda i: (lengths[i], -i))
            waiting.remove(chosen)
            row.append(chosen)
        rows.append(tuple(row))
    return rows


def test_a_larger_buffer_fills_better():
    generator = random.Random(0)
    lengths = [min(256, round(generator.lognormvariate(4, 0.8)) + 2) for _ in range(3000)]

    def rate(buffer):
        return fill_rate(list(pack_buffered(enumerate(lengths), 256, buffer)), lengths, 256)

    rates = [rate(buffer) for buffer in (1, 8, 64, 512)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(sum(lengths) / (256 * len(lengths)))
    assert rates[2] > 0.97
    assert rates[3] > 0.99
    assert fill_rate(pack(lengths, 256), lengths, 256) > 0.95
    assert fill_rate([], lengths, 256) == 0.0
    loader = WindowLoader(
        dataset(), micro_batch_size=1, micro_batches_per_window=2, pad_token_id=0, pack_length=20, pack_buffer=5
    )
    rows = [row for w in range(loader.num_windows(0)) for row in loader.window(Position(0, w))]
    filled = sum(batch["total_tokens"] for batch in rows) / (20 * len(rows))
    assert loader.fill_rate() == pytest.approx(filled)
    padded = WindowLoader(dataset(), micro_batch_size=1, micro_batches_per_window=2, pad_token_id=0)
    with pytest.raises(ConfigError, match="rows that are not packed"):
        padded.fill_rate()


def test_what_can_not_be_packed_is_refused():
    with pytest.raises(ConfigError, match="the packing buffer is 0 documents"):
        list(pack_buffered([(0, 1)], 8, 0))
    with pytest.raises(DataError, match="9 tokens does not fit into a row of 8"):
        list(pack_buffered([(0, 9)], 8, 3))
