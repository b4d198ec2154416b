from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from tokennorm.data import (
    Sample,
    collate_packed,
    collate_padded,
    document_leakage,
    documents_are_isolated,
    require_isolated_documents,
)
from tokennorm.errors import DataError

VOCABULARY = 40


def tiny_llama(**options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config)


class Positioned(torch.nn.Module):
    """Accepts positions, as the batches have them, for a model that has no use for any."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.get_input_embeddings = model.get_input_embeddings

    def forward(self, input_ids, position_ids):
        return self.model(input_ids=input_ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_isolates_and_a_cache_does_not(attention):
    model = tiny_llama(attn_implementation=attention).train()
    rng = torch.get_rng_state()
    assert document_leakage(model) == 0.0
    require_isolated_documents(model)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(module.training for module in model.modules())
    assert not documents_are_isolated(model, forward_options={"use_cache": True})
    model.config.use_cache = True
    assert not documents_are_isolated(model)
    with pytest.raises(DataError, match=r"LlamaForCausalLM does not isolate.*\n.*\n.*use_cache = False"):
        require_isolated_documents(model)
    assert documents_are_isolated(model, forward_options={"use_cache": False})


def test_16_bit_and_float64_models_can_be_probed():
    assert documents_are_isolated(tiny_llama().bfloat16())
    assert documents_are_isolated(tiny_llama().double(), batch_size=1)


@pytest.mark.filterwarnings("ignore")
def test_a_recurrent_model_does_not_isolate():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=1, use_cache=False)
    model = Positioned(MambaForCausalLM(config))
    assert document_leakage(model) > 0.01
    assert not documents_are_isolated(model)


def test_a_model_without_context_can_not_be_vouched_for():
    class Bigrams(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(VOCABULARY, VOCABULARY)

        def get_input_embeddings(self):
            return self.table

        def forward(self, input_ids, position_ids):
            return torch.nn.Module.__call__(self.table, input_ids)

    class Output:
        def __init__(self, logits):
            self.logits = logits

    model = Bigrams()
    model.register_forward_hook(lambda module, args, output: Output(output))
    with pytest.raises(DataError, match="sees nothing"):
        documents_are_isolated(model)


@torch.no_grad()
def losses(model, batch) -> dict[tuple[int, int], torch.Tensor]:
    """(position's token, target) -> loss, in float64; ids are unique, so the key names the prediction."""
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask") if key in batch}
    logits = model(**inputs).logits
    labels = batch["shift_labels"]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(
        labels
    )
    return {
        (int(batch["input_ids"][b, s]), int(labels[b, s])): loss[b, s]
        for b, s in (labels != -100).nonzero().tolist()
    }


def test_packed_losses_equal_unpacked_losses():
    """End to end on a real model, in float64, and wrong as soon as isolation is lost."""
    model = tiny_llama().double().eval()
    lengths = [5, 9, 3, 7]
    ids = torch.randperm(VOCABULARY - 1)[: sum(lengths)] + 1
    samples = [
        Sample(input_ids=part, supervised=torch.arange(len(part)) % 3 != 1, source=str(i))
        for i, part in enumerate(ids.split(lengths))
    ]
    alone = {}
    for sample in samples:
        alone |= losses(model, collate_padded([sample], pad_token_id=0))
    assert len(alone) == sum(sample.num_supervised for sample in samples) > 10

    def error(batch):
        found = losses(model, batch)
        assert found.keys() == alone.keys()
        return max(float((found[key] - alone[key]).abs()) for key in alone)

    padded = collate_padded(samples, pad_token_id=0)
    packed = collate_packed([samples[:2], samples[2:]], pad_token_id=0)
    assert error(padded) < 1e-12
    assert error(packed) < 1e-12
    # Planted: a mask of ones, which switches transformers' isolation off; positions that go on.
    assert error({**packed, "attention_mask": torch.ones_like(packed["input_ids"])}) > 1e-3
    assert error({**packed, "position_ids": torch.arange(14).repeat(2, 1)}) > 1e-3
