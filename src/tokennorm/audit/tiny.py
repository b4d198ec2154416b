"""A causal language model small enough to be audited in a blink, for loops whose own model doesn't matter."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["TinyCausalLM", "TinyOutput", "build_tiny"]


class TinyOutput(NamedTuple):
    """A tuple, so that FSDP2 and DDP find the tensors in it."""

    logits: Tensor
    loss: Tensor | None = None
    aux_loss: Tensor | None = None


class TinyCausalLM(nn.Module):
    """One attention layer that behaves as Hugging Face models do where it matters here.

    Documents of a packed row are isolated where ``position_ids`` restart, as long as there is no
    ``attention_mask``. With ``labels`` it returns their mean cross-entropy as ``loss``, after a shift by one.

    Args:
        vocabulary: V.
        width: D.
    """

    def __init__(self, vocabulary: int = 29, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attend = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> TinyOutput:
        """``input_ids`` [B, S] to ``logits`` [B, S, V] and, given labels, ``loss``."""
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length).expand_as(input_ids)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            allowed = allowed & (attention_mask[:, None, :].bool() | torch.eye(length, dtype=torch.bool))
        else:
            document = (position_ids == 0).cumsum(1)
            allowed = allowed & (document[:, :, None] == document[:, None, :])
        hidden = self.embed(input_ids)
        # A little of the position, so that wrong positions show.
        hidden = hidden + 0.1 * torch.sin(position_ids[..., None] / torch.arange(1, hidden.shape[-1] + 1))
        query, key, value = self.attend(hidden).chunk(3, dim=-1)
        scores = (query @ key.transpose(1, 2) / key.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
        hidden = hidden + scores.softmax(-1) @ value
        hidden = hidden + torch.tanh(self.mix(hidden))
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return TinyOutput(logits=logits, loss=loss)


def build_tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A ``build`` for loops under DDP: the tiny model, wrapped if there is more than one rank, and SGD."""
    model: nn.Module = TinyCausalLM()
    if dist.is_initialized() and dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
