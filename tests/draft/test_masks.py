"""The mask of flex attention is the dense one, and both are the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tokennorm.draft.anchors import document_ids
from tokennorm.draft.masks import MaskMod, block_attention_mask, block_mask_mod


def naive_mask(anchors: Tensor, size: int, length: int, documents: Tensor | None) -> Tensor:
    rows, blocks = anchors.shape
    mask = torch.zeros(rows, 1, blocks * size, length + blocks * size, dtype=torch.bool)
    for b in range(rows):
        for query in range(blocks * size):
            anchor = int(anchors[b, query // size])
            for key in range(length + blocks * size):
                if key >= length:
                    sees = (key - length) // size == query // size
                else:
                    sees = key < anchor and (documents is None or bool(documents[b, key] == documents[b, anchor]))
                mask[b, 0, query, key] = sees
    return mask


def flex_mask(mask_mod: MaskMod, anchors: Tensor, size: int, length: int) -> Tensor:
    queries = anchors.shape[1] * size
    return create_mask(mask_mod, anchors.shape[0], 1, queries, length + queries, device="cpu")


def case(lengths: list[int], blocks: int, seed: int) -> tuple[Tensor, Tensor]:
    """Anchors ``[2, A]``, ascending and close together, and documents ``[2, S]``, other ones in each row."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.stack(
        [torch.cat([torch.arange(n) for n in row]) for row in (lengths, list(reversed(lengths)))]
    )
    anchors = torch.randint(positions.shape[1], (2, blocks), generator=generator).sort(dim=1).values
    return anchors, document_ids(positions)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    blocks=st.integers(1, 4),
    size=st.integers(1, 4),
    packed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_dense_and_flex_masks_are_the_definition(
    lengths: list[int], blocks: int, size: int, packed: bool, seed: int
) -> None:
    anchors, documents = case(lengths, blocks, seed)
    documents, length = documents if packed else None, sum(lengths)
    expected = naive_mask(anchors, size, length, documents)
    assert torch.equal(block_attention_mask(anchors, size, length, documents), expected)
    assert torch.equal(
        flex_mask(block_mask_mod(anchors, size, length, documents), anchors, size, length), expected
    )


def test_a_block_mask_holds_the_same_places() -> None:
    anchors, documents = case([200, 150], 40, 0)
    queries = 40 * 7
    built = create_block_mask(
        block_mask_mod(anchors, 7, 350, documents), 2, None, queries, 350 + queries, device="cpu"
    )
    dense = block_attention_mask(anchors, 7, 350, documents)
    tiles = torch.nn.functional.pad(dense.float(), (0, -dense.shape[3] % 128, 0, -dense.shape[2] % 128))
    tiles = torch.nn.functional.max_pool2d(tiles, 128).bool()
    assert torch.equal(built.to_dense().bool(), tiles)


@pytest.mark.parametrize("mistake", ["anchor included", "block number", "other block", "no documents"])
def test_planted_mistakes_differ_from_the_definition(mistake: str) -> None:
    anchors, documents = torch.tensor([[2, 3, 7, 9]]), document_ids(torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]]))
    size, length = 3, 10
    right = block_mask_mod(anchors, size, length, documents)
    mods: dict[str, MaskMod] = {
        "anchor included": lambda b, h, q, k: right(b, h, q, k) | (k == anchors[b, q // size]),
        "block number": lambda b, h, q, k: (
            ((k < length) & (k < q // size * size)) | ((k >= length) & right(b, h, q, k))
        ),
        "other block": lambda b, h, q, k: right(b, h, q, k) | ((k - length) // size == q // size - 1),
        "no documents": block_mask_mod(anchors, size, length, None),
    }
    expected = naive_mask(anchors, size, length, documents)
    assert torch.equal(flex_mask(right, anchors, size, length), expected)
    assert not torch.equal(flex_mask(mods[mistake], anchors, size, length), expected)
