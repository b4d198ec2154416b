from __future__ import annotations

import pytest
import torch

from tokennorm.audit import Layout, Sample, collate, default_layouts, make_samples
from tokennorm.audit.samples import LONG_SAMPLE, UNSUPERVISED_SAMPLES
from tokennorm.errors import ConfigError

ONE = Sample(input_ids=(5, 6, 7), labels=(5, 6, 7))
TWO = Sample(input_ids=(8, 9), labels=(-100, 9))


def test_padded_rows():
    batch = collate([ONE, TWO], packed=False)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[5, 6, 7], [-100, 9, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


def test_a_packed_row():
    batch = collate([ONE, TWO], packed=True)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9]]
    assert set(batch) == {"input_ids", "position_ids", "labels"}


@pytest.mark.parametrize("seed", range(5))
def test_samples_are_uneven_in_the_ways_that_tell_mistakes_apart(seed):
    samples = make_samples(29, seed=seed)
    ordinary = samples[:LONG_SAMPLE]
    counts = [sample.supervised_tokens for sample in ordinary]
    assert max(counts) >= 3 * min(counts)
    assert min(counts) >= 1
    assert samples[LONG_SAMPLE].supervised_tokens > 2 * max(counts)
    assert all(samples[place].supervised_tokens == 0 for place in UNSUPERVISED_SAMPLES)
    # Supervised from the first token: a count before the shift differs. With a prompt: so does one of all tokens.
    assert any(sample.labels[0] != -100 for sample in ordinary)
    assert any(sample.labels[0] == -100 for sample in ordinary)
    assert all(0 < token < 29 for sample in samples for token in sample.input_ids)
    assert make_samples(29, seed=seed) == samples != make_samples(29, seed=seed + 1)


def test_a_batch_counts_what_its_samples_count():
    samples = make_samples(29)
    for packed in (False, True):
        labels = collate(samples[:4], packed)["labels"][:, 1:]
        assert int((labels != -100).sum()) == sum(sample.supervised_tokens for sample in samples[:4])


def test_the_default_layouts_differ_in_everything_that_must_not_matter():
    layouts = default_layouts()
    assert {layout.ranks for layout in layouts} == {1, 2, 3}
    assert any(layout.packed for layout in layouts)
    windows = [window for layout in layouts for window in layout.windows]
    assert {len(window[0]) for window in windows} >= {1, 2, 3, 4}
    unsupervised = set(UNSUPERVISED_SAMPLES)
    empty = [[set(micro_batch) <= unsupervised for micro_batch in rank] for window in windows for rank in window]
    assert any(all(rank) for rank in empty)  # a rank without a token
    assert any(any(rank) and not all(rank) for rank in empty)  # a micro-batch without one
    assert any(LONG_SAMPLE in micro_batch for window in windows for rank in window for micro_batch in rank)
    short = [layout for layout in layouts if len(layout.windows) == 2]
    assert {layout.ranks for layout in short} == {1, 2}
    assert all(len(layout.windows[1][0]) < layout.accumulation_steps for layout in short)
    # The same samples in another order and on other ranks: the same gradient is due.
    contents = [sorted(n for rank in layout.windows[0] for m in rank for n in m) for layout in layouts]
    assert any(contents.count(content) > 1 for content in contents)


def test_layouts_that_cannot_run():
    with pytest.raises(ConfigError, match="micro-batches"):
        Layout(name="x", windows=((((0,), (1,)), ((2,),)),))
    with pytest.raises(ConfigError, match="ranks"):
        Layout(name="x", windows=((((0,),),), (((0,),), ((1,),))))
    with pytest.raises(ConfigError, match="without samples"):
        Layout(name="x", windows=((((),),),))
    with pytest.raises(ConfigError, match="vocabulary"):
        make_samples(3)


def test_packing_needs_no_mask_and_padding_needs_one():
    samples = make_samples(29)
    padded = collate(samples[:3], packed=False)
    assert torch.equal(padded["attention_mask"].sum(1), torch.tensor([len(s.input_ids) for s in samples[:3]]))
