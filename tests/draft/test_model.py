"""The batched masked forward against the drafter by definition, and what each slot must not see."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

import tokennorm.draft.model as model_module
from tests.draft.drafter_toy import (
    VOCAB,
    WIDTH,
    Rows,
    close_anchors,
    naive_block,
    toy_config,
    toy_drafter,
    toy_rows,
)
from tests.draft.reference import relative_error
from tokennorm.draft import (
    DraftVocabulary,
    DSparkForwardOutput,
    compute_dspark_loss,
    dspark_objective,
    reduce_output,
    teacher_positions,
)
from tokennorm.draft.anchors import Anchors
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.decoding.proposals import propose
from tokennorm.draft.forward import DraftForward
from tokennorm.draft.layer_ids import default_layer_ids, layer_ids_from_server, layer_ids_to_server
from tokennorm.draft.masks import block_attention_mask
from tokennorm.draft.model import DraftModel
from tokennorm.draft.rope import RotaryEmbedding
from tokennorm.errors import ConfigError, LossUsageError

OBJECTIVE = {"loss_decay_gamma": 4.0, "ce_loss_alpha": 0.1, "l1_loss_alpha": 0.9, "confidence_head_alpha": 1.0}


def run(model: DraftModel, rows: Rows, anchors: Anchors) -> DraftForward:
    blocks = rows.anchored(anchors, model.config)
    return model(blocks=blocks, features=rows.features, position_ids=rows.position_ids, documents=rows.documents)


def worst_block(model: DraftModel, rows: Rows, anchors: Anchors) -> float:
    """Largest difference to the definition over all kept blocks."""
    hidden = run(model, rows, anchors).hidden
    return max(
        float((hidden[b, a] - naive_block(model, rows, b, int(anchors.positions[b, a]))).abs().max())
        for b, a in anchors.keep.nonzero().tolist()
    )


@pytest.mark.parametrize("qk_norm", [True, False], ids=["qwen3", "llama"])
@pytest.mark.parametrize("first", [0, 1], ids=["next-token", "bonus-anchor"])
def test_batched_forward_is_the_definition_block_by_block(qk_norm: bool, first: int) -> None:
    model = toy_drafter(qk_norm=qk_norm, first_supervised_slot=first)
    with torch.no_grad():
        assert worst_block(model, toy_rows(), close_anchors()) < 1e-12


def by_block_number(anchors: Tensor, size: int, length: int, documents: Tensor | None) -> Tensor:
    """Planted: the context ends at the block's number times its size."""
    numbers = torch.arange(anchors.shape[1]).expand_as(anchors) * size
    return block_attention_mask(numbers.clamp(max=length - 1), size, length, documents)


def anchor_included(anchors: Tensor, size: int, length: int, documents: Tensor | None) -> Tensor:
    """Planted: ``<=`` where ``<`` belongs."""
    mask = block_attention_mask(anchors, size, length, documents)
    at = anchors.repeat_interleave(size, dim=1).unsqueeze(1).unsqueeze(-1)
    return mask.scatter(3, at, True)


def documents_ignored(anchors: Tensor, size: int, length: int, documents: Tensor | None) -> Tensor:
    """Planted: the whole row is context."""
    return block_attention_mask(anchors, size, length, None)


def causal_inside(anchors: Tensor, size: int, length: int, documents: Tensor | None) -> Tensor:
    """Planted: slots see only earlier slots of their block."""
    mask = block_attention_mask(anchors, size, length, documents).clone()
    slots = anchors.shape[1] * size
    mask[..., length:] &= torch.ones(slots, slots, dtype=torch.bool).tril()
    return mask


@pytest.mark.parametrize("mistake", [by_block_number, anchor_included, documents_ignored, causal_inside])
def test_a_planted_mask_is_found(mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "block_attention_mask", mistake)
    with torch.no_grad():
        assert worst_block(toy_drafter(), toy_rows(), close_anchors()) > 1e-3


def test_swapped_layers_and_shifted_positions_are_found() -> None:
    model, rows, anchors = toy_drafter(), toy_rows(), close_anchors()
    right = run(model, rows, anchors).hidden
    order = torch.cat([torch.arange(WIDTH, 2 * WIDTH), torch.arange(WIDTH), torch.arange(2 * WIDTH, 3 * WIDTH)])
    swapped = dataclasses.replace(rows, features=rows.features[..., order])
    assert (run(model, swapped, anchors).hidden - right).abs().max() > 1e-3
    # Rotary embeddings are relative: only a shift of the blocks against their context can be seen.
    blocks = rows.anchored(anchors, model.config)
    shifted = model(
        blocks=blocks, features=rows.features, position_ids=rows.position_ids * 2, documents=rows.documents
    )
    assert (shifted.hidden - right).abs().max() > 1e-3


def supervised_outputs(output: DraftForward, mask: Tensor) -> Tensor:
    assert output.latents is not None
    assert output.confidence is not None
    parts = [output.hidden, output.latents, output.confidence.unsqueeze(-1)]
    return torch.cat([part[mask] for part in parts], dim=-1)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_no_block_sees_the_future_or_another_document(head: str) -> None:
    """Change ids and hidden states that a block must not see: all of its outputs stay bitwise the same."""
    model, rows, anchors = toy_drafter(markov_head_type=head), toy_rows(), close_anchors()
    blocks = rows.anchored(anchors, model.config)
    with torch.no_grad():
        before = run(model, rows, anchors)
        for row, index in ((0, 1), (0, 3), (1, 2)):
            anchor = int(anchors.positions[row, index])
            document = rows.documents[row, anchor]
            elsewhere = rows.documents[row] != document
            at = torch.arange(rows.input_ids.shape[1])
            # Its own labels are inputs of the Markov head, by design; only what lies behind the block is future.
            behind = elsewhere | (at >= anchor + model.config.block_size)
            ids, features = rows.input_ids.clone(), rows.features.clone()
            ids[row, behind] = (ids[row, behind] + 1) % 28
            features[row, elsewhere | (at >= anchor)] = 1e3
            ids[1 - row] = (ids[1 - row] + 1) % 28
            features[1 - row] = 7.0
            after = run(model, dataclasses.replace(rows, input_ids=ids, features=features), anchors)
            mask = blocks.eval_mask[row, index]
            assert mask.any()
            assert torch.equal(before.hidden[row, index], after.hidden[row, index])
            one = supervised_outputs(before, blocks.eval_mask & _only(blocks.eval_mask, row, index))
            two = supervised_outputs(after, blocks.eval_mask & _only(blocks.eval_mask, row, index))
            assert torch.equal(one, two)


def _only(mask: Tensor, row: int, index: int) -> Tensor:
    only = torch.zeros_like(mask)
    only[row, index] = True
    return only


def test_what_a_block_should_see_changes_it() -> None:
    """The probes of the last test would also pass on a drafter that sees nothing."""
    model, rows, anchors = toy_drafter(), toy_rows(), close_anchors()
    with torch.no_grad():
        before = run(model, rows, anchors).hidden
        features = rows.features.clone()
        features[0, 2] += 0.1
        after = run(model, dataclasses.replace(rows, features=features), anchors).hidden
    changed = (before - after).abs().amax(dim=(-1, -2))[0] > 1e-6
    # Anchors 1, 2, 3 of the first document: position 2 is context of anchor 3 alone.
    assert changed.tolist() == [False, False, True, False, False, False, False]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_masks_of_flex_attention_give_the_same_forward() -> None:
    rows, anchors = toy_rows(), close_anchors()
    with torch.no_grad():
        dense = run(toy_drafter(attention="sdpa"), rows, anchors).hidden
        flex = run(toy_drafter(attention="flex"), rows, anchors).hidden
    assert (dense - flex).abs().max() < 1e-12


def test_decoding_a_block_is_the_training_forward_of_that_block() -> None:
    """Context in two pieces, as a decoder gets it; then left to right with the data's tokens."""
    for first, head in itertools.product((0, 1), ("vanilla", "gated", "rnn")):
        model, rows = toy_drafter(first_supervised_slot=first, markov_head_type=head), toy_rows()
        anchor, row = 6, 1
        anchors = Anchors(positions=torch.tensor([[0], [anchor]]), keep=torch.tensor([[False], [True]]))
        blocks = rows.anchored(anchors, model.config)
        with torch.no_grad():
            trained = run(model, rows, anchors)
            pieces = [
                model.context(rows.features[row : row + 1, part], rows.position_ids[row : row + 1, part])
                for part in (slice(0, 4), slice(4, anchor + 2))
            ]
            context = pieces[0].extended(pieces[1]).cropped(anchor)
            ids = rows.input_ids[row : row + 1, anchor]
            hidden = model.draft_hidden(ids, torch.tensor([anchor]), context)
            data = rows.input_ids[row, anchor + 1 : anchor + 1 + model.config.num_proposals]
            proposal = propose(model, hidden, ids, choose=lambda scores, number, data=data: data[number].view(1))
        assert (hidden[0] - trained.hidden[row, 0]).abs().max() < 1e-12
        # The last proposal of the data may be another document's: the Markov head does not see that one.
        known = int((rows.documents[row, anchor + 1 :] == rows.documents[row, anchor]).sum())
        slots = slice(first, first + min(known + 1, model.config.num_proposals))
        count = slots.stop - slots.start
        assert (proposal.logits[0, :count] - trained.logits()[row, 0, slots]).abs().max() < 1e-12
        assert proposal.confidence is not None
        assert trained.confidence is not None
        assert (proposal.confidence[0, :count] - trained.confidence[row, 0, slots]).abs().max() < 1e-12
        assert blocks.previous_ids[row, 0, first] == ids[0]


def test_rows_of_different_length_decode_together() -> None:
    model, rows = toy_drafter(), toy_rows()
    with torch.no_grad():
        context = model.context(rows.features[:, :5], rows.position_ids[:, :5])
        ids, positions = rows.input_ids[:, 3], torch.tensor([3, 5])
        mask = torch.arange(5) < positions.unsqueeze(1)
        together = model.draft_hidden(ids, positions, context, mask)
        for row, position in enumerate(positions.tolist()):
            alone = context.rows(torch.tensor([row])).cropped(position)
            expected = model.draft_hidden(ids[row : row + 1], positions[row : row + 1], alone)
            assert (together[row] - expected[0]).abs().max() < 1e-12


def test_a_block_ends_where_confidence_is_low() -> None:
    model, rows = toy_drafter(), toy_rows()
    asked: list[int] = []

    def keep_going(confidence: Tensor, number: int) -> bool:
        assert confidence.shape == (1,)
        asked.append(number)
        return number < 2

    with torch.no_grad():
        context = model.context(rows.features[:1, :4], rows.position_ids[:1, :4])
        hidden = model.draft_hidden(torch.tensor([3]), torch.tensor([4]), context)
        whole = propose(model, hidden, torch.tensor([3]))
        short = propose(model, hidden, torch.tensor([3]), keep_going=keep_going)
        none = propose(model, hidden, torch.tensor([3]), keep_going=lambda confidence, number: False)
    assert asked == [0, 1, 2]
    assert torch.equal(short.token_ids, whole.token_ids[:, :2])
    assert whole.logits.shape == (1, 4, VOCAB)
    assert none.token_ids.shape == (1, 0)
    assert none.logits.shape == (1, 0, VOCAB)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_it_trains_with_the_fused_objective(head: str) -> None:
    """Every trained parameter gets the gradient that autograd gives through the full logits."""
    options = {"markov_head_type": head, "draft_vocab_size": 20}
    rows, anchors, generator = toy_rows(), close_anchors(), torch.Generator().manual_seed(3)
    teacher = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=generator)
    teacher_head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, generator=generator)

    def fused(model: DraftModel) -> Tensor:
        plan = rows.anchored(anchors, model.config).plan(model.vocabulary)
        arguments = run(model, rows, anchors).objective_arguments()
        sums = dspark_objective(
            plan=plan, **arguments, teacher_hidden=teacher, teacher_head=teacher_head, **OBJECTIVE
        )
        return sums.loss_sum / sums.denominator

    def unfused(model: DraftModel) -> Tensor:
        output, blocks = run(model, rows, anchors), rows.anchored(anchors, model.config)
        where = teacher_positions(blocks.anchors, blocks.block_size).clamp(max=15)
        vocabulary = model.vocabulary
        assert isinstance(vocabulary, DraftVocabulary)
        full = DSparkForwardOutput(
            draft_logits=output.logits(),
            target_ids=blocks.target_ids,
            eval_mask=blocks.eval_mask,
            block_keep_mask=blocks.keep,
            confidence_pred=output.confidence,
            aligned_target_logits=teacher[torch.arange(2).view(-1, 1, 1), where] @ teacher_head.t(),
        )
        loss = compute_dspark_loss(outputs=reduce_output(full, vocabulary), **OBJECTIVE)
        assert isinstance(loss, Tensor)
        return loss

    gradients = []
    for loss, more in ((unfused, {}), (fused, {}), (fused, {"gradient_checkpointing": True})):
        model = toy_drafter(**options, **more)
        loss(model).backward()
        assert model.embed_tokens.weight.grad is None
        assert model.lm_head.weight.grad is None
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    for name, expected in gradients[0].items():
        assert expected is not None, name
        assert expected.abs().sum() > 0, name
        for other in gradients[1:]:
            assert relative_error(other[name], expected) < 1e-11, name


def test_a_batch_without_anchors_still_reaches_every_parameter() -> None:
    """A rank without data must take part in every collective of its gradients."""
    model, rows = toy_drafter(), toy_rows()
    anchors = Anchors(positions=torch.zeros(2, 1, dtype=torch.int64), keep=torch.zeros(2, 1, dtype=torch.bool))
    output = run(model, rows, anchors)
    sums = dspark_objective(
        plan=rows.anchored(anchors, model.config).plan(model.vocabulary),
        **output.objective_arguments(),
        teacher_hidden=torch.randn(2, 16, WIDTH, dtype=torch.float64),
        **OBJECTIVE,
    )
    sums.loss_sum.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_confidence_gradient_stays_out_when_detached() -> None:
    for detach in (False, True):
        model, rows, anchors = toy_drafter(detach_confidence_inputs=detach), toy_rows(), close_anchors()
        output = run(model, rows, anchors)
        assert output.confidence is not None
        output.confidence.sum().backward()
        assert model.confidence_head is not None
        assert model.confidence_head.proj.weight.grad is not None
        assert (model.fc.weight.grad is None) == detach
        assert model.markov_head is not None
        assert (model.markov_head.markov_w1.weight.grad is None) == detach


def test_rotary_frequencies_survive_casts_and_the_meta_device() -> None:
    model = toy_drafter(dtype=torch.float32)
    frequencies = model.rotary_emb.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.fc.weight.dtype == torch.bfloat16
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.rotary_emb.inv_freq, frequencies)
    with torch.device("meta"):
        empty = DraftModel(toy_config())
    empty.to_empty(device="cpu")
    assert torch.equal(empty.rotary_emb.inv_freq, frequencies)
    # 4001 and 4002 are one number in bf16.
    cos, _ = model.rotary_emb(torch.tensor([4001, 4002]), torch.float32)
    assert (cos[0] - cos[1]).abs().max() > 0.1


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embedding_is_that_of_transformers(rope: dict) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    target = Qwen3Config(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rope_parameters=dict(rope),  # type: ignore[arg-type]
        max_position_embeddings=256,
    )
    config = DraftConfig.from_target(target, mask_token_id=39)
    positions = torch.tensor([[0, 1, 7, 200]])
    theirs = Qwen3RotaryEmbedding(target)(torch.zeros(1, 4, 32), positions)
    ours = RotaryEmbedding(config)(positions, torch.float32)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


def test_configuration_comes_from_the_target() -> None:
    from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config

    llama = LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=40, num_hidden_layers=30, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=3e-5,
    )  # fmt: skip
    config = DraftConfig.from_target(llama, mask_token_id=7, block_size=5, num_layers=1, qk_norm=False)
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (8, 2, 3e-5)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert config.num_target_layers == 30
    assert config.target["model_type"] == "llama"
    assert DraftConfig.from_target(Qwen3Config(num_hidden_layers=36), mask_token_id=7).target_layer_ids == (
        1, 9, 17, 25, 33,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="intermediate_size"):
        DraftConfig.from_target(GPT2Config(), mask_token_id=7)
    assert DraftConfig.from_target(GPT2Config(), mask_token_id=7, intermediate_size=64).intermediate_size == 64
    with pytest.raises(ConfigError, match="changes its logits"):
        DraftConfig.from_target(Gemma2Config(), mask_token_id=7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token_id": VOCAB}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": ()}, "empty"),
        ({"target_layer_ids": (-2, 1)}, "name layers"),
        ({"target_layer_ids": (1, 6)}, "name layers"),
        ({"target_layer_ids": (1, 1)}, "twice"),
        ({"first_supervised_slot": 1, "block_size": 1}, "first_supervised_slot"),
        ({"first_supervised_slot": 2}, "first_supervised_slot"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"draft_vocab_size": VOCAB + 1}, "draft_vocab_size"),
        ({"num_key_value_heads": 3}, "share"),
        ({"head_dim": 7}, "even"),
        ({"hidden_act": "swish9"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    ],
)
def test_configurations_that_cannot_work_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_config(**options)


def test_layer_numbers_convert_both_ways() -> None:
    trainer = (-1, 0, 9, 35)
    assert layer_ids_to_server(trainer) == (0, 1, 10, 36)
    assert layer_ids_from_server(layer_ids_to_server(trainer)) == trainer
    assert default_layer_ids(36) == (1, 9, 17, 25, 33)
    assert default_layer_ids(36, 1) == (18,)
    for layers in range(1, 12):
        ids = default_layer_ids(layers)
        assert len(set(ids)) == len(ids)
        assert all(0 <= i < layers for i in ids)


def test_the_target_lends_embedding_and_head() -> None:
    model = toy_drafter(draft_vocab_size=20)
    embed = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    model.share_target(embed, head)
    assert model.embed_tokens.weight.data_ptr() == embed.data_ptr()
    assert not model.embed_tokens.weight.requires_grad
    vocabulary = model.vocabulary
    assert not isinstance(vocabulary, int)
    assert torch.equal(model.lm_head.weight, head[vocabulary.ids])
    assert torch.equal(model.target_ids(torch.arange(20)), vocabulary.ids)
    model.share_target(embed, head, copy=True)
    assert model.embed_tokens.weight.data_ptr() != embed.data_ptr()
    model.share_target(embed.bfloat16(), head.bfloat16())
    assert model.lm_head.weight.dtype == torch.float64
    other = DraftVocabulary(torch.arange(20), VOCAB)
    model.load_state_dict({**model.state_dict(), "d2t": torch.zeros(20, dtype=torch.int64)})
    assert not isinstance(model.vocabulary, int)
    assert torch.equal(model.vocabulary.ids, other.ids)
    with pytest.raises(ConfigError, match="embed_tokens"):
        model.share_target(embed[:-1], head)
    with pytest.raises(LossUsageError, match="48"):
        model.context(torch.zeros(1, 2, 32, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="draft_vocab_size"):
        DraftModel(toy_config(draft_vocab_size=20))


def test_it_runs_under_autocast_and_in_bf16() -> None:
    rows, anchors = toy_rows(), close_anchors()
    exact = run(toy_drafter(), rows, anchors).hidden
    rows32 = dataclasses.replace(rows, features=rows.features.float())
    model = toy_drafter(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = run(model, rows32, anchors).hidden
    assert relative_error(mixed, exact) < 0.05
    assert relative_error(run(model.to(torch.bfloat16), rows32, anchors).hidden, exact) < 0.05
