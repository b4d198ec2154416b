"""What a drafter has besides its backbone: the Markov head and the confidence head.

The backbone fills all slots of a block at once, so no slot knows what the others propose. The Markov head adds to
a slot's logits a bias of low rank that depends on the token before it:

    logits[k] += W2 latent[k],    e[k] = W1[previous token of slot k]
    vanilla   latent = e
    gated     latent = sigmoid(gate_proj [h; e]) * e
    rnn       g, c, o = joint_proj [s; e; h];  latent = tanh(o);  s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c)

with ``h`` the backbone's hidden state of the slot and ``s`` the state of the recurrence, 0 at the block's first
proposal (DSpark, arXiv 2607.05147). In training the previous token is the data's, so all slots' latents come at
once and the fused objective takes them without ever making logits; in decoding it is the one just drafted, slot by
slot.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokennorm.draft.config import DraftConfig

__all__ = ["ConfidenceHead", "GatedMarkovHead", "MarkovHead", "RnnMarkovHead", "make_markov_head"]


class MarkovHead(nn.Module):
    """The vanilla head, and what the three have in common.

    ``W1`` spans the target's vocabulary (any token can come before), ``W2`` the drafter's.

    Args:
        vocab_size: the target's vocabulary.
        num_draft_tokens: the drafter's.
        rank: of the bias.
    """

    def __init__(self, *, vocab_size: int, num_draft_tokens: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, num_draft_tokens, bias=False)

    def reset_parameters(self, std: float) -> None:  # noqa: ARG002 - the subclasses' projections use it
        """A bias of 0 to start with: rows of ``W1`` of about unit length, ``W2`` 0."""
        nn.init.normal_(self.markov_w1.weight, std=self.rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """``e``: ``[..., r]`` of target tokens ``[...]``."""
        return self.markov_w1(token_ids)

    def latents(self, embedded: Tensor, hidden: Tensor, *, first_slot: int = 0) -> Tensor:
        """Teacher-forced, all slots of a block: ``[..., K, r]``.

        Args:
            embedded: ``[..., K, r]`` from :meth:`embed` of the data's previous tokens.
            hidden: ``[..., K, D]``.
            first_slot: the block's first proposal; slots before it don't touch a recurrence.
        """
        del first_slot
        latent, _ = self.step(embedded, hidden, None)
        return latent

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot from left to right: its latent ``[..., r]``, and the state for the next one.

        Args:
            embedded: ``[..., r]`` of the token just drafted (the anchor's, for the first proposal).
            hidden: ``[..., D]`` of the slot.
            state: what the previous slot returned; None for the first.
        """
        del hidden
        return embedded, state

    def bias(self, latent: Tensor) -> Tensor:
        """``W2 latent``: ``[..., V_d]``, added to the backbone's logits."""
        return self.markov_w2(latent)


class GatedMarkovHead(MarkovHead):
    """A gate from the hidden state decides how much of each component of ``e`` counts."""

    def __init__(self, *, vocab_size: int, num_draft_tokens: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size=vocab_size, num_draft_tokens=num_draft_tokens, rank=rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def reset_parameters(self, std: float) -> None:
        """As the vanilla head, with gates half open."""
        super().reset_parameters(std)
        nn.init.normal_(self.gate_proj.weight, std=std)
        nn.init.zeros_(self.gate_proj.bias)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``sigmoid(gate_proj [h; e]) * e``; there is no state."""
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return gate * embedded, state


class RnnMarkovHead(MarkovHead):
    """A recurrence over the block: a slot knows all tokens drafted before it."""

    def __init__(self, *, vocab_size: int, num_draft_tokens: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size=vocab_size, num_draft_tokens=num_draft_tokens, rank=rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def reset_parameters(self, std: float) -> None:
        """As the vanilla head."""
        super().reset_parameters(std)
        nn.init.normal_(self.joint_proj.weight, std=std)
        nn.init.zeros_(self.joint_proj.bias)

    def latents(self, embedded: Tensor, hidden: Tensor, *, first_slot: int = 0) -> Tensor:
        """The recurrence, unrolled from ``first_slot``; 0 before it."""
        outputs: list[Tensor] = [embedded.new_zeros((*embedded.shape[:-2], self.rank))] * first_slot
        state = None
        for slot in range(first_slot, embedded.shape[-2]):
            latent, state = self.step(embedded[..., slot, :], hidden[..., slot, :], state)
            outputs.append(latent)
        return torch.stack(outputs, dim=-2)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """``tanh(o)`` and ``s'``."""
        state = torch.zeros_like(embedded) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """The logit of the probability that a slot's proposal is accepted, from ``[h; e]`` or from ``h`` alone.

    It sees nothing that comes after the slot's own input, so whether a slot is verified can be decided from it
    without looking ahead.

    Args:
        hidden_size: ``D``.
        markov_rank: ``r`` where it reads the Markov embedding, else 0.
        detach_inputs: keep its gradient out of the backbone and the Markov embedding.
    """

    def __init__(self, *, hidden_size: int, markov_rank: int = 0, detach_inputs: bool = False) -> None:
        super().__init__()
        self.with_markov = markov_rank > 0
        self.detach_inputs = detach_inputs
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def reset_parameters(self) -> None:
        """Every proposal as likely to be accepted as not."""
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``[..., D]`` and ``[..., r]`` to logits ``[...]``."""
        assert not self.with_markov or embedded is not None
        inputs = torch.cat([hidden, embedded], dim=-1) if self.with_markov and embedded is not None else hidden
        return self.proj(inputs.detach() if self.detach_inputs else inputs).squeeze(-1)


def make_markov_head(config: DraftConfig) -> MarkovHead | None:
    """The head of a configuration, or None."""
    if not config.markov_rank:
        return None
    sizes = {
        "vocab_size": config.vocab_size,
        "num_draft_tokens": config.num_draft_tokens,
        "rank": config.markov_rank,
    }
    if config.markov_head_type == "vanilla":
        return MarkovHead(**sizes)
    kind = GatedMarkovHead if config.markov_head_type == "gated" else RnnMarkovHead
    return kind(**sizes, hidden_size=config.hidden_size)
