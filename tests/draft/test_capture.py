"""Captured states are those that transformers reports, layer by layer, in several families."""

from __future__ import annotations

import pytest
import torch

import tokennorm.draft.states.capture as capture_module
from tests.draft.drafter_toy import toy_drafter
from tests.draft.targets import VOCAB, tiny_target
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.model import DraftModel
from tokennorm.draft.states.capture import HiddenStateCapture
from tokennorm.draft.target import init_from_target, layers_of, target_weights
from tokennorm.errors import ConfigError

FAMILIES = ["llama", "qwen3", "gpt2", "gpt_neox", "opt", "mamba", "qwen3_moe"]
ALL = (-1, 0, 1, 2, 3)


def ids(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_is_the_hidden_state_of_transformers(family: str) -> None:
    # transformers' grouped experts know no float64.
    target = tiny_target(family, dtype=torch.float32)
    with torch.no_grad():
        expected = target(input_ids=ids(), output_hidden_states=True, use_cache=False)
    states = list(expected.hidden_states)
    if family == "mamba":
        # It reports every layer, the last one twice (before and after the norm), and no embedding.
        states = [target.get_input_embeddings()(ids()).detach(), *states[:3], states[4]]
    assert len({float(state.sum()) for state in states}) == 5
    captured = HiddenStateCapture(target, ALL)(input_ids=ids())
    for i, state in zip(ALL, captured.features.split(16, dim=-1), strict=True):
        assert torch.equal(state, states[i + 1]), i
    assert torch.equal(captured.last_hidden, states[-1])
    _, head = target_weights(target)
    assert torch.allclose(captured.last_hidden @ head.t(), expected.logits, atol=1e-5)
    # In the order that was asked for.
    some = HiddenStateCapture(target, (2, -1, 3))(input_ids=ids()).features
    assert torch.equal(some, torch.cat([states[i + 1] for i in (2, -1, 3)], dim=-1))


def test_hooks_are_gone_afterwards_also_after_an_error() -> None:
    target = tiny_target("llama")
    capture = HiddenStateCapture(target, ALL)
    capture(input_ids=ids())
    layers = layers_of(target)
    assert layers is not None
    before = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers]
    capture(input_ids=ids())
    with pytest.raises(IndexError):
        capture(input_ids=torch.full((1, 2), VOCAB))
    assert [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers] == before


def test_planted_mistakes_in_layer_numbers_are_found() -> None:
    """Layer ids one off (servers' numbering), the last layer before its norm, two ids exchanged."""
    target = tiny_target("llama")
    right = HiddenStateCapture(target, (-1, 1, 3))(input_ids=ids()).features
    assert not torch.allclose(HiddenStateCapture(target, (0, 2, 3))(input_ids=ids()).features, right, atol=1e-3)
    assert not torch.allclose(HiddenStateCapture(target, (1, -1, 3))(input_ids=ids()).features, right, atol=1e-3)
    kept = []
    handle = target.model.layers[3].register_forward_hook(lambda module, args, output: kept.append(output))
    HiddenStateCapture(target, (3,))(input_ids=ids())
    handle.remove()
    before_norm = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    assert not torch.allclose(before_norm, right[..., 32:], atol=1e-3)


def test_packed_documents_are_isolated_and_a_cache_is_kept() -> None:
    target = tiny_target("llama", dtype=torch.float32)
    capture = HiddenStateCapture(target, (0, 3))
    first, second = ids(1, 5), ids(2, 4)[1:]
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(5), torch.arange(4)]).unsqueeze(0)
    together = capture(input_ids=packed, position_ids=positions)
    alone = capture(input_ids=second)
    assert (together.features[:, 5:] - alone.features).abs().max() < 1e-5
    assert together.cache is None
    # As a decoder uses it: the prompt, then some tokens more.
    start = capture(input_ids=first[:, :3], use_cache=True)
    rest = capture(input_ids=first[:, 3:], cache=start.cache)
    whole = capture(input_ids=first)
    pieces = torch.cat([start.features, rest.features], dim=1)
    assert (pieces - whole.features).abs().max() < 1e-5
    assert not pieces.requires_grad


def test_what_cannot_be_captured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    with pytest.raises(ConfigError, match="name layers"):
        HiddenStateCapture(target, (4,))
    capture = HiddenStateCapture(target, (1,))
    target.train()
    with pytest.raises(ConfigError, match="training mode"):
        capture(input_ids=ids())
    with pytest.raises(ConfigError, match="bias"):
        target_weights(tiny_target("phi"))
    monkeypatch.setattr(capture_module, "layers_of", lambda target: None)
    with pytest.raises(ConfigError, match="no list of its 4 layers"):
        HiddenStateCapture(target, (1,))
    with pytest.raises(ConfigError, match="decoder"):
        capture_module.decoder_of(torch.nn.Linear(2, 2))


def test_draft_layers_can_start_from_the_target() -> None:
    target = tiny_target("qwen3")
    config = DraftConfig.from_target(target, mask_token_id=39, num_layers=2, markov_rank=4)
    drafter = DraftModel(config).double()
    names = init_from_target(drafter, target)
    assert len(names) == 2 * 11
    source = dict(target.model.layers[3].named_parameters())
    for name, parameter in drafter.layers[1].named_parameters():
        assert torch.equal(parameter, source[name])
    drafter.share_target(*target_weights(target))
    assert drafter.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr()
    llama = tiny_target("llama")
    assert len(init_from_target(drafter, llama, (0, 1))) == 2 * 9
    with pytest.raises(ConfigError, match="for 2 draft layers"):
        init_from_target(drafter, llama, (0, 1, 2))
    with pytest.raises(ConfigError, match="no weight"):
        init_from_target(toy_drafter(num_target_layers=4, target_layer_ids=(1,)), tiny_target("gpt2"))
