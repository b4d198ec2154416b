"""Write a drafter for the servers, and read one back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.draft.formats.files import partial_path, safetensors_module, save_tensors
from tokennorm.draft.formats.schema import DraftFormat, config_from_folder, folder_config
from tokennorm.draft.model import Attention, DraftModel
from tokennorm.draft.target import target_weights
from tokennorm.draft.vocabulary import DraftVocabulary
from tokennorm.errors import CheckpointError, ConfigError, DataError

__all__ = ["WarmStart", "export_drafter", "load_drafter", "warm_start"]

WEIGHTS = "model.safetensors"
# The target's: a checkpoint may leave them out.
_LENT = ("embed_tokens.weight", "lm_head.weight")
# Stored by some writers, used by none of the readers here.
_IGNORED = ("t2d", "rotary_emb.inv_freq", "mask_embedding", "verifier_norm.weight", "verifier_lm_head.weight")
_OF_DRAFT_TOKENS = ("markov_head.markov_w2.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """What a warm start took over.

    Attributes:
        loaded: weights that were replaced.
        kept: trained weights that the folder does not have.
        differences: settings in which the two drafters differ, in words; the weights fit nevertheless.
    """

    loaded: tuple[str, ...]
    kept: tuple[str, ...]
    differences: tuple[str, ...]


def export_drafter(
    drafter: DraftModel,
    folder: Path | str,
    *,
    kind: DraftFormat = "dspark",
    dtype: torch.dtype | None = torch.bfloat16,
    verifier: str | None = None,
    num_anchors: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``config.json``, ``model.safetensors`` and where it comes from.

    The folder appears complete or not at all; one that exists is replaced.

    Args:
        drafter: trained.
        folder: where to.
        kind: the schema (:mod:`~tokennorm.draft.formats.schema`). vLLM reads all, SGLang not ``speculators``.
        dtype: of the weights; None leaves them as they are.
        verifier: name or path of the target; needed by ``speculators``.
        num_anchors: for the record.
        provenance: what ``tokennorm.json`` says about the training, besides the version.

    Raises:
        ConfigError: the schema can't express this drafter.
        CheckpointError: the folder can't be written.
    """
    target = Path(folder)
    tensors = _tensors(drafter, kind, dtype)
    saved = next(value for name, value in tensors.items() if name == "fc.weight").dtype
    values = folder_config(
        drafter.config,
        kind,
        dtype=str(saved).removeprefix("torch."),
        verifier=verifier,
        num_anchors=num_anchors,
    )
    origin = {"tokennorm": _version(), "format": kind, **(provenance or {})}
    partial = partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(values, indent=2, default=str) + "\n")
        (partial / "tokennorm.json").write_text(json.dumps(origin, indent=2, default=str) + "\n")
        save_tensors(partial / WEIGHTS, tensors, {"format": "pt"})
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
    except (OSError, ConfigError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"the drafter could not be exported to {target}: {error}") from error
    return target


def load_drafter(
    folder: Path | str,
    *,
    target: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    attention: Attention = "auto",
) -> DraftModel:
    """Read a drafter in any of the three schemas.

    Args:
        folder: with ``config.json`` and safetensors weights.
        target: lends embedding and head where the folder has none.
        dtype: of the drafter.
        attention: see :class:`DraftModel`.

    Raises:
        DataError: a folder that holds no such drafter, or weights that don't fit its configuration.
    """
    values, tensors = read_folder(folder)
    config = config_from_folder(values, tensors, num_target_layers=_num_layers(target))
    vocabulary = None
    if config.draft_vocab_size is not None:
        if "d2t" not in tensors:
            raise DataError(f"{folder} has a reduced vocabulary and no d2t", why="nobody knows its tokens.")
        ids = tensors["d2t"].to(torch.int64) + torch.arange(tensors["d2t"].shape[0])
        vocabulary = DraftVocabulary(ids, config.vocab_size)
    drafter = DraftModel(config, vocabulary=vocabulary, attention=attention).to(dtype)
    absent = [name for name in _LENT if name not in tensors]
    if absent:
        if target is None:
            raise DataError(f"{folder} has no {' and no '.join(absent)}", fix="give the target, which lends them.")
        # What the folder does have is written over the drafter's; that must not be the target's memory.
        lent = [weight.to(dtype) for weight in target_weights(target)]
        drafter.share_target(*lent, copy=len(absent) < len(_LENT))
    expected = drafter.state_dict()
    missing = sorted(set(expected) - set(tensors) - set(absent))
    if missing:
        raise DataError(f"{folder} lacks {len(missing)} weights, the first is {missing[0]}")
    _refuse_unknown(tensors, expected, folder)
    _refuse_shapes({name: tensors[name] for name in expected if name in tensors}, expected, folder)
    with torch.no_grad():
        for name, value in expected.items():
            if name in tensors:
                value.copy_(tensors[name])
    return drafter


def warm_start(drafter: DraftModel, folder: Path | str) -> WarmStart:
    """Start a drafter from the weights of another one for the same target; embedding and head stay as they are.

    Rows of a full vocabulary are taken over into a reduced one.

    Args:
        drafter: changed in place.
        folder: in the DSpark, DFlash or speculators schema.

    Raises:
        DataError: another target or other layers of it, or shapes that don't fit.
    """
    values, tensors = read_folder(folder)
    other, mine = (
        config_from_folder(values, tensors, num_target_layers=drafter.config.num_target_layers),
        drafter.config,
    )
    if other.target_layer_ids != mine.target_layer_ids:
        raise DataError(
            f"{folder} reads layers {list(other.target_layer_ids)} of its target, this drafter reads "
            f"{list(mine.target_layer_ids)}",
            why="fc mixes the hidden states of exactly those layers.",
            fix=f"make the drafter with target_layer_ids={list(other.target_layer_ids)}.",
        )
    expected = {name: value for name, value in drafter.named_parameters() if name not in _LENT}
    found = {name: value for name, value in tensors.items() if name in expected}
    vocabulary = drafter.vocabulary
    for name in _OF_DRAFT_TOKENS:
        if isinstance(vocabulary, DraftVocabulary) and name in found and other.draft_vocab_size is None:
            found[name] = found[name].index_select(0, vocabulary.ids.cpu())
    if other.draft_vocab_size is not None and not _same_tokens(vocabulary, tensors.get("d2t")):
        found.pop("markov_head.markov_w2.weight", None)
    _refuse_unknown(
        {name: value for name, value in tensors.items() if name.startswith("layers.")}, expected, folder
    )
    if not found:
        raise DataError(f"{folder} has no weight of this drafter")
    _refuse_shapes(found, expected, folder)
    with torch.no_grad():
        for name, value in found.items():
            expected[name].copy_(value)
    names = ("block_size", "first_supervised_slot", "mask_token_id", "markov_head_type", "rope_parameters")
    differences = [
        f"{name}: {getattr(other, name)} there, {getattr(mine, name)} here"
        for name in names
        if getattr(other, name) != getattr(mine, name)
        and not (name == "markov_head_type" and not other.markov_rank)
    ]
    return WarmStart(
        loaded=tuple(found),
        kept=tuple(name for name in expected if name not in found),
        differences=tuple(differences),
    )


def read_folder(folder: Path | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and all weights, under flat names.

    Raises:
        DataError: there is nothing to read.
    """
    path = Path(folder)
    try:
        values = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} has no config.json that can be read: {error}") from error
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DataError(f"{path} has no weights (*.safetensors)")
    library, tensors = safetensors_module(), {}
    for file in files:
        try:
            tensors |= library.torch.load_file(file)
        except library.SafetensorError as error:
            raise DataError(f"{file} can't be read: {error}") from error
    return values, {name.removeprefix("model."): value for name, value in tensors.items()}


def _tensors(drafter: DraftModel, kind: DraftFormat, dtype: torch.dtype | None) -> dict[str, Tensor]:
    state = dict(drafter.state_dict())
    if kind != "dspark":
        del state["embed_tokens.weight"]
        if drafter.config.draft_vocab_size is None:
            del state["lm_head.weight"]
    vocabulary = drafter.vocabulary
    if kind == "speculators" and isinstance(vocabulary, DraftVocabulary):
        state["t2d"] = vocabulary.draft_of >= 0
    if dtype is None:
        return state
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}


def _refuse_unknown(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: object) -> None:
    unknown = [name for name in tensors if name not in expected and name not in _IGNORED]
    if unknown:
        raise DataError(
            f"{folder} has {len(unknown)} weights that this drafter does not have, the first is {unknown[0]}",
            why="leaving them out would change what it proposes.",
        )


def _refuse_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: object) -> None:
    for name, value in found.items():
        if value.shape != expected[name].shape:
            raise DataError(
                f"{name} in {folder} is {list(value.shape)}, the drafter's is {list(expected[name].shape)}"
            )


def _same_tokens(vocabulary: int | DraftVocabulary, d2t: Tensor | None) -> bool:
    if isinstance(vocabulary, int) or d2t is None or d2t.shape[0] != vocabulary.size:
        return False
    return torch.equal(vocabulary.ids.cpu(), d2t.to(torch.int64) + torch.arange(d2t.shape[0]))


def _num_layers(target: Any) -> int | None:
    if target is None:
        return None
    config = target.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(text.num_hidden_layers)


def _version() -> str:
    try:
        return version("tokennorm")
    except PackageNotFoundError:
        return "unknown"
