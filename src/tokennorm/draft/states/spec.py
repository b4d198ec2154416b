"""What a cache of hidden states holds, so that another target, tokenizer, set of layers or data is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from tokennorm.draft.layer_ids import check_layer_ids
from tokennorm.errors import ConfigError, DataError

__all__ = [
    "CacheDtype",
    "CacheSpec",
    "Document",
    "fingerprint_target",
    "fingerprint_tokenizer",
    "fingerprint_weights",
]

CacheDtype = Literal["bfloat16", "float32"]

# What a target computes with besides its weights.
_SETTINGS = ("model_type", "hidden_act", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
_SETTINGS += ("rope_parameters", "sliding_window", "layer_types")
# Values per weight that enter the fingerprint: enough to notice training, too few to read the whole model.
_SAMPLES = 64
_WHAT = {
    "target": "target model",
    "target_dtype": "precision of the target",
    "tokenizer": "tokenizer",
    "layer_ids": "set of layers",
    "num_layers": "number of target layers",
    "hidden_size": "width of the target",
    "dtype": "precision of the cache",
    "documents": "set of documents",
    "num_documents": "number of documents",
    "shard_tokens": "size of the shards",
    "log_totals": "choice about the sums of the logits",
}


class Document(Protocol):
    """Token ids and what is supervised, as :class:`tokennorm.data.Sample` has them."""

    @property
    def input_ids(self) -> Tensor:
        """``[L]`` int64."""
        ...

    @property
    def supervised(self) -> Tensor:
        """``[L]`` bool, "this token is supervised"."""
        ...


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The identity of a cache.

    Attributes:
        target: fingerprint of the target's weights and settings.
        target_dtype: precision that it computed in.
        tokenizer: fingerprint.
        layer_ids: trainer ids.
        num_layers: of the target.
        hidden_size: of the target.
        dtype: precision on disk.
        documents: fingerprint of all token ids and masks.
        num_documents: how many.
        shard_tokens: about how many tokens a file holds.
        log_totals: whether the log-sum-exp of the target's logits is kept too.
    """

    target: str
    target_dtype: str
    tokenizer: str
    layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    dtype: CacheDtype
    documents: str
    num_documents: int
    shard_tokens: int = 16384
    log_totals: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        check_layer_ids(self.layer_ids, self.num_layers)
        if self.dtype not in get_args(CacheDtype):
            raise ConfigError(f"a cache can't be {self.dtype}", fix=f"one of {', '.join(get_args(CacheDtype))}.")
        if self.shard_tokens < 1:
            raise ConfigError(f"shard_tokens must be at least 1, not {self.shard_tokens}")

    @classmethod
    def of(
        cls,
        target: nn.Module,
        tokenizer: Any,
        layer_ids: Sequence[int],
        documents: Sequence[Document],
        *,
        dtype: CacheDtype = "bfloat16",
        shard_tokens: int = 16384,
        log_totals: bool = False,
    ) -> CacheSpec:
        """The cache of these documents' hidden states in this target.

        Args:
            target: a Hugging Face causal LM.
            tokenizer: the one that made the token ids; None where there is none (random ids in tests).
            layer_ids: trainer ids.
            documents: all of them, in order.
            dtype: precision on disk; bfloat16 is half as large.
            shard_tokens: about how many tokens a file holds.
            log_totals: keep the log-sum-exp of the target's logits where they teach; it makes training a drafter
                with a reduced vocabulary cheaper.
        """
        config: Any = target.config
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        return cls(
            target=fingerprint_target(target),
            target_dtype=str(next(target.parameters()).dtype).removeprefix("torch."),
            tokenizer=fingerprint_tokenizer(tokenizer),
            layer_ids=tuple(layer_ids),
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            dtype=dtype,
            documents=_fingerprint_documents(documents),
            num_documents=len(documents),
            shard_tokens=shard_tokens,
            log_totals=log_totals,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` for torch."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    @property
    def stores_last(self) -> bool:
        """Whether the teacher's states are stored by themselves; they are one of the layers otherwise."""
        return self.num_layers - 1 not in self.layer_ids

    def bytes_for(self, num_tokens: int) -> int:
        """Size on disk of that many tokens, without the files' headers (a few hundred bytes each)."""
        states = (len(self.layer_ids) + self.stores_last) * self.hidden_size * self.torch_dtype.itemsize
        totals = torch.float32.itemsize * self.log_totals
        return num_tokens * (states + totals + torch.int64.itemsize + torch.bool.itemsize)

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return dataclasses.asdict(self) | {"layer_ids": list(self.layer_ids)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CacheSpec:
        """From the manifest."""
        try:
            return cls(**values)
        except TypeError as error:
            raise DataError(f"the cache's manifest does not fit this version: {error}") from error

    def require(self, found: CacheSpec, folder: object) -> None:
        """Refuse a cache that was made of something else.

        Raises:
            DataError: with every difference.
        """
        mine, theirs = self.to_dict(), found.to_dict()
        differing = [name for name in mine if mine[name] != theirs[name]]
        if not differing:
            return
        lines = [f"another {_WHAT[name]}: {theirs[name]} there, {mine[name]} here" for name in differing]
        raise DataError(
            f"the cache in {folder} was made with " + "; ".join(lines),
            why="the drafter would be trained on hidden states that it does not meet in service.",
            fix="use what it was made with, or make a new cache in another folder.",
        )


def fingerprint_target(target: nn.Module) -> str:
    """16 hex digits from names, shapes and some values of every weight, and the settings that it computes with."""
    digest = hashlib.sha256()
    config: Any = target.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    settings = {name: getattr(text, name, None) for name in _SETTINGS}
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    _digest_weights(digest, target)
    return digest.hexdigest()[:16]


def fingerprint_weights(model: nn.Module) -> str:
    """16 hex digits from names, shapes and some values of every weight."""
    digest = hashlib.sha256()
    _digest_weights(digest, model)
    return digest.hexdigest()[:16]


def _digest_weights(digest: hashlib._Hash, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        step = max(flat.numel() // _SAMPLES, 1)
        values = flat[::step].to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{list(parameter.shape)}".encode())
        digest.update(values.numpy().tobytes())


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """16 hex digits from vocabulary, merges and chat template."""
    if tokenizer is None:
        return "none"
    digest = hashlib.sha256()
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(b"" if backend is None else backend.to_str().encode())
    digest.update(str(getattr(tokenizer, "chat_template", None)).encode())
    return digest.hexdigest()[:16]


def _fingerprint_documents(documents: Sequence[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.input_ids.to("cpu", torch.int64).contiguous().numpy().tobytes())
        digest.update(document.supervised.to("cpu", torch.uint8).contiguous().numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:16]
