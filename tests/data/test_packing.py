from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokennorm.data import Sample, collate_packed, collate_padded, dummy_batch, pack
from tokennorm.errors import DataError

PAD = 0


def make_samples(masks: list[list[bool]]) -> list[Sample]:
    """One sample per mask; every token of the set has an id of its own, from 1 on."""
    samples, following = [], 1
    for i, mask in enumerate(masks):
        ids = torch.arange(following, following + len(mask))
        samples.append(Sample(input_ids=ids, supervised=torch.tensor(mask), source=f"sample {i}"))
        following += len(mask)
    return samples


def expected_targets(sample: Sample) -> list[tuple[int, int]]:
    """(input id, target id) of each supervised prediction, written out naively."""
    ids, mask = sample.input_ids.tolist(), sample.supervised.tolist()
    return [(ids[s - 1], ids[s]) for s in range(1, len(ids)) if mask[s]]


def check_batch(batch, samples: list[Sample]) -> None:
    """Everything that the contract says about a batch's contents, whatever its rows."""
    ids, labels, positions = (batch[key].tolist() for key in ("input_ids", "shift_labels", "position_ids"))
    tokens, targets = [], []
    start_of = {int(sample.input_ids[0]): len(sample) for sample in samples}
    for row_ids, row_labels, row_positions in zip(ids, labels, positions, strict=True):
        for s, (token, label, position) in enumerate(zip(row_ids, row_labels, row_positions, strict=True)):
            if token in start_of:
                assert row_positions[s : s + start_of[token]] == list(range(start_of[token]))
            if token == PAD:
                assert label == -100
            else:
                tokens.append(token)
                # Ids are consecutive inside a document, so this also says which position sees which.
                assert s == 0 or position == 0 or row_ids[s - 1] == token - 1
            if label != -100:
                targets.append((token, label))
    assert sorted(tokens) == sorted(token for sample in samples for token in sample.input_ids.tolist())
    assert sorted(targets) == sorted(pair for sample in samples for pair in expected_targets(sample))
    assert batch["effective_tokens"] == len(targets)
    assert batch["total_tokens"] == len(tokens)
    assert all(batch[key].dtype == torch.int64 for key in ("input_ids", "shift_labels", "position_ids"))


masks_strategy = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=15)


@settings(deadline=None, max_examples=150)
@given(masks=masks_strategy, extra=st.integers(0, 20), fixed=st.booleans())
def test_packed_rows_hold_every_document_and_its_targets_once(masks, extra, fixed):
    samples = make_samples(masks)
    lengths = [len(sample) for sample in samples]
    pack_length = max(lengths) + extra
    rows = pack(lengths, pack_length)
    assert sorted(i for row in rows for i in row) == list(range(len(samples)))
    assert all(sum(lengths[i] for i in row) <= pack_length for row in rows)
    batch = collate_packed(
        [[samples[i] for i in row] for row in rows], pad_token_id=PAD, row_length=pack_length if fixed else None
    )
    check_batch(batch, samples)
    assert "attention_mask" not in batch
    if fixed:
        assert batch["input_ids"].shape == (len(rows), pack_length)
    unpacked = collate_padded(samples, pad_token_id=PAD)
    # The targets of the packed rows are those of the unpacked ones, in the order of the rows.
    by_order = [
        label for row in rows for i in row for label in samples[i].shift_labels().tolist() if label != -100
    ]
    packed_labels = batch["shift_labels"]
    assert packed_labels[packed_labels != -100].tolist() == by_order
    assert batch["effective_tokens"] == unpacked["effective_tokens"]
    assert batch["total_tokens"] == unpacked["total_tokens"]


@settings(deadline=None, max_examples=100)
@given(masks=masks_strategy, extra=st.integers(0, 5))
def test_padded_rows_hold_every_document_and_its_targets_once(masks, extra):
    samples = make_samples(masks)
    width = max(len(sample) for sample in samples) + extra
    batch = collate_padded(samples, pad_token_id=PAD, row_length=width)
    check_batch(batch, samples)
    assert batch["attention_mask"].tolist() == (batch["input_ids"] != PAD).long().tolist()
    assert batch["attention_mask"].dtype == torch.int64
    assert batch["input_ids"].shape == (len(samples), width)


def mistaken_batch(samples: list[Sample], mistake: str):
    """A packed row with one of the usual mistakes."""
    batch = collate_packed([samples], pad_token_id=PAD)
    ids = batch["input_ids"]
    mask = torch.cat([sample.supervised for sample in samples])[None]
    if mistake == "targets cross documents":
        shifted = torch.where(mask, ids, -100)[:, 1:]
        labels = torch.cat([shifted, torch.full((1, 1), -100)], dim=1)
        batch |= {"shift_labels": labels, "effective_tokens": int((labels != -100).sum())}
    elif mistake == "positions go on":
        batch["position_ids"] = torch.arange(ids.shape[1])[None]
    elif mistake == "labels not shifted":
        batch["shift_labels"] = torch.where(mask, ids, -100)
    elif mistake == "counted before the shift":
        batch["effective_tokens"] = int(mask.sum())
    elif mistake == "a document twice":
        return collate_packed([samples, samples[:1]], pad_token_id=PAD)
    return batch


MISTAKES = (
    "targets cross documents",
    "positions go on",
    "labels not shifted",
    "counted before the shift",
    "a document twice",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(mistake):
    # The second document begins with a supervised token: predicted by nothing, unless a target crosses.
    samples = make_samples([[False, True, True], [True, False, True, True]])
    check_batch(mistaken_batch(samples, "none"), samples)
    with pytest.raises(AssertionError):
        check_batch(mistaken_batch(samples, mistake), samples)


def test_pack_fills_the_fullest_row_that_has_room():
    assert pack([5, 6, 3, 5], 10) == [(0, 3), (1, 2)]  # the first row with room would give (0, 2), (1,), (3,)
    assert pack([5, 6, 3, 5], 10, order=[2, 3, 1, 0]) == [(2, 3), (1,), (0,)]
    assert pack([5, 6, 3, 5], 10, order=[1, 2]) == [(1, 2)]
    assert pack([10, 10], 10) == [(0,), (1,)]
    assert pack([], 10) == []


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_pack_wastes_less_than_half(lengths):
    rows = pack(lengths, 30)
    # Best fit opens a row only when no open one has room, so any two rows together hold more than one.
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(rows) == 1 or used[0] + used[1] > 30


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(DataError, match="a document of 11 tokens does not fit into a row of 10"):
        pack([3, 11], 10)
    samples = make_samples([[True] * 6, [True] * 6])
    with pytest.raises(DataError, match="a row of 12 tokens does not fit into row_length 10"):
        collate_packed([samples], pad_token_id=PAD, row_length=10)
    with pytest.raises(DataError, match="a row of 6 tokens does not fit into row_length 5"):
        collate_padded(samples, pad_token_id=PAD, row_length=5)
    with pytest.raises(DataError, match="empty row"):
        collate_packed([[]], pad_token_id=PAD)
    with pytest.raises(DataError, match="empty row"):
        collate_padded([], pad_token_id=PAD)


@pytest.mark.parametrize("packed", [True, False])
def test_a_dummy_has_the_same_keys_and_no_data(packed):
    samples = make_samples([[False, True], [True]])
    real = collate_packed([samples], pad_token_id=7) if packed else collate_padded(samples, pad_token_id=7)
    dummy = dummy_batch(7, packed=packed)
    assert dummy.keys() == real.keys()
    assert dummy["input_ids"].tolist() == [[7, 7]]
    assert dummy["position_ids"].tolist() == [[0, 1]]
    assert dummy["shift_labels"].tolist() == [[-100, -100]]
    assert (dummy["effective_tokens"], dummy["total_tokens"]) == (0, 0)
    for key, value in real.items():
        assert type(value) is type(dummy[key])
