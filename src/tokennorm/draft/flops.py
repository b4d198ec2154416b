"""How much a drafter's training multiplies: the products of one micro-batch, for MFU.

A product with a weight of ``w`` numbers costs ``2 w`` per row in the forward pass, and as much for each gradient:
of its input and of the weight. With ``T`` context tokens, ``b`` kept blocks of ``K`` slots, ``n`` supervised slots
and ``u`` distinct teacher rows, and ``w[...]`` the numbers of a weight:

    fc                          4 T w[fc]                        its input, the target's states, gets no gradient
    keys, values, each layer    6 (T + b K) (w[k] + w[v])        of context and block
    the rest of each layer      6 b K (w[q] + w[o] + w[mlp])
    attention, each layer       12 heads head_dim sum over slots of (context before the anchor + K)
    drafter's head              4 n D V_d                        frozen; 6 where it is trained
    Markov head                 6 n r V_d, and 6 per slot and number of a gate or recurrence
    confidence head             6 b K (D + r)                    4 with detached inputs
    teacher's head              2 u D V                          V_d where the other tokens' sum is cached

Padding, dummy blocks and logits of unsupervised slots count as no work, and what is computed twice (checkpointed
layers) counts once. The target's own forward, where its states are not cached, is not the drafter's work and not
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tokennorm.draft.blocks import Blocks
from tokennorm.draft.heads import GatedMarkovHead, RnnMarkovHead
from tokennorm.draft.model import DraftModel
from tokennorm.draft.plan import SlotPlan

__all__ = ["DrafterFlops", "drafter_flops"]

_PRODUCT = 2
"""A multiplication and an addition for each number of a weight and each row."""


@dataclass(frozen=True, kw_only=True)
class DrafterFlops:
    """Floating point operations of one micro-batch, forward and backward.

    Attributes:
        context: of ``fc``.
        layers: products with the weights of the draft layers.
        attention: of queries with keys, and of weights with values.
        heads: of the Markov head (but for ``W2``) and the confidence head.
        vocabulary: of the drafter's head, ``W2`` and the teacher's head.
    """

    context: float
    layers: float
    attention: float
    heads: float
    vocabulary: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.context + self.layers + self.attention + self.heads + self.vocabulary


def drafter_flops(
    drafter: DraftModel,
    *,
    blocks: Blocks,
    plan: SlotPlan,
    position_ids: Tensor,
    context_tokens: int,
    log_totals: bool = False,
) -> DrafterFlops:
    """Count one micro-batch; works on the host.

    Args:
        drafter: as trained, not wrapped.
        blocks: on the CPU.
        plan: of these blocks.
        position_ids: ``[B, S]`` on the CPU, restarting at 0 with every document.
        context_tokens: without padding.
        log_totals: the teacher's log-sum-exp is cached, so only the drafter's tokens are projected for it.
    """
    config, size = drafter.config, blocks.block_size
    kept = int(blocks.keep.sum())
    slots, count = kept * size, plan.num_supervised
    before = position_ids.gather(1, blocks.anchors)[blocks.keep]
    visible = size * (int(before.sum()) + slots)

    layers = 0.0
    for layer in drafter.layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                shared = name.endswith(("k_proj", "v_proj"))
                layers += _trained(module) * (slots + context_tokens * shared)
    heads = vocabulary = 0.0
    markov = drafter.markov_head
    if markov is not None:
        vocabulary += _trained(markov.markov_w2) * count
        if isinstance(markov, GatedMarkovHead):
            heads += _trained(markov.gate_proj) * slots
        elif isinstance(markov, RnnMarkovHead):
            heads += _trained(markov.joint_proj) * kept * config.num_proposals
    if drafter.confidence_head is not None:
        detached = config.detach_confidence_inputs
        heads += _trained(drafter.confidence_head.proj, input_gradient=not detached) * slots
    vocabulary += _trained(drafter.lm_head) * count
    projected = plan.draft_size if log_totals else plan.target_size
    vocabulary += _PRODUCT * plan.num_teacher_rows * config.hidden_size * projected
    return DrafterFlops(
        context=float(_trained(drafter.fc, input_gradient=False) * context_tokens),
        layers=layers,
        # Two products forward, and each has two gradients.
        attention=6.0 * _PRODUCT * config.num_layers * config.num_attention_heads * config.head_dim * visible,
        heads=heads,
        vocabulary=vocabulary,
    )


def _trained(module: nn.Linear, *, input_gradient: bool = True) -> int:
    """Per row: the product, the gradient of its input, and that of its weight unless it is frozen."""
    weight = module.weight
    return _PRODUCT * weight.numel() * (1 + input_gradient + weight.requires_grad)
