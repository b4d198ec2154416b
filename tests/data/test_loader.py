from __future__ import annotations

import pytest
import torch

from tokennorm.data import ChatDataset, Position, Sample, WindowLoader
from tokennorm.errors import ConfigError, DataError

PAD = 0


@pytest.fixture(scope="module")
def dataset() -> ChatDataset:
    generator = torch.Generator().manual_seed(5)
    samples, following = [], 1
    for i in range(23):
        length = int(torch.randint(2, 30, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.5
        mask[1] = True
        samples.append(
            Sample(input_ids=torch.arange(following, following + length), supervised=mask, source=f"sample {i}")
        )
        following += length
    return ChatDataset(samples)


def make(dataset, **options) -> WindowLoader:
    defaults = {"micro_batch_size": 2, "micro_batches_per_window": 4, "pad_token_id": PAD, "seed": 7}
    return WindowLoader(dataset, **(defaults | options))


def tokens(batches) -> list[int]:
    return sorted(token for batch in batches for token in batch["input_ids"].flatten().tolist() if token != PAD)


def targets(batches) -> list[int]:
    return sorted(
        label for batch in batches for label in batch["shift_labels"].flatten().tolist() if label != -100
    )


@pytest.mark.parametrize("pack_length", [None, 32, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_window_is_the_same_for_any_number_of_ranks(dataset, pack_length, world_size):
    alone = list(make(dataset, pack_length=pack_length).windows(2))
    ranks = [
        list(make(dataset, pack_length=pack_length, rank=rank, world_size=world_size).windows(2))
        for rank in range(world_size)
    ]
    assert all(len(windows) == len(alone) for windows in ranks)
    for w, window in enumerate(alone):
        parts = [windows[w] for windows in ranks]
        assert {part.position for part in parts} == {window.position}
        assert len({len(part.batches) for part in parts}) == 1
        together = [batch for part in parts for batch in part.batches]
        assert tokens(together) == tokens(window.batches)
        assert targets(together) == targets(window.batches)
        for key in ("effective_tokens", "total_tokens"):
            assert sum(batch[key] for batch in together) == sum(batch[key] for batch in window.batches)
        for batch in together:
            assert ("attention_mask" in batch) == (pack_length is None)
            assert batch["effective_tokens"] == int((batch["shift_labels"] != -100).sum())


@pytest.mark.parametrize("pack_length", [None, 40])
def test_an_epoch_holds_every_token_and_target_once(dataset, pack_length):
    loader = make(dataset, pack_length=pack_length)
    for epoch in (0, 1):
        batches = [batch for w in range(loader.num_windows(epoch)) for batch in loader.window(Position(epoch, w))]
        assert tokens(batches) == sorted(token for sample in dataset for token in sample.input_ids.tolist())
        assert sum(batch["total_tokens"] for batch in batches) == dataset.statistics.total_tokens
        assert sum(batch["effective_tokens"] for batch in batches) == dataset.statistics.supervised_tokens
        assert len({batch["effective_tokens"] for batch in batches}) > 3, "uneven by nature"


def test_epochs_differ_and_the_same_epoch_does_not(dataset):
    loader = make(dataset)
    first, second = (loader.window_samples(Position(epoch, 0)) for epoch in (0, 1))
    assert first != second
    assert make(dataset).window_samples(Position(0, 0)) == first
    assert make(dataset, seed=8).window_samples(Position(0, 0)) != first
    unshuffled = make(dataset, shuffle=False)
    assert unshuffled.window_samples(Position(3, 0)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unshuffled.window_samples(Position(0, 2)) == [[16, 17], [18, 19], [20, 21], [22]]


@pytest.mark.parametrize("pack_length", [None, 32])
def test_a_run_goes_on_where_it_stopped(dataset, pack_length):
    whole = list(make(dataset, pack_length=pack_length).windows(2))
    assert len(whole) == make(dataset, pack_length=pack_length).total_windows(2)
    for stop in (0, 1, len(whole) // 2, len(whole) - 2):
        resumed = list(make(dataset, pack_length=pack_length).windows(2, start=whole[stop].next_position))
        assert [window.position for window in resumed] == [window.position for window in whole[stop + 1 :]]
        for found, expected in zip(resumed, whole[stop + 1 :], strict=True):
            for a, b in zip(found.batches, expected.batches, strict=True):
                assert a.keys() == b.keys()
                assert a.get("sources") == b.get("sources")
                numbers = a.keys() - {"sources"}
                assert all(torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])) for key in numbers)
    assert list(make(dataset).windows(2, start=whole[-1].next_position)) == []
    assert whole[-1].next_position == Position(2, 0)


@pytest.mark.parametrize("pack_length", [48, 44, None])
def test_rows_are_filled_up_so_that_shapes_come_again(dataset, pack_length):
    plain, filled = (
        [
            batch
            for window in make(dataset, pack_length=pack_length, pad_to_multiple_of=multiple).windows(1)
            for batch in window.batches
        ]
        for multiple in (1, 8)
    )
    most = pack_length or max(dataset.lengths)
    for a, b in zip(plain, filled, strict=True):
        width = a["input_ids"].shape[1]
        assert b["input_ids"].shape[1] == min(-(-width // 8) * 8, most)
        assert torch.equal(a["shift_labels"], b["shift_labels"][:, :width])
        assert bool((b["shift_labels"][:, width:] == -100).all())
        assert (a["effective_tokens"], a["total_tokens"]) == (b["effective_tokens"], b["total_tokens"])
    assert len({b["input_ids"].shape[1] for b in filled}) < len({a["input_ids"].shape[1] for a in plain})


def test_all_rows_have_the_shape_of_the_pack(dataset):
    loader = make(dataset, pack_length=48, pad_to_multiple_of=48)
    assert {batch["input_ids"].shape[1] for window in loader.windows(1) for batch in window.batches} == {48}


def test_what_can_not_work_is_refused(dataset):
    with pytest.raises(ConfigError, match="pad_to_multiple_of is 0"):
        make(dataset, pad_to_multiple_of=0)
    with pytest.raises(ConfigError, match="rank 3 of 2 ranks"):
        make(dataset, rank=3, world_size=2)
    with pytest.raises(DataError, match="does not fit into a row of 8"):
        make(dataset, pack_length=8)
    with pytest.raises(ConfigError, match="window 3 of epoch 0, which has 3"):
        make(dataset).window(Position(0, 3))
