"""Attention inside documents against its definition, pair by pair in float64; the kernel's call by a stand-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils

from tokennorm.kit import document_attention as module
from tokennorm.kit.document_attention import document_attention, each_document, kernel_serves
from tokennorm.kit.document_layout import DocumentLayout, document_layout
from tokennorm.kit.varlen import AttentionShape
from tokennorm.kit.varlen_setup import kernel_error

ROWS = {
    "many documents": ((1, 4, 7, 4, 4), (2, 2, 1, 1, 14)),
    "one document per row": ((20,), (20,)),
    "padding as a last document": ((3, 9, 8), (12, 5, 3)),
    "every token alone": ((1,) * 20, (1,) * 20),
}
# heads, key heads, head size, value size
SHAPES = {"plain": (2, 2, 8, 8), "grouped": (4, 2, 8, 8), "one key head, other value size": (3, 1, 8, 4)}
REAL_SIGNATURE = inspect.signature(torch_varlen.varlen_attn)


def layout_of(rows: tuple[tuple[int, ...], ...], window: int | None = None) -> DocumentLayout:
    lengths = tuple(length for row in rows for length in row)
    return DocumentLayout.of(lengths, shape=(len(rows), sum(rows[0])), window=window, device="cpu")


def heads(shape: tuple[int, int, int, int], rows: int = 2, length: int = 20) -> list[Tensor]:
    torch.manual_seed(0)
    h, g, d, e = shape
    sizes = [(rows, h, length, d), (rows, g, length, d), (rows, g, length, e)]
    return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, sees: Callable[[int, int, int], bool], scale: float | None = None
) -> Tensor:
    """Softmax over the keys that ``sees(row, query, key)`` allows, one query and head at a time: [B, S, H, E]."""
    batch, num_heads, length, size = q.shape
    group = num_heads // k.shape[1]
    out = []
    for row in range(batch):
        for token in range(length):
            keys = [key for key in range(length) if sees(row, token, key)]
            for head in range(num_heads):
                scores = k[row, head // group, keys] @ q[row, head, token] * (scale or size**-0.5)
                out.append(scores.softmax(0) @ v[row, head // group, keys])
    return torch.stack(out).view(batch, length, num_heads, -1)


def in_documents(rows: tuple[tuple[int, ...], ...], window: int | None = None) -> Callable[[int, int, int], bool]:
    documents = [[n for n, length in enumerate(row) for _ in range(length)] for row in rows]

    def sees(row: int, query: int, key: int) -> bool:
        near = window is None or query - key < window
        return documents[row][query] == documents[row][key] and key <= query and near

    return sees


def results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Output and gradients, for an uneven upstream with zeros in it."""
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view_as(out).clone()
    upstream[:, ::3] = 0
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def furthest(got: list[Tensor], want: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=0.1)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("shape", "window"), [("plain", None), ("grouped", 3), ("one key head, other value size", 1)]
)
def test_output_and_gradients_are_those_of_the_definition(
    rows: tuple[tuple[int, ...], ...], shape: str, window: int | None
) -> None:
    leaves = heads(SHAPES[shape])
    got = results(document_attention(*leaves, layout_of(rows, window), scale=0.3), leaves)
    want = results(by_definition(*leaves, in_documents(rows, window), 0.3), leaves)
    assert furthest(got, want) < 1e-12


def test_mistakes_in_boundaries_order_and_window_show() -> None:
    rows, leaves = ROWS["many documents"], heads(SHAPES["grouped"])
    got = results(document_attention(*leaves, layout_of(rows, 3)), leaves)
    right = in_documents(rows, 3)
    mistakes = {
        "boundary one token late": in_documents(((2, 3, 7, 4, 4), rows[1]), 3),
        "documents not apart": lambda _, query, key: 0 <= query - key < 3,
        "window one token longer": in_documents(rows, 4),
        "later tokens seen": lambda row, query, key: right(row, query, key) or right(row, key, query),
    }
    for name, sees in mistakes.items():
        assert furthest(got, results(by_definition(*leaves, sees), leaves)) > 1e-2, name


def test_a_broken_document_leaves_the_others_as_they_are() -> None:
    rows, leaves = ROWS["many documents"], heads(SHAPES["plain"])
    whole = document_attention(*leaves, layout_of(rows))
    broken = [it.detach().clone() for it in leaves]
    for it in broken:
        it[0, :, 1:5] = torch.nan
    out = document_attention(*(it.requires_grad_() for it in broken), layout_of(rows))
    assert out[0, 1:5].isnan().all()
    assert torch.equal(out[0, 5:], whole[0, 5:])
    assert torch.equal(out[1], whole[1])
    out[0, 5:].sum().backward()
    assert broken[0].grad is not None
    assert bool(broken[0].grad[0, :, 5:].isfinite().all())


def test_autocast_casts_all_but_float64() -> None:
    q, k, v = (it.detach() for it in heads(SHAPES["grouped"]))
    layout = layout_of(ROWS["many documents"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = document_attention(q.float(), k.float(), v.bfloat16(), layout)
        wide = document_attention(q, k, v, layout)
    assert mixed.dtype == torch.bfloat16
    assert wide.dtype == torch.float64
    assert furthest([mixed.double()], [wide]) < 2e-2


# What transformers' mask functions are read as.


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["causal", "window 3", "window 1", "window 50", "chunks of 4"])
def test_a_layout_is_the_square_mask(rows: tuple[tuple[int, ...], ...], kind: str) -> None:
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    size = None if kind == "causal" else int(kind.split()[-1])
    function = masking_utils.causal_mask_function
    if "window" in kind:
        function = masking_utils.sliding_window_causal_mask_function(size)
    elif size is not None:
        function = masking_utils.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.int64))
    marks = masking_utils.find_packed_sequence_indices(positions)
    if marks is not None:
        function = masking_utils.and_masks(
            masking_utils.remap_positions_for_packed_sequence(function, positions),
            masking_utils.packed_sequence_mask_function(marks),
        )
    square = masking_utils.sdpa_mask(
        batch_size=2, q_length=20, kv_length=20, mask_function=function, allow_is_causal_skip=False
    )
    layout = document_layout(function, shape=(2, 20), window=size, device="cpu")
    assert layout is not None
    if kind == "causal":
        assert layout.lengths == tuple(length for row in rows for length in row)
    assert layout.offsets.tolist() == [sum(layout.lengths[:n]) for n in range(len(layout.lengths) + 1)]
    inside = torch.block_diag(*(torch.ones(length, length) for length in layout.lengths)).bool()
    inside = inside.tril().triu(1 - (layout.window or 40))
    assert torch.equal(torch.stack([inside[:20, :20], inside[20:, 20:]])[:, None], square)


@pytest.mark.parametrize(
    "kind", ["sees later tokens", "a block sees itself", "one distant pair", "a longer window"]
)
def test_other_masks_are_no_layout(kind: str) -> None:
    causal = masking_utils.causal_mask_function
    blocks = torch.full((2, 20), -1)
    blocks[1, 4:6] = 0
    window = 3 if kind == "a longer window" else None
    function = {
        "sees later tokens": masking_utils.bidirectional_mask_function,
        "a block sees itself": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(blocks)),
        "one distant pair": lambda row, head, q, k: causal(row, head, q, k) & ~((q == 19) & (k <= 17)),
        "a longer window": masking_utils.sliding_window_causal_mask_function(4),
    }[kind]
    assert document_layout(function, shape=(2, 20), window=window, device="cpu") is None


# The kernel needs a GPU. Its call does not: what it is given is what PyTorch's own signature and checks ask for.


def stand_in(*args: Any, mistake: str = "", **kwargs: Any) -> Tensor:
    """PyTorch's varlen_attn by its documentation: computes the definition from cumulative lengths."""
    given = REAL_SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    it = given.arguments
    q, k, v = it["query"], it["key"], it["value"]
    total = q.shape[0]
    offsets = it["cu_seq_q"]
    assert it["cu_seq_k"] is offsets
    assert offsets.dtype == torch.int32
    assert offsets.is_contiguous()
    assert [int(offsets[0]), int(offsets[-1])] == [0, total]
    assert it["max_q"] == it["max_k"] == int(offsets.diff().max())
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert [it[name] for name in ("return_aux", "seqused_k", "block_table")] == [None] * 3
    assert it["enable_gqa"] or q.shape[1] == k.shape[1]
    left, right = it["window_size"]
    assert right == 0
    group = q.shape[1] // k.shape[1]
    if mistake == "heads grouped in turns":
        k, v = (one.repeat(1, group, 1) for one in (k, v))
    else:
        k, v = (one.repeat_interleave(group, dim=1) for one in (k, v))
    tokens = torch.arange(total)
    ends = offsets[1:] + (mistake == "boundary one token late")
    documents = torch.bucketize(tokens, ends, right=True)
    distance = tokens[:, None] - tokens
    sees = (documents[:, None] == documents) & ((distance >= 0) | (mistake == "later tokens seen"))
    if left >= 0:
        sees &= distance <= left + (mistake == "window one token longer")
    scores = torch.einsum("qhd,khd->hqk", q, k) * (it["scale"] or q.shape[-1] ** -0.5)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_serves", lambda *_: True)
    monkeypatch.setattr(module, "varlen_attn", stand_in)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("shape", "window"), [("plain", None), ("grouped", 3), ("grouped", 1)])
def test_the_kernel_is_called_for_the_same_thing(
    rows: tuple[tuple[int, ...], ...], shape: str, window: int | None
) -> None:
    leaves, layout = heads(SHAPES[shape]), layout_of(rows, window)
    got = results(document_attention(*leaves, layout, scale=0.3), leaves)
    flat = (it.transpose(1, 2).flatten(0, 1) for it in leaves)
    want = results(each_document(*flat, layout, 0.3).unflatten(0, (2, 20)), leaves)
    assert furthest(got, want) < 1e-12


@pytest.mark.usefixtures("kernel")
def test_a_wrong_kernel_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(heads=4, key_heads=2, head_dim=16, value_dim=16, scale=None)
    cpu = torch.device("cpu")
    for window in (None, 3):
        assert kernel_error(shape, window, cpu, torch.float32) < 1e-5
        assert kernel_error(shape, window, cpu, torch.bfloat16) < 2e-2
    mistakes = (
        "boundary one token late",
        "later tokens seen",
        "heads grouped in turns",
        "window one token longer",
    )
    for mistake in mistakes:
        monkeypatch.setattr(
            module, "varlen_attn", lambda *a, mistake=mistake, **k: stand_in(*a, mistake=mistake, **k)
        )
        assert kernel_error(shape, 3, cpu, torch.bfloat16) > 5e-2, mistake


def test_pytorch_s_own_operator_takes_the_call() -> None:
    layout = layout_of(ROWS["many documents"], 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (
            torch.empty(2, h, 20, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (4, 2, 2)
        )
        flat = [it.transpose(1, 2).flatten(0, 1) for it in (q, k, v)]
        out = module.by_kernel(*flat, layout)
        assert out.shape == (40, 4, 16)
        grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert [grad.shape for grad in grads] == [it.shape for it in (q, k, v)]


def test_where_the_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert kernel_serves(gpu, half, 64, 64)
    assert kernel_serves(gpu, torch.float16, 256, 256)
    refused = [(gpu, torch.float32, 64, 64), (torch.device("cpu"), half, 64, 64), (gpu, half, 64, 32)]
    refused += [(gpu, half, 36, 36), (gpu, half, 264, 264)]
    assert not any(kernel_serves(*case) for case in refused)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not kernel_serves(gpu, half, 64, 64)
