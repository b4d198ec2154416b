"""A causal LM and its tokenizer, from a folder, the Hugging Face hub or the embedded model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tokennorm.errors import ConfigError, MissingDependencyError
from tokennorm.recipes.common.fetch import EMBEDDED_MODELS, fetch
from tokennorm.recipes.common.quiet import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["load_causal_lm", "load_tokenizer"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_causal_lm(
    path_or_name: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    *,
    require_chat_template: bool = True,
    quantization: Any = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, ready for training on one device (the CPU; move it yourself).

    ``model.config.use_cache`` is set to False: while transformers makes a key-value cache it does not isolate
    packed documents. ``generate`` asks for its cache by itself.

    Args:
        path_or_name: an existing folder, a Hugging Face id, or the name of an embedded model
            (``smollm2-135m``), which is fetched when it is not there yet.
        dtype: of the weights, or its name.
        require_chat_template: refuse a tokenizer without one.
        quantization: a ``quantization_config`` of transformers, for frozen weights in few bits.

    Raises:
        ConfigError: a missing or incomplete folder, an id that the hub does not know, no connection, no chat
            template, an unknown dtype.
        MissingDependencyError: transformers is not installed.
    """
    dtype = _dtype(dtype)
    tokenizer = load_tokenizer(path_or_name, require_chat_template=require_chat_template)
    from transformers import AutoModelForCausalLM

    location = _locate(path_or_name)
    try:
        with quiet_transformers():
            options = {} if quantization is None else {"quantization_config": quantization}
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                location, dtype=dtype, output_loading_info=True, **options
            )
    except Exception as error:
        raise _load_error("the model", path_or_name, location, error) from error
    model, report = loaded
    _check_complete(report, path_or_name)
    model.config.use_cache = False
    return model, tokenizer


def load_tokenizer(
    path_or_name: str | os.PathLike[str], *, require_chat_template: bool = True
) -> PreTrainedTokenizerBase:
    """Load the tokenizer alone; arguments and errors as for :func:`load_causal_lm`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "loading a model needs transformers", fix='install it: pip install "tokennorm[train]"'
        ) from error

    location = _locate(path_or_name)
    folder = Path(location)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"the folder {folder} holds no tokenizer ({', '.join(TOKENIZER_FILES[:3])})",
            why="chats can't be turned into the model's tokens",
            fix="save it next to the model: tokenizer.save_pretrained(folder)",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
    except Exception as error:
        raise _load_error("the tokenizer", path_or_name, location, error) from error
    if require_chat_template and not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of {path_or_name} has no chat template",
            why="it says how roles and turns become tokens",
            fix="use an instruction-tuned model, or put a chat_template.jinja into the folder",
        )
    return tokenizer


def _locate(path_or_name: str | os.PathLike[str]) -> str:
    """Folder of a local or embedded model, or the hub id as it is."""
    text = os.fspath(path_or_name)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"the folder {folder} holds no config.json",
                fix="name the folder that save_pretrained wrote; a checkpoint of a run has to be exported first",
            )
        return str(folder)
    if text in EMBEDDED_MODELS:
        return str(fetch(text))
    looks_like_a_path = text.startswith(("/", ".", "~")) or text.count("/") > 1 or folder.exists()
    if looks_like_a_path:
        kind = "a file, not a folder" if folder.exists() else "not there"
        raise ConfigError(
            f"no model {text!r}: the folder is {kind}",
            fix=f"name a model folder, a Hugging Face id (owner/name) or {', '.join(EMBEDDED_MODELS)}",
        )
    return text


def _check_complete(report: dict[str, Any], path_or_name: object) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers and only logs it."""
    lacking = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
    if lacking:
        raise ConfigError(
            f"the checkpoint {path_or_name} lacks {len(lacking)} weights of the model, {lacking[0]} for one",
            why="they would start from random numbers",
            fix="name a checkpoint of a causal language model, with its head",
        )


def _load_error(what: str, path_or_name: object, location: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if Path(location).is_dir():
        return ConfigError(
            f"can't load {what} from the folder {location}: {reason}",
            fix="check that the folder is complete and of a causal language model",
        )
    return ConfigError(
        f"can't load {what} of {path_or_name} from the Hugging Face hub: {reason}",
        why=f"there is no local folder {location!r}, so the hub was asked",
        fix="check the id and the connection (HF_HUB_OFFLINE must be unset; a gated model needs HF_TOKEN), "
        f"name a local folder, or use {', '.join(EMBEDDED_MODELS)}",
    )


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}", fix=f"use one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
