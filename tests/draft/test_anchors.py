"""Anchors and blocks against definitions written out slot by slot."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokennorm.draft.anchors import (
    Anchors,
    anchor_generator,
    document_ids,
    sample_anchors,
    supervised_tokens,
    valid_anchors,
)
from tokennorm.draft.blocks import Blocks, make_blocks
from tokennorm.errors import ConfigError, LossUsageError


def rows_of(*texts: str) -> tuple[Tensor, Tensor]:
    """``.`` unsupervised, ``x`` supervised, ``|`` between documents: masks and document ids ``[B, S]``."""
    masks, positions = [], []
    for text in texts:
        documents = text.split("|")
        masks.append([token == "x" for document in documents for token in document])
        positions.append([place for document in documents for place in range(len(document))])
    return torch.tensor(masks), document_ids(torch.tensor(positions))


def positions_of(valid: Tensor) -> list[list[int]]:
    return [row.nonzero().squeeze(1).tolist() for row in valid]


def test_both_rules_and_documents() -> None:
    mask, documents = rows_of("..xxx.xx", ".xxx|.xxx", "x|xx|xx.xx")
    assert positions_of(valid_anchors(mask, documents)) == [[2, 3, 6], [1, 2, 5, 6], [1, 3, 6]]
    assert positions_of(valid_anchors(mask, documents, anchor_rule="next_supervised")) == [
        # The prompt's last token starts a block too.
        [1, 2, 3, 5, 6],
        [0, 1, 2, 4, 5, 6],
        [1, 3, 5, 6],
    ]
    # Without documents a block could start at one's end and propose the next one's start.
    assert positions_of(valid_anchors(mask))[2] == [0, 1, 2, 3, 6]


def test_padding_is_no_document() -> None:
    positions = torch.arange(4).repeat(2, 1)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    documents = document_ids(positions, mask)
    assert documents.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert positions_of(valid_anchors(torch.ones(2, 4, dtype=torch.bool), documents)) == [[0, 1, 2], [0]]


def test_supervised_tokens_undo_the_shift() -> None:
    labels = torch.tensor([[-100, 7, 8, -100, 5, -100]])
    assert supervised_tokens(labels).tolist() == [[False, False, True, True, False, True]]


def test_draws_are_uniform_sorted_and_without_replacement() -> None:
    mask, documents = rows_of(".xxxxx.xx", ".xx......")
    counts: Counter[tuple[int, ...]] = Counter()
    draws = 3000
    generator = torch.Generator().manual_seed(0)
    for _ in range(draws):
        anchors = sample_anchors(mask, num_anchors=3, generator=generator, documents=documents)
        assert anchors.keep.tolist() == [[True, True, True], [True, False, False]]
        assert anchors.positions[1].tolist() == [1, 0, 0]
        row = anchors.positions[0].tolist()
        assert row == sorted(set(row))
        counts[tuple(row)] += 1
    subsets = list(itertools.combinations([1, 2, 3, 4, 7], 3))
    assert set(counts) == set(subsets)
    expected = draws / len(subsets)
    chi_squared = sum((counts[subset] - expected) ** 2 / expected for subset in subsets)
    # 9 degrees of freedom: above 33.7 with a probability of 1e-4.
    assert chi_squared < 33.7


def test_sizes_and_dummies() -> None:
    mask, documents = rows_of(".xxx.", "....x")
    generator = torch.Generator().manual_seed(0)
    trimmed = sample_anchors(mask, num_anchors=9, generator=generator, documents=documents)
    assert trimmed.positions.tolist() == [[1, 2], [0, 0]]
    assert trimmed.keep.tolist() == [[True, True], [False, False]]
    fixed = sample_anchors(mask, num_anchors=4, generator=generator, documents=documents, fixed_size=True)
    assert fixed.positions.shape == (2, 4)
    assert fixed.keep.sum() == 2
    assert positions_of(sample_anchors(mask, num_anchors=None).keep) == [[0, 1], []]
    empty = sample_anchors(mask[1:], num_anchors=4, generator=generator)
    assert empty.positions.tolist() == [[0]]
    assert not empty.keep.any()
    with pytest.raises(ConfigError, match="num_anchors"):
        sample_anchors(mask, num_anchors=0, generator=generator)
    with pytest.raises(ConfigError, match="generator"):
        sample_anchors(mask, num_anchors=3)
    with pytest.raises(ConfigError, match="1 generators for 2 rows"):
        sample_anchors(mask, num_anchors=3, generator=[generator])
    with pytest.raises(ConfigError, match="anchor_rule"):
        valid_anchors(mask, anchor_rule="any")  # type: ignore[arg-type]


def test_seeds_differ_by_rank_step_and_micro_batch_alone() -> None:
    mask = torch.ones(1, 400, dtype=torch.bool)

    def draw(seed: int, rank: int, step: int, micro_batch: int) -> tuple[int, ...]:
        generator = anchor_generator(seed, data_rank=rank, step=step, micro_batch=micro_batch)
        return tuple(sample_anchors(mask, num_anchors=20, generator=generator).positions[0].tolist())

    keys = list(itertools.product((0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)))
    # Sums or products of the four numbers would collide.
    assert len({draw(*key) for key in keys}) == len(keys)
    # A replica along another axis of the mesh, and a resumed run, draw the same.
    assert draw(7, 3, 100, 2) == draw(7, 3, 100, 2)


def naive_slots(ids, mask, documents, anchor: int, keep: bool, size: int, first: int) -> tuple[list, list, list]:
    """Labels, supervision and previous tokens of one block, by definition."""
    labels, supervised, previous = [], [], []
    alive = keep
    for slot in range(size):
        place = anchor + slot + (0 if first else 1)
        inside = place < len(ids) and documents[place] == documents[anchor]
        if slot >= first:
            alive = alive and inside and bool(mask[place])
        supervised.append(alive and slot >= first)
        labels.append(int(ids[place]) if supervised[-1] else 0)
        before = place - 1 if slot >= first else anchor
        known = before < len(ids) and documents[before] == documents[anchor]
        previous.append(int(ids[before]) if known else int(ids[anchor]))
    return labels, supervised, previous


def blocks_match(blocks: Blocks, ids, mask, documents, anchors: Anchors) -> bool:
    size, first = blocks.block_size, blocks.first_supervised_slot
    return all(
        (blocks.target_ids[b, a].tolist(), blocks.eval_mask[b, a].tolist(), blocks.previous_ids[b, a].tolist())
        == naive_slots(
            ids[b], mask[b], documents[b], int(anchors.positions[b, a]), bool(anchors.keep[b, a]), size, first
        )
        for b, a in itertools.product(*map(range, anchors.positions.shape))
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    size=st.integers(2, 6),
    first=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_blocks_are_the_definition(lengths: list[int], size: int, first: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    documents = document_ids(positions)
    mask = torch.rand(positions.shape, generator=generator) < 0.7
    ids = torch.randint(1, 90, positions.shape, generator=generator)
    anchors = sample_anchors(
        mask, num_anchors=4, generator=generator, documents=documents, anchor_rule="next_supervised"
    )
    blocks = make_blocks(ids, mask, anchors, block_size=size, first_supervised_slot=first, documents=documents)
    assert blocks_match(blocks, ids, mask, documents, anchors)
    plan = blocks.plan(90)
    assert plan.num_supervised == int(blocks.eval_mask.sum())
    # Every kept anchor has its first proposal: that is what makes it valid.
    assert torch.equal(blocks.eval_mask[..., first], anchors.keep)


def test_planted_mistakes_in_blocks_are_found() -> None:
    mask, documents = rows_of(".xx.xx|.xxxxxx")
    ids = torch.arange(100, 113).unsqueeze(0)
    anchors = Anchors(positions=torch.tensor([[1, 4, 7, 9]]), keep=torch.tensor([[True] * 4]))

    def found(**options) -> bool:
        arguments = {"block_size": 4, "first_supervised_slot": 0, "documents": documents} | options
        return not blocks_match(make_blocks(ids, mask, anchors, **arguments), ids, mask, documents, anchors)

    assert not found()
    assert not found(first_supervised_slot=1)
    # Labels of another document; a layout read as the other one is compared with its own definition.
    assert found(documents=None)
    blocks = make_blocks(ids, mask, anchors, block_size=4, documents=documents)
    assert blocks.eval_mask[0].tolist() == [
        [True, False, False, False],
        # A supervised token behind an unsupervised one is out of reach.
        [True, False, False, False],
        [True, True, True, True],
        [True, True, True, False],
    ]
    with pytest.raises(LossUsageError, match="supervised"):
        make_blocks(ids, mask[:, :-1], anchors, block_size=4)
    with pytest.raises(LossUsageError, match="anchors"):
        make_blocks(ids.repeat(2, 1), mask.repeat(2, 1), anchors, block_size=4)
