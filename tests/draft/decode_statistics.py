"""A target and a drafter that are quick to sample from, and the chi-squared test of what was sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft import ContextKV, DraftConfig, DraftModel, DraftVocabulary

VOCAB, WIDTH = 8, 8


class Output(dict[str, Any]):
    """As much of transformers' output as is read."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self["last_hidden_state"]


class PairDecoder(nn.Module):
    """A hidden state is looked up by the last two tokens; a cache of transformers keeps the tokens."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(
        self, input_ids: Tensor, cache: Any = None, use_cache: bool = False, return_dict: bool = True
    ) -> Output:
        tokens = input_ids.view(1, 1, -1, 1)
        if cache is not None:
            tokens, _ = cache.update(tokens, tokens, 0)
        seen = tokens.flatten().tolist()
        # Token VOCAB stands before the first.
        pairs = [before * VOCAB + token for before, token in zip([VOCAB, *seen], seen, strict=False)]
        return Output(last_hidden_state=self.table[pairs[-input_ids.shape[1] :]].unsqueeze(0), cache=cache)


class PairTarget(nn.Module):
    """A causal LM whose next token depends on the last two, so that a cache that was not cut back shows.

    Attributes:
        single: ``[V, D]``, the part of the hidden states that depends on the last token alone.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.config = SimpleNamespace(num_hidden_layers=1, hidden_size=WIDTH, vocab_size=VOCAB)
        self.single = random(VOCAB, WIDTH)
        self.model = PairDecoder((self.single + random(VOCAB + 1, VOCAB, WIDTH)).flatten(0, 1))
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)
        with torch.no_grad():
            for module in (self.embed, self.lm_head):
                module.weight.copy_(0.4 * random(VOCAB, WIDTH))
        self.eval()

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


class Remembering(DraftModel):
    """Computes each block, and each position's keys and values, once: the same few come again and again."""

    def __init__(self, config: DraftConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.known: dict[Any, Any] = {}

    def context(self, features: Tensor, position_ids: Tensor) -> ContextKV:
        key = (_bytes(features), _bytes(position_ids))
        if key not in self.known:
            self.known[key] = super().context(features, position_ids)
        return self.known[key]

    def draft_hidden(
        self, anchor_ids: Tensor, anchor_positions: Tensor, context: ContextKV, context_mask: Tensor | None = None
    ) -> Tensor:
        seen = (*context.keys, *context.values)
        key = (_bytes(anchor_ids), _bytes(anchor_positions), *(_bytes(part) for part in seen))
        if key not in self.known:
            self.known[key] = super().draft_hidden(anchor_ids, anchor_positions, context, context_mask)
        return self.known[key]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def fair_drafter(target: PairTarget, *, seed: int = 3, **options: Any) -> Remembering:
    """Knows what the last token alone says about the next, and adds noise of its own."""
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_target_layers": 1,
        "target_layer_ids": (0,),
        "mask_token_id": 7,
        "num_layers": 1,
        "block_size": 3,
        "markov_rank": WIDTH,
    }
    config = DraftConfig(**defaults | options)
    vocabulary = None
    if config.draft_vocab_size is not None:
        vocabulary = DraftVocabulary(torch.arange(1, config.draft_vocab_size + 1), VOCAB)
    drafter = Remembering(config, vocabulary=vocabulary).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            random = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.5 + 0.1 * random if "norm" in name else 0.4 * random)
        drafter.share_target(target.embed.weight, target.lm_head.weight, copy=True)
        if drafter.markov_head is not None:
            drafter.markov_head.markov_w1.weight.copy_(target.single)
            drafter.markov_head.markov_w2.weight.copy_(drafter.lm_head.weight)
    return drafter


Outcome = tuple[int, ...]


def exact_distribution(target: Any, prompt: Sequence[int], temperature: float, count: int) -> dict[Outcome, float]:
    """The probability of every first ``count`` tokens: a forward pass without cache for each beginning."""
    vocab = target.get_input_embeddings().weight.shape[0]
    exact: dict[Outcome, float] = {(): 1.0}
    for _ in range(count):
        longer = {}
        for tokens, probability in exact.items():
            with torch.no_grad():
                hidden = target.get_decoder()(input_ids=torch.tensor([[*prompt, *tokens]])).last_hidden_state
                logits = target.get_output_embeddings()(hidden[0, -1]).double()
            after = (logits / temperature).softmax(dim=-1).tolist()
            longer.update({(*tokens, token): probability * after[token] for token in range(vocab)})
        exact = longer
    return exact


def chi_squared(samples: Iterable[Outcome], exact: dict[Outcome, float]) -> float:
    """The p-value of samples that should follow ``exact``; rare outcomes are put together until 5 are expected."""
    counts = Counter(samples)
    total = counts.total()
    assert set(counts) <= set(exact)
    cells: list[tuple[float, float]] = []
    expected = observed = 0.0
    # The rarest first, so that what is put together is rare, and the last cell is one outcome.
    for outcome in sorted(exact, key=lambda outcome: exact[outcome]):
        expected += total * exact[outcome]
        observed += counts[outcome]
        if expected >= 5:
            cells.append((expected, observed))
            expected = observed = 0.0
    assert expected == 0
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in cells)
    half = torch.tensor([len(cells) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1]))
