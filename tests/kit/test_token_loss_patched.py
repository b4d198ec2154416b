"""The kit with a patched Hugging Face model: a router loss is a term, and a forgotten one is noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from tests.kit.window_toy import relative_error
from tokennorm.errors import KitUsageError
from tokennorm.kit import TokenNormedLossKit, remove_chunked_token_loss_patch
from tokennorm.loss import LossTerm

# Supervised targets of each micro-batch [1, 12].
SUPERVISED = (11, 2, 0, 6)


@pytest.fixture(scope="module")
def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return MixtralForCausalLM(config).double().train()


def micro_batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for supervised in SUPERVISED:
        ids = torch.randint(50, (1, 12), generator=generator)
        targets = torch.full((1, 12), -100)
        targets[0, :supervised] = ids[0, 1 : supervised + 1]
        batches.append({"input_ids": ids, "shift_labels": targets})
    return batches


def router_weighted_by(
    mixtral: MixtralForCausalLM, weights: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and logged objective of a window whose router losses are weighted so (right: by tokens)."""
    kit = TokenNormedLossKit("cpu", 1)
    model = kit.apply_chunked_token_loss_patch(copy.deepcopy(mixtral))
    for batch, tokens, weight in zip(micro_batches(), SUPERVISED, weights, strict=True):
        outputs = model(**batch)
        terms = {"router": LossTerm(numerator=outputs.extra_loss * weight, denominator=tokens)}
        loss = kit.accumulate_microbatch(
            loss_sum=outputs.loss.sum(), effective_tokens=tokens, total_tokens=12, extra_terms=terms
        )
        loss.backward()
    stats = kit.reduce_window()
    kit.rescale_gradients(model.parameters(), stats)
    assert stats.mean_loss is not None
    assert stats.extra["router"].mean is not None
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, stats.mean_loss + stats.extra["router"].mean


def test_a_window_of_a_mixture_of_experts(mixtral: MixtralForCausalLM) -> None:
    reference = copy.deepcopy(mixtral)
    objective = torch.zeros((), dtype=torch.float64)
    for batch, tokens in zip(micro_batches(), SUPERVISED, strict=True):
        # The unpatched model: its own logits, and its router loss apart from the cross-entropy.
        outputs = reference(input_ids=batch["input_ids"])
        targets = batch["shift_labels"].flatten()
        summed = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets, reduction="sum")
        objective = objective + (summed + 0.5 * outputs.aux_loss * tokens) / sum(SUPERVISED)
    objective.backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    found, total = router_weighted_by(mixtral, SUPERVISED)
    assert found.keys() == expected.keys()
    # The family computes its router loss in float32, whatever the model's dtype.
    assert relative_error(list(found.values()), list(expected.values())) < 5e-7
    assert total == pytest.approx(objective.item(), rel=1e-7)
    # The mistake: every micro-batch's router loss counts the same.
    found, total = router_weighted_by(mixtral, (5, 5, 4, 5))
    assert relative_error(list(found.values()), list(expected.values())) > 1e-4
    assert total != pytest.approx(objective.item(), rel=1e-5)


def test_a_forgotten_router_loss(mixtral: MixtralForCausalLM) -> None:
    kit = TokenNormedLossKit("cpu", 1)
    model = kit.apply_chunked_token_loss_patch(copy.deepcopy(mixtral))
    assert kit.apply_chunked_token_loss_patch(model) is model  # a second time notices no more than once
    for batch, tokens in zip(micro_batches(), SUPERVISED, strict=True):
        kit.accumulate_microbatch(loss_sum=model(**batch).loss.sum(), effective_tokens=tokens, total_tokens=12)
    with pytest.raises(KitUsageError, match=r"4 times over all ranks: .*extra_loss"):
        kit.reduce_window()
    kit.reset()
    remove_chunked_token_loss_patch(model)
    kit.accumulate_microbatch(
        loss_sum=model(input_ids=micro_batches()[0]["input_ids"]).logits.sum(),
        effective_tokens=1,
        total_tokens=12,
    )
    assert kit.reduce_window().global_effective_tokens == 1
