"""Markov and confidence heads against their formulas, written out, slot by slot."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.draft.drafter_toy import VOCAB, WIDTH, toy_config, toy_drafter
from tokennorm.draft.heads import ConfidenceHead, MarkovHead, make_markov_head

KINDS = ["vanilla", "gated", "rnn"]


def toy_head(kind: str, *, dtype: torch.dtype = torch.float64) -> MarkovHead:
    head = make_markov_head(toy_config(markov_head_type=kind, draft_vocab_size=20))
    assert head is not None
    generator = torch.Generator().manual_seed(1)
    head = head.to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return head


def naive_bias(head: MarkovHead, kind: str, previous: Tensor, hidden: Tensor, first: int) -> list[Tensor]:
    """``[V_d]`` per slot from ``first`` on, of one block: ``previous`` ``[K]``, ``hidden`` ``[K, D]``."""
    weights = dict(head.named_parameters())
    w1, w2 = weights["markov_w1.weight"], weights["markov_w2.weight"]
    rank, state, biases = w1.shape[1], torch.zeros(w1.shape[1], dtype=w1.dtype), []
    for slot in range(first, previous.shape[0]):
        e, h = w1[previous[slot]], hidden[slot]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            mixed = weights["gate_proj.weight"] @ torch.cat([h, e]) + weights["gate_proj.bias"]
            latent = 1 / (1 + torch.exp(-mixed)) * e
        else:
            mixed = weights["joint_proj.weight"] @ torch.cat([state, e, h]) + weights["joint_proj.bias"]
            gate, candidate, output = mixed[:rank], mixed[rank : 2 * rank], mixed[2 * rank :]
            keep = 1 / (1 + torch.exp(-gate))
            state = keep * state + (1 - keep) * candidate.tanh()
            latent = output.tanh()
        biases.append(w2 @ latent)
    return biases


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_and_left_to_right_are_the_formula(kind: str, first: int) -> None:
    head, generator = toy_head(kind), torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 3, 4, WIDTH, dtype=torch.float64, generator=generator)
    previous = torch.randint(VOCAB, (2, 3, 4), generator=generator)
    with torch.no_grad():
        at_once = head.bias(head.latents(head.embed(previous), hidden, first_slot=first))
        assert at_once.shape == (2, 3, 4, 20)
        for b in range(2):
            for a in range(3):
                expected = torch.stack(naive_bias(head, kind, previous[b, a], hidden[b, a], first))
                assert (at_once[b, a, first:] - expected).abs().max() < 1e-13
                assert expected.std() > 0.1
        state, stepped = None, []
        for slot in range(first, 4):
            latent, state = head.step(head.embed(previous[..., slot]), hidden[..., slot, :], state)
            stepped.append(head.bias(latent))
        assert (torch.stack(stepped, dim=2) - at_once[:, :, first:]).abs().max() < 1e-13


def test_only_the_recurrence_remembers() -> None:
    """A token two slots back reaches the rnn head, and no other."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, WIDTH, dtype=torch.float64, generator=generator)
    previous = torch.tensor([3, 5, 7, 9])
    other = torch.tensor([4, 5, 7, 9])
    for kind in KINDS:
        head = toy_head(kind)
        with torch.no_grad():
            change = head.latents(head.embed(previous), hidden) - head.latents(head.embed(other), hidden)
        assert change[0].abs().max() > 0.01
        assert bool(change[1:].abs().max() > 1e-4) == (kind == "rnn")
        # The anchor-only slot of the bonus-anchor layout is no proposal: the recurrence starts behind it.
        with torch.no_grad():
            one = head.latents(head.embed(previous), hidden, first_slot=1)
            two = head.latents(head.embed(other), hidden, first_slot=1)
        assert torch.equal(one[1:], two[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_changes_no_logit_and_learns(kind: str) -> None:
    head = make_markov_head(toy_config(markov_head_type=kind))
    assert head is not None
    head.reset_parameters(0.02)
    bias = head.bias(head.latents(head.embed(torch.tensor([1, 2])), torch.randn(2, WIDTH)))
    assert not bias.any()
    (bias * torch.randn_like(bias)).sum().backward()
    assert head.markov_w2.weight.grad is not None
    assert head.markov_w2.weight.grad.any()


def test_confidence_reads_hidden_state_and_markov_embedding() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(3, WIDTH, generator=generator)
    embedded = torch.randn(3, 5, generator=generator)
    head = ConfidenceHead(hidden_size=WIDTH, markov_rank=5)
    with torch.no_grad():
        expected = torch.cat([hidden, embedded], dim=1) @ head.proj.weight[0] + head.proj.bias
        assert torch.allclose(head(hidden, embedded), expected)
        head.reset_parameters()
        assert torch.equal(head(hidden, embedded).sigmoid(), torch.full((3,), 0.5))
    alone = ConfidenceHead(hidden_size=WIDTH)
    assert alone.proj.weight.shape == (1, WIDTH)
    assert torch.equal(alone(hidden, embedded), alone(hidden, None))


def test_parameters_have_the_published_names() -> None:
    names = {kind: {name for name, _ in toy_head(kind).named_parameters()} for kind in KINDS}
    common = {"markov_w1.weight", "markov_w2.weight"}
    assert names["vanilla"] == common
    assert names["gated"] == common | {"gate_proj.weight", "gate_proj.bias"}
    assert names["rnn"] == common | {"joint_proj.weight", "joint_proj.bias"}
    model = toy_drafter(draft_vocab_size=20)
    assert model.markov_head is not None
    # Any token of the target can come before; only draft tokens can be proposed.
    assert model.markov_head.markov_w1.weight.shape == (VOCAB, 5)
    assert model.markov_head.markov_w2.weight.shape == (20, 5)
    assert make_markov_head(toy_config(markov_rank=0, confidence_head_with_markov=False)) is None
