"""The drafter: a few layers that fill a block of masked slots at once, from the target's hidden states before it.

    context   = hidden_norm(fc([target hidden states of target_layer_ids]))
    x         = embed([anchor, MASK, ..., MASK])             at positions a .. a + K - 1
    per layer: queries from x, keys and values from [context before a ; x]
    logits    = lm_head(norm(x)) + Markov bias

(DSpark, arXiv 2607.05147; without Markov and confidence head it is DFlash.) The names of the parameters are those
of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from tokennorm.draft.blocks import Blocks
from tokennorm.draft.config import DraftConfig
from tokennorm.draft.context import ContextKV
from tokennorm.draft.forward import DraftForward
from tokennorm.draft.heads import ConfidenceHead, make_markov_head
from tokennorm.draft.layers import AttentionMask, DraftLayer, LayerContext
from tokennorm.draft.masks import block_attention_mask, block_mask_mod
from tokennorm.draft.norm import RMSNorm
from tokennorm.draft.rope import RotaryEmbedding
from tokennorm.draft.vocabulary import DraftVocabulary
from tokennorm.errors import ConfigError, LossUsageError

__all__ = ["Attention", "DraftModel"]

Attention = Literal["auto", "sdpa", "flex"]


class DraftModel(nn.Module):
    """A drafter for the target of its configuration.

    ``embed_tokens`` and ``lm_head`` are the target's and frozen; they hold noise until :meth:`share_target` or a
    checkpoint fills them.

    Args:
        config: its shape.
        vocabulary: the tokens that it can propose, when ``config.draft_vocab_size`` is set.
        attention: ``sdpa`` with a dense mask, ``flex`` with a block-sparse one, or ``auto``: flex on CUDA.
        gradient_checkpointing: compute each layer again in backward instead of keeping what is inside it.
    """

    d2t: Tensor | None

    def __init__(
        self,
        config: DraftConfig,
        *,
        vocabulary: DraftVocabulary | None = None,
        attention: Attention = "auto",
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.attention: Attention = attention
        self.gradient_checkpointing = gradient_checkpointing
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.fc = nn.Linear(config.feature_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.num_draft_tokens, bias=False)
        self.rotary_emb = RotaryEmbedding(config)
        self.markov_head = make_markov_head(config)
        self.confidence_head = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(
                hidden_size=width,
                markov_rank=config.markov_rank if config.confidence_head_with_markov else 0,
                detach_inputs=config.detach_confidence_inputs,
            )
        # What servers store: the offset from each draft token to its target token.
        self.register_buffer("d2t", _offsets(config, vocabulary))
        self._vocabulary: DraftVocabulary | None = None
        self.register_load_state_dict_post_hook(_forget_vocabulary)
        for module in (self.embed_tokens, self.lm_head):
            module.requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New weights for everything that is trained."""
        std = self.config.initializer_range
        for module in [self.fc, *self.layers.modules()]:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.markov_head is not None:
            self.markov_head.reset_parameters(std)
        if self.confidence_head is not None:
            self.confidence_head.reset_parameters()

    @property
    def vocabulary(self) -> int | DraftVocabulary:
        """What ``Blocks.plan`` wants: the size of the target's vocabulary, or the reduced one, on the host."""
        if self.d2t is None:
            return self.config.vocab_size
        if self._vocabulary is None:
            ids = self.d2t.cpu() + torch.arange(self.d2t.shape[0])
            self._vocabulary = DraftVocabulary(ids, self.config.vocab_size)
        return self._vocabulary

    def share_target(self, embed_tokens: Tensor, lm_head: Tensor, *, copy: bool = False) -> None:
        """Take the target's embedding and head, without their gradients.

        Args:
            embed_tokens: ``[V, D]``.
            lm_head: ``[V, D]``, the target's; a reduced vocabulary takes its rows (a copy of those).
            copy: own copies, for a target that changes or a head that is trained (then set its
                ``requires_grad``); by default the memory is shared, where the target has the drafter's dtype.

        Raises:
            ConfigError: other shapes than the configuration's.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, weight in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if weight.shape != expected:
                raise ConfigError(
                    f"the target's {name} is {list(weight.shape)}, the drafter is configured for {list(expected)}"
                )
        head = lm_head.detach()
        vocabulary = self.vocabulary
        if isinstance(vocabulary, DraftVocabulary):
            head = head.index_select(0, vocabulary.ids.to(head.device))
        for module, weight in ((self.embed_tokens, embed_tokens.detach()), (self.lm_head, head)):
            own = weight.to(self.fc.weight.dtype, copy=copy)
            module.weight = nn.Parameter(own, requires_grad=False)

    # -- the parts, which a decoder calls one by one -------------------------------------------------------------

    def context(self, features: Tensor, position_ids: Tensor) -> ContextKV:
        """Keys and values of context positions in every layer, for decoding.

        Args:
            features: ``[B, T, len(target_layer_ids) * D]``, the target's hidden states, concatenated in the
                order of ``target_layer_ids``; never differentiated.
            position_ids: ``[B, T]``.

        Raises:
            LossUsageError: features of another width.
        """
        states = self._context_states(features)
        rotary = self.rotary_emb(position_ids, states.dtype)
        pairs = [_attention_of(layer).keys_values(states, rotary) for layer in self.layers]
        return ContextKV(keys=tuple(keys for keys, _ in pairs), values=tuple(values for _, values in pairs))

    def fill(self, token_ids: Tensor, position_ids: Tensor, context: ContextKV, mask: AttentionMask) -> Tensor:
        """The backbone on block tokens: ``[B, Q, D]`` after the final norm.

        Args:
            token_ids: ``[B, Q]``, an anchor's token and then ``mask_token_id``, for each block.
            position_ids: ``[B, Q]``.
            context: from :meth:`context`, ``T`` positions.
            mask: what each of the ``Q`` tokens may attend to among ``[context ; block tokens]``: dense bool
                broadcastable to ``[B, 1, Q, T + Q]``, flex attention's, or None: everything.
        """
        return self._fill(token_ids, position_ids, list(zip(context.keys, context.values, strict=True)), mask)

    def _context_states(self, features: Tensor) -> Tensor:
        if features.shape[-1] != self.config.feature_size:
            raise LossUsageError(
                f"features are {features.shape[-1]} wide; {len(self.config.target_layer_ids)} layers of "
                f"{self.config.hidden_size} make {self.config.feature_size}",
                fix=f"concatenate the target's hidden states of layers {list(self.config.target_layer_ids)}.",
            )
        return self.hidden_norm(self.fc(features.detach().to(self.fc.weight.dtype)))

    def _fill(
        self, token_ids: Tensor, position_ids: Tensor, contexts: Sequence[LayerContext], mask: AttentionMask
    ) -> Tensor:
        states = self.embed_tokens(token_ids).to(self.fc.weight.dtype)
        rotary = self.rotary_emb(position_ids, states.dtype)
        save_memory = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer, context in zip(self.layers, contexts, strict=True):
            if save_memory:
                states = checkpoint(layer, states, rotary, context, mask, use_reentrant=False)
            else:
                states = layer(states, rotary, context, mask)
            assert isinstance(states, Tensor)
        return self.norm(states)

    def forward(
        self, *, blocks: Blocks, features: Tensor, position_ids: Tensor, documents: Tensor | None = None
    ) -> DraftForward:
        """All blocks of a micro-batch at once, teacher-forced.

        Args:
            blocks: on the device of the model.
            features: ``[B, S, len(target_layer_ids) * D]``.
            position_ids: ``[B, S]``, restarting at 0 with every document of a packed row.
            documents: ``[B, S]`` from :func:`tokennorm.draft.document_ids`; needed where a row holds several.
        """
        rows, count, size = blocks.target_ids.shape
        states = self._context_states(features)
        context = (states, *self.rotary_emb(position_ids, states.dtype))
        slots = torch.arange(size, device=blocks.anchors.device)
        tokens = torch.where(slots == 0, blocks.anchor_ids.unsqueeze(-1), self.config.mask_token_id)
        positions = position_ids.gather(1, blocks.anchors).unsqueeze(-1) + slots
        mask = self._mask(blocks, documents)
        filled = self._fill(tokens.flatten(1), positions.flatten(1), [context] * len(self.layers), mask)
        hidden = filled.view(rows, count, size, -1)
        embedded = latents = markov_weight = None
        if self.markov_head is not None:
            embedded = self.markov_head.embed(blocks.previous_ids)
            latents = self.markov_head.latents(embedded, hidden, first_slot=self.config.first_supervised_slot)
            markov_weight = self.markov_head.markov_w2.weight
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return DraftForward(
            hidden=hidden,
            head=self.lm_head.weight,
            latents=latents,
            markov_weight=markov_weight,
            confidence=confidence,
        )

    def _mask(self, blocks: Blocks, documents: Tensor | None) -> AttentionMask:
        anchors, size, length = blocks.anchors, blocks.block_size, blocks.sequence_length
        use_flex = self.attention == "flex" or (self.attention == "auto" and anchors.is_cuda)
        if not use_flex:
            return block_attention_mask(anchors, size, length, documents)
        queries = anchors.shape[1] * size
        mask_mod = block_mask_mod(anchors, size, length, documents)
        return create_block_mask(
            mask_mod, anchors.shape[0], None, queries, length + queries, device=str(anchors.device)
        )

    # -- decoding ------------------------------------------------------------------------------------------------

    def draft_hidden(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        context: ContextKV,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """One block per row: ``[B, K, D]`` after the final norm.

        Args:
            anchor_ids: ``[B]``, the last verified token, whose hidden state the target has not computed yet.
            anchor_positions: ``[B]``, its position.
            context: everything before it.
            context_mask: ``[B, T]`` bool, for rows of different length; None: all is visible.
        """
        size = self.config.block_size
        slots = torch.arange(size, device=anchor_ids.device)
        tokens = torch.where(slots == 0, anchor_ids.unsqueeze(-1), self.config.mask_token_id)
        mask = None
        if context_mask is not None:
            own = context_mask.new_ones((context_mask.shape[0], size))
            mask = torch.cat([context_mask, own], dim=1)[:, None, None, :]
        return self.fill(tokens, anchor_positions.unsqueeze(-1) + slots, context, mask)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft tokens as target tokens."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def _forget_vocabulary(drafter: nn.Module, _incompatible: Any) -> None:
    assert isinstance(drafter, DraftModel)
    drafter._vocabulary = None


def _attention_of(layer: nn.Module) -> Any:
    return layer.self_attn


def _offsets(config: DraftConfig, vocabulary: DraftVocabulary | None) -> Tensor | None:
    size = None if vocabulary is None else vocabulary.size
    if size != config.draft_vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}, the vocabulary has {size} tokens",
            fix="pass vocabulary=DraftVocabulary(ids, vocab_size) with as many ids, or neither.",
        )
    if vocabulary is None:
        return None
    if vocabulary.target_size != config.vocab_size:
        raise ConfigError(
            f"the vocabulary is for a target of {vocabulary.target_size} tokens, not {config.vocab_size}"
        )
    return vocabulary.ids - torch.arange(vocabulary.size, device=vocabulary.ids.device)
