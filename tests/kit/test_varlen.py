"""Models with attention inside documents against the same models with a square mask, in float64."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.shrunk_models import VOCABULARY, build, shrunk_config
from tokennorm.data import documents_are_isolated
from tokennorm.errors import PatchError
from tokennorm.kit import apply_chunked_token_loss_patch, use_varlen_attention, varlen
from tokennorm.kit.document_layout import DocumentLayout
from tokennorm.kit.varlen import VARLEN_ATTENTION, AttentionWatch, watched

WINDOW = 4
FAMILIES = {
    "grouped heads, tied head": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "sliding window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "full and sliding layers, own scale": (
        "Gemma3ForCausalLM",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "biases": ("Qwen2ForCausalLM", {}),
    "chunks": (
        "Llama4ForCausalLM",
        {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]},
    ),
}
BATCHES = {
    "documents of length 1, padding at the end": [(1, 9, 1, 6, 7), (5, 5, 5, 9)],
    "one document per row": [(24,), (24,)],
    "one row of many": [(2, 3, 1, 1, 4, 2, 2, 3, 6)],
}


def tiny(name: str, dtype: torch.dtype = torch.float64, /, **changes: Any) -> Any:
    cls = getattr(transformers, name)
    config = shrunk_config(cls.config_class())
    for key, value in changes.items():
        setattr(config, key, value)
    return build(config, cls, dtype)


def packed(rows: list[tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (len(rows), sum(rows[0])), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, ::4] = -100
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    # The last document of the first row is padding.
    labels[0, -rows[0][-1] :] = -100 if len(rows[0]) > 1 else 3
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels}


def results(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Losses of all tokens, and all gradients for an uneven upstream."""
    model.zero_grad()
    losses = model(**batch).loss
    (losses * torch.linspace(0, 2, losses.numel(), dtype=losses.dtype)).sum().backward()
    grads = {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}
    return {"losses": losses.detach(), **grads}


def furthest(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    assert all(float(it.norm()) > 0 for it in want.values())
    return max(float((got[name] - it).norm() / it.norm()) for name, it in want.items())


@contextmanager
def watching() -> Iterator[AttentionWatch]:
    watch = AttentionWatch()
    token = watched.set(watch)
    try:
        yield watch
    finally:
        watched.reset(token)


def pair(family: str) -> tuple[Any, Any]:
    """The same model with a square mask and with attention inside documents, both patched."""
    name, changes = FAMILIES[family]
    square = tiny(name, **changes)
    inside = copy.deepcopy(square)
    use_varlen_attention(inside)
    return apply_chunked_token_loss_patch(square), apply_chunked_token_loss_patch(inside)


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_all_gradients_are_those_of_the_square_mask(family: str) -> None:
    square, inside = pair(family)
    assert square.config._attn_implementation == "sdpa"
    for name, rows in BATCHES.items():
        batch = packed(rows)
        want = results(square, batch)
        with watching() as watch:
            got = results(inside, batch)
        assert furthest(got, want) < 1e-10, name
        used = len(watch.modules), watch.elsewhere
        # A single document per row is sdpa's own causal case, unless there is a window.
        assert used == (2, 0) or (len(rows[0]) == 1 and sum(used) == 2), name
    inside.activation_checkpointing_enable({"use_reentrant": False})
    inside.train()
    assert furthest(results(inside, batch), want) < 1e-10


def one_late(layout: DocumentLayout) -> DocumentLayout:
    first, second, *rest = layout.lengths
    lengths = (first + 1, second - 1, *rest) if second > 1 else (first + second, *rest)
    return DocumentLayout.of(lengths, shape=layout.shape, window=layout.window, device="cpu")


def together(layout: DocumentLayout) -> DocumentLayout:
    batch, length = layout.shape
    return DocumentLayout.of((length,) * batch, shape=layout.shape, window=layout.window, device="cpu")


MISTAKES = {
    "boundary one token late": one_late,
    "documents not apart": together,
    "window one token longer": lambda layout: replace(layout, window=(layout.window or 99) + 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows_in_the_gradients_and_at_the_start(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    square, inside = pair("sliding window")
    batch = packed(BATCHES["documents of length 1, padding at the end"])
    read = varlen.document_layout
    monkeypatch.setattr(varlen, "document_layout", lambda *args, **kw: MISTAKES[mistake](read(*args, **kw)))
    assert furthest(results(inside, batch), results(square, batch)) > 1e-3
    fresh = tiny("MistralForCausalLM", sliding_window=WINDOW)
    with pytest.raises(PatchError, match="logits differ by"):
        use_varlen_attention(fresh)
    assert fresh.config._attn_implementation == "sdpa"


def test_seeing_later_tokens_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    square, inside = pair("grouped heads, tied head")
    batch = packed(BATCHES["one row of many"])
    want = results(square, batch)
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kw: attend(*args, **{**kw, "is_causal": False}),
    )
    assert furthest(results(inside, batch), want) > 1e-3


def test_padded_rows_and_generation_take_the_way_of_sdpa() -> None:
    square = tiny("MistralForCausalLM", sliding_window=WINDOW).eval()
    inside = use_varlen_attention(copy.deepcopy(square))
    ids = packed([(9,), (9,)])["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.no_grad(), watching() as watch:
        assert torch.equal(
            inside(input_ids=ids, attention_mask=mask).logits, square(input_ids=ids, attention_mask=mask).logits
        )
        assert watch.elsewhere == 2
        for given in ({"attention_mask": mask}, {}):
            options = {**given, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(inside.generate(ids, **options), square.generate(ids, **options))
    assert watch.elsewhere > 2


def test_the_isolation_probe_and_half_precision() -> None:
    model = use_varlen_attention(tiny("LlamaForCausalLM", torch.float32))
    assert documents_are_isolated(model, forward_options={"use_cache": False})
    square = apply_chunked_token_loss_patch(copy.deepcopy(model))
    square.set_attn_implementation("sdpa")
    apply_chunked_token_loss_patch(model)
    batch = packed(BATCHES["one row of many"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = (results(it, batch) for it in (model, square))
    assert furthest(got, want) < 3e-2
    use_varlen_attention(model, dtype=torch.bfloat16)
    with pytest.raises(PatchError, match=r"kernel does not take torch\.bfloat16 heads of 8"):
        use_varlen_attention(model, dtype=torch.bfloat16, require_kernel=True)


def refused(model: Any, match: str) -> None:
    before = model.config._attn_implementation
    training = {name: it.training for name, it in model.named_modules()}
    with pytest.raises(PatchError, match=match):
        use_varlen_attention(model)
    assert model.config._attn_implementation == before
    assert {name: it.training for name, it in model.named_modules()} == training


def test_what_it_can_t_do_is_refused_before_training() -> None:
    refused(tiny("LlamaForCausalLM", attention_dropout=0.1).train(), r"dropout of 0\.1 on its weights")
    refused(tiny("Gemma2ForCausalLM"), "does not support sdpa")  # softcap
    refused(tiny("GptOssForCausalLM"), "does not support sdpa")  # sinks
    refused(tiny("Gemma3ForCausalLM", use_bidirectional_attention=True), "square mask|later tokens")
    model = tiny("LlamaForCausalLM")
    model.model.layers[1].self_attn.is_causal = False
    refused(model, "to see later tokens")
    model.compile(backend="eager")
    refused(model, "compiled")


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("softcap", 30.0, "a softcap"),
        ("s_aux", torch.zeros(4), "sinks"),
        ("output_attentions", True, "its weights"),
    ],
)
def test_what_a_layer_asks_for_is_refused_in_the_forward_pass(option: str, value: Any, wanted: str) -> None:
    heads = torch.zeros(1, 4, 6, 8)
    layout = DocumentLayout.of((2, 4), shape=(1, 6), window=None, device="cpu")
    with pytest.raises(PatchError, match=wanted):
        varlen._attention(torch.nn.Identity(), heads, heads, heads, layout, **{option: value})
    with pytest.raises(PatchError, match="documents would be cut"):
        varlen._attention(torch.nn.Identity(), heads[:, :, 1:], heads, heads, layout)


def test_a_rank_without_weights_gets_it_unchecked() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(shrunk_config(transformers.LlamaConfig()))
    with pytest.raises(PatchError):
        use_varlen_attention(copy.deepcopy(model))
    use_varlen_attention(model, compare=False)
    assert model.config._attn_implementation == VARLEN_ATTENTION


def test_what_is_saved_does_not_name_it(tmp_path: Path) -> None:
    model = use_varlen_attention(tiny("MistralForCausalLM", torch.float32))
    assert model.config._attn_implementation == VARLEN_ATTENTION
    model.save_pretrained(tmp_path)
    assert "tokennorm" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"
