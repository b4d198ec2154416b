"""Which module a patch goes to: the causal LM inside its wrappers, and its head."""

from __future__ import annotations

from typing import Any

from torch import nn

from tokennorm.errors import PatchError
from tokennorm.kit.patch_head import DeferringHead
from tokennorm.kit.patch_placeholder import OWN_LOSS

__all__ = ["causal_lm", "head_of", "unwrapped"]


def unwrapped(model: Any) -> Any:
    """The model inside DDP, DataParallel, FSDP1 or PEFT."""
    while True:
        if callable(getattr(type(model), "get_base_model", None)):
            model = model.get_base_model()
        elif isinstance(getattr(model, "module", None), nn.Module) and not _has_loss_function(model):
            model = model.module
        else:
            return model


def _has_loss_function(model: Any) -> bool:
    return hasattr(type(model), "loss_function") or "loss_function" in vars(model)


def causal_lm(model: Any) -> Any:
    """The module to patch, or an error that says why there is none."""
    inner = unwrapped(model)
    name = type(inner).__name__
    if not isinstance(inner, nn.Module):
        raise PatchError(f"apply_chunked_token_loss_patch needs a torch.nn.Module, not a {name}")
    if hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None:
        raise PatchError(
            "the whole model is compiled",
            why="deferred logits are Python that a compiled forward can't hold.",
            fix="compile the base model instead: model.model = torch.compile(model.model).",
        )
    if not _has_loss_function(inner):
        raise PatchError(
            f"{name} has no loss_function",
            why="that call is where a causal LM of transformers hands its logits over.",
            fix=OWN_LOSS,
        )
    if "forward" in vars(inner):
        raise PatchError(
            f"forward of this {name} was replaced on the instance",
            why="the replacement would hide the patched forward.",
            fix="apply the patch first, then accelerate's prepare (or whatever replaced it).",
        )
    return inner


def head_of(model: Any) -> tuple[str, nn.Module]:
    """Name and module of the output head."""
    head = None
    if callable(getattr(model, "get_output_embeddings", None)):
        head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    if not isinstance(head, nn.Module):
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        width = getattr(text, "vocab_size", None)
        wide = [it for it in modules.values() if isinstance(it, nn.Linear) and it.out_features == width]
        head = wide[-1] if len(wide) == 1 else None
    name = next((name for name, module in modules.items() if module is head), None)
    if head is None or name is None:
        raise PatchError(
            f"{type(model).__name__} has no single output head: get_output_embeddings() gives "
            f"{type(head).__name__}",
            why="its losses are computed from what the head's input is.",
            fix=OWN_LOSS,
        )
    if isinstance(head, DeferringHead):
        raise PatchError("the head belongs to another patched model", fix="patch only the outermost model.")
    return name, head
