"""A tiny drafter, a packed batch, and the drafter by definition: one block at a time, only what it may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft import DraftVocabulary
from tokennorm.draft.anchors import Anchors, document_ids
from tokennorm.draft.blocks import Blocks, make_blocks
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.model import DraftModel

VOCAB, WIDTH, LAYERS = 31, 16, 6


def toy_config(**options: Any) -> DraftConfig:
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_target_layers": LAYERS,
        "target_layer_ids": (-1, 2, 5),
        "mask_token_id": 29,
        "num_layers": 2,
        "block_size": 4,
        "markov_rank": 5,
    }
    return DraftConfig(**defaults | options)


def toy_drafter(seed: int = 0, *, dtype: torch.dtype = torch.float64, **options: Any) -> DraftModel:
    """Random everywhere: fresh weights would hide a Markov bias of 0 and norms of 1."""
    vocabulary = None
    if size := options.get("draft_vocab_size"):
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:size]
        vocabulary = DraftVocabulary(ids.sort().values, VOCAB)
    model_options = {
        name: options.pop(name) for name in ("attention", "gradient_checkpointing") if name in options
    }
    model = DraftModel(toy_config(**options), vocabulary=vocabulary, **model_options).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    return model


@dataclass
class Rows:
    """A packed batch: documents of 7, 5 and 4 tokens, and of 9 and 7."""

    input_ids: Tensor
    position_ids: Tensor
    documents: Tensor
    supervised: Tensor
    features: Tensor

    def anchored(self, anchors: Anchors, config: DraftConfig) -> Blocks:
        return make_blocks(
            self.input_ids,
            self.supervised,
            anchors,
            block_size=config.block_size,
            first_supervised_slot=config.first_supervised_slot,
            documents=self.documents,
        )


def toy_rows(seed: int = 0, *, feature_size: int = 3 * WIDTH) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    lengths = [(7, 5, 4), (9, 7)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    starts = positions == 0
    return Rows(
        input_ids=torch.randint(VOCAB - 3, positions.shape, generator=generator),
        position_ids=positions,
        documents=document_ids(positions),
        supervised=(torch.rand(positions.shape, generator=generator) < 0.85) & ~starts,
        features=torch.randn(*positions.shape, feature_size, generator=generator, dtype=torch.float64),
    )


def close_anchors() -> Anchors:
    """Closer together than a block, in every document, at its first and last positions; two dummies."""
    return Anchors(
        positions=torch.tensor([[1, 2, 3, 8, 10, 13, 0], [0, 4, 5, 9, 11, 14, 0]]),
        keep=torch.tensor([[True] * 6 + [False], [True] * 6 + [False]]),
    )


def naive_block(
    model: DraftModel, rows: Rows, row: int, anchor: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """``[K, D]`` of the block at one anchor: softmax over the keys that it may see, nothing masked."""
    config, weights = model.config, {name: value.to(dtype) for name, value in model.state_dict().items()}
    document = rows.documents[row, anchor]
    visible = [s for s in range(anchor) if rows.documents[row, s] == document]
    context = naive_norm(
        rows.features[row, visible].to(dtype) @ weights["fc.weight"].t(), weights["hidden_norm.weight"]
    )
    tokens = [int(rows.input_ids[row, anchor])] + [config.mask_token_id] * (config.block_size - 1)
    states = weights["embed_tokens.weight"][tokens]
    start = int(rows.position_ids[row, anchor])
    own = torch.arange(start, start + config.block_size)
    where = torch.cat([rows.position_ids[row, visible], own])
    for number in range(config.num_layers):
        part = {
            name.removeprefix(f"layers.{number}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        normed = naive_norm(states, part["input_layernorm.weight"])
        seen = torch.cat([context, normed])
        mixed = []
        for head in range(config.num_attention_heads):
            group = head * config.num_key_value_heads // config.num_attention_heads
            queries = naive_head(normed, part, "q", head, own, config)
            keys = naive_head(seen, part, "k", group, where, config)
            values = (seen @ part["self_attn.v_proj.weight"].t())[:, group * 6 : group * 6 + 6]
            mixed.append((queries @ keys.t() / 6**0.5).softmax(-1) @ values)
        states = states + torch.cat(mixed, dim=1) @ part["self_attn.o_proj.weight"].t()
        normed = naive_norm(states, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(normed @ part["mlp.gate_proj.weight"].t())
        states = states + (gate * (normed @ part["mlp.up_proj.weight"].t())) @ part["mlp.down_proj.weight"].t()
    return naive_norm(states, weights["norm.weight"])


def naive_norm(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def naive_head(
    states: Tensor, part: dict[str, Tensor], kind: str, head: int, positions: Tensor, config: DraftConfig
) -> Tensor:
    size = config.head_dim
    out = (states @ part[f"self_attn.{kind}_proj.weight"].t())[:, head * size : (head + 1) * size]
    if config.qk_norm:
        out = naive_norm(out, part[f"self_attn.{kind}_norm.weight"])
    # As complex numbers; the library rotates halves. The frequencies are float32's by contract.
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions[:, None].to(out.dtype) * frequencies.to(out.dtype)
    turned = torch.complex(out[:, : size // 2], out[:, size // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)
