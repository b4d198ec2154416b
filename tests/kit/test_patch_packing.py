"""Documents of a pack stay apart in a patched model, also where the config's cache would join them."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tokennorm.kit import apply_chunked_token_loss_patch

SIZES = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def losses_of_second(model: torch.nn.Module, first_token: int, **options: object) -> torch.Tensor:
    """Losses of the second of two packed documents, for a given first token of the first."""
    ids = torch.tensor([[first_token, 4, 5, 6, 7, 8, 9, 10]])
    labels = torch.tensor([[-100] * 4 + [8, 9, 10, -100]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    outputs = model(input_ids=ids, position_ids=positions, shift_labels=labels, **options)
    return outputs.loss[4:7].detach()


def test_the_config_s_cache_does_not_join_documents(model: LlamaForCausalLM) -> None:
    assert model.config.use_cache
    apply_chunked_token_loss_patch(model)
    assert torch.equal(losses_of_second(model, 3), losses_of_second(model, 11))
    ids = torch.tensor([[7, 8, 9, 10]])
    alone = model(input_ids=ids, shift_labels=torch.tensor([[8, 9, 10, -100]])).loss[:3].detach()
    assert torch.allclose(losses_of_second(model, 3), alone, rtol=1e-5)


def test_a_cache_that_is_asked_for_is_kept_and_joins_them(model: LlamaForCausalLM) -> None:
    apply_chunked_token_loss_patch(model)
    one, other = (losses_of_second(model, token, use_cache=True) for token in (3, 11))
    assert (one - other).abs().max() > 1e-3


def test_without_labels_the_cache_is_what_the_config_says(model: LlamaForCausalLM) -> None:
    apply_chunked_token_loss_patch(model)
    assert model(input_ids=torch.tensor([[1, 2]])).past_key_values is not None
