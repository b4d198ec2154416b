"""The shape of a drafter: taken from the target's configuration, plus what makes it a drafter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tokennorm.draft.layer_ids import check_layer_ids, default_layer_ids
from tokennorm.errors import ConfigError

__all__ = ["DraftConfig", "MarkovHeadType", "refuse_changed_logits"]

MarkovHeadType = Literal["vanilla", "gated", "rnn"]

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Attributes by which families change their logits after the head. Drafter and teacher are compared as
# softmax(hidden @ head), so a target that does anything else there would be imitated wrongly.
_LOGIT_CHANGES = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A drafter for one target.

    Attributes:
        vocab_size: the target's, rows of ``embed_tokens``.
        hidden_size: the target's.
        intermediate_size: width of the MLPs.
        num_layers: draft layers.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        rms_norm_eps: of every norm.
        hidden_act: activation of the MLPs.
        rope_parameters: ``rope_type``, ``rope_theta`` and what the type needs, as transformers writes them.
        max_position_embeddings: the target's.
        qk_norm: RMSNorm on the heads of queries and keys (Qwen3's layers), or not (Llama's). The drafter classes
            of vLLM and SGLang are Qwen3's whatever the target, so True is what can be served.
        initializer_range: standard deviation of new weights.
        num_target_layers: decoder layers of the target.
        target_layer_ids: trainer ids of the hidden states that the drafter reads
            (:mod:`tokennorm.draft.layer_ids`), in the order in which they are concatenated.
        block_size: slots per block, ``K``.
        mask_token_id: the token that stands in the slots to fill. It has no default: the target's padding or end
            token means something to the target.
        first_supervised_slot: 0: slot k proposes the token at ``a + k + 1`` (next-token layout, DSpark); 1: the
            token at ``a + k``, slot 0 holds the verified anchor (bonus-anchor layout, DFlash).
        markov_rank: of the Markov head; 0: none.
        markov_head_type: vanilla, gated or rnn. vLLM serves vanilla only.
        enable_confidence_head: predict whether a proposal will be accepted.
        confidence_head_with_markov: it reads the previous token's Markov embedding too.
        detach_confidence_inputs: its gradient stays out of the backbone and the Markov embedding.
        draft_vocab_size: tokens that the drafter can propose; None: all.
        target: the target's own configuration, as ``config.json`` has it; what an export is built on.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 32768
    qk_norm: bool = True
    initializer_range: float = 0.02
    num_layers: int = 5
    block_size: int = 7
    first_supervised_slot: int = 0
    markov_rank: int = 256
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    detach_confidence_inputs: bool = False
    draft_vocab_size: int | None = None
    target: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        _check_sizes(self)
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        _check_drafting(self)

    @classmethod
    def from_target(
        cls,
        target: Any,
        *,
        mask_token_id: int,
        target_layer_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> DraftConfig:
        """The drafter of a target: its widths, heads, norms and rotary embedding.

        Args:
            target: the target's Hugging Face configuration, or the target itself.
            mask_token_id: see the class.
            target_layer_ids: by default five of them, spread evenly.
            **options: any other field of the class; also those that a target of another family does not have.

        Raises:
            ConfigError: something that the drafter needs is neither in the configuration nor given, or the target
                changes its logits after the head.
        """
        config = getattr(target, "config", target)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        refuse_changed_logits(text)
        fields = {
            "vocab_size": _read(text, options, "vocab_size"),
            "hidden_size": _read(text, options, "hidden_size"),
            "intermediate_size": _read(text, options, "intermediate_size"),
            "num_attention_heads": _read(text, options, "num_attention_heads"),
            "num_target_layers": _read(text, options, "num_target_layers", "num_hidden_layers"),
        }
        heads = fields["num_attention_heads"]
        for name, fallback in {
            "num_key_value_heads": heads,
            "head_dim": fields["hidden_size"] // heads,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 32768,
            "initializer_range": 0.02,
        }.items():
            value = options.pop(name) if name in options else getattr(text, name, None)
            fields[name] = fallback if value is None else value
        # The rotary parameters can be an object of transformers, and one per kind of layer.
        fields["rope_parameters"] = _plain_rope(fields["rope_parameters"])
        if target_layer_ids is None:
            target_layer_ids = default_layer_ids(fields["num_target_layers"])
        own = text.to_dict() if hasattr(text, "to_dict") else dict(vars(text))
        return cls(
            **{"target": own, **fields, **options},
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
        )

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that the drafter can propose, rows of its head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_proposals(self) -> int:
        """Tokens that a block proposes: ``K`` or ``K - 1``."""
        return self.block_size - self.first_supervised_slot

    @property
    def feature_size(self) -> int:
        """Width of the concatenated hidden states of the target, ``len(target_layer_ids) * hidden_size``."""
        return len(self.target_layer_ids) * self.hidden_size


def _read(config: Any, options: dict[str, Any], name: str, source: str | None = None) -> Any:
    value = options.pop(name) if name in options else getattr(config, source or name, None)
    if value is None:
        raise ConfigError(
            f"{type(config).__name__} has no {source or name}",
            fix=f"give it: DraftConfig.from_target(..., {name}=...)",
        )
    return value


def _plain_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(parameters)
    if any(isinstance(value, Mapping) for value in plain.values()):
        raise ConfigError(
            f"the target has a rotary embedding per kind of layer: {sorted(plain)}",
            fix="give the one of the drafter: DraftConfig.from_target(..., rope_parameters={...})",
        )
    plain.setdefault("rope_type", "default")
    return plain


def refuse_changed_logits(config: Any) -> None:
    """Raise ConfigError for a target whose logits are not just its head's."""
    for name, neutral in _LOGIT_CHANGES.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ConfigError(
                f"the target changes its logits after the head ({name} = {value})",
                why="drafter and teacher are compared as softmax(hidden @ head); it samples from something else.",
                fix="take a target whose logits are the head's.",
            )


def _check_sizes(config: DraftConfig) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "num_target_layers", "block_size")
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ConfigError(
            f"{config.num_attention_heads} query heads can't share {config.num_key_value_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim is {config.head_dim}; the rotary embedding needs an even one")
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(f"hidden_act {config.hidden_act!r}", fix=f"one of {', '.join(ACTIVATIONS)}.")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ConfigError(
            f"rotary embeddings of type {rope_type!r}",
            why="frequencies that depend on the sequence's length would not be those of the cached context.",
            fix=f"one of {', '.join(ROPE_TYPES)}.",
        )
    theta = config.rope_parameters.get("rope_theta")
    if theta is None or not math.isfinite(theta) or theta <= 0:
        raise ConfigError(f"rope_parameters has rope_theta {theta}")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            "rope_parameters has partial_rotary_factor", why="servers' drafter classes rotate whole heads."
        )


def _check_drafting(config: DraftConfig) -> None:
    if config.first_supervised_slot not in (0, 1) or config.num_proposals < 1:
        raise ConfigError(
            f"first_supervised_slot is {config.first_supervised_slot} in blocks of {config.block_size}",
            fix="0 for the next-token layout, 1 for the bonus-anchor layout with at least two slots.",
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ConfigError(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}",
            fix="take a token that never occurs in text, such as an unused special token.",
        )
    if config.markov_head_type not in get_args(MarkovHeadType):
        raise ConfigError(
            f"markov_head_type {config.markov_head_type!r}", fix=f"one of {', '.join(get_args(MarkovHeadType))}."
        )
    if config.markov_rank < 0:
        raise ConfigError(f"markov_rank is {config.markov_rank}", fix="0 for a drafter without a Markov head.")
    if config.enable_confidence_head and config.confidence_head_with_markov and not config.markov_rank:
        raise ConfigError(
            "confidence_head_with_markov needs a Markov head, and markov_rank is 0",
            fix="set confidence_head_with_markov=False, or a rank.",
        )
    if config.draft_vocab_size is not None and not 0 < config.draft_vocab_size <= config.vocab_size:
        raise ConfigError(
            f"draft_vocab_size {config.draft_vocab_size} of {config.vocab_size} tokens",
            fix="None for all of them.",
        )
