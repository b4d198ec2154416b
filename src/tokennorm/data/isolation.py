"""Does a model keep the documents of a packed row apart? A probe on two documents answers.

Packed rows carry positions and no mask, and whether that isolates the documents depends on the model, its
attention implementation and its arguments: recurrent layers do not reset, transformers 5 does not isolate while
a key-value cache is made (``use_cache``), flash attention isolates one row only, not a batch of them. So the
model is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokennorm.errors import DataError

__all__ = ["document_leakage", "documents_are_isolated", "require_isolated_documents"]

# Experts see other batches of tokens when the first document changes, so their results may round differently.
TOLERANCE = 1e-4
TOLERANCE_16_BIT = 2e-2


def document_leakage(
    model: nn.Module,
    *,
    batch_size: int = 2,
    document_length: int = 8,
    forward_options: Mapping[str, Any] | None = None,
) -> float:
    """How much the first document of a row changes the outputs of the second one.

    Runs the model three times on ``[batch_size, 2 * document_length]`` tokens, without gradients and in eval
    mode (restored afterwards): as it is, with another first document, and with another first token of the
    second document. Under DDP or FSDP every rank has to call it.

    Args:
        model: a causal LM called as ``model(input_ids=, position_ids=)``.
        batch_size: rows, as many as the training's packed batches have where that matters.
        document_length: tokens of each document.
        forward_options: further arguments that training passes (``{"use_cache": False}``).

    Returns:
        The largest change of a logit of the second document through the first one, divided by that through
        its own first token. 0 where documents are isolated, about 1 where nothing separates them.

    Raises:
        DataError: the second document's outputs do not depend on its own first token, so nothing is known.
    """
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(20240229)
    vocabulary = _vocabulary_size(model)
    length = document_length
    ids = torch.randint(vocabulary, (batch_size, 2 * length), generator=generator)
    positions = torch.arange(length).repeat(batch_size, 2).to(parameter.device)
    other_first, other_own = ids.clone(), ids.clone()
    other_first[:, :length] = (ids[:, :length] + 1) % vocabulary
    other_own[:, length] = (ids[:, length] + 1) % vocabulary

    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            plain, first, own = (
                _second_document(model, tokens.to(parameter.device), positions, length, forward_options)
                for tokens in (ids, other_first, other_own)
            )
    finally:
        for module, training in modes.items():
            module.training = training
    # Its own first token changes position 0 anyhow; only what reaches later positions went through context.
    own_change = float((own - plain)[:, 1:].abs().max())
    if own_change == 0.0:
        raise DataError(
            "changing a document's first token does not change the model's later outputs",
            why="the probe for isolated documents sees nothing, so it can't vouch for packing",
            fix="train without packing (pack_length unset)",
        )
    return float((first - plain).abs().max()) / own_change


def documents_are_isolated(
    model: nn.Module, *, batch_size: int = 2, forward_options: Mapping[str, Any] | None = None
) -> bool:
    """Whether the documents of a packed row can't see each other, see :func:`document_leakage`."""
    is_16_bit = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    leakage = document_leakage(model, batch_size=batch_size, forward_options=forward_options)
    return leakage <= (TOLERANCE_16_BIT if is_16_bit else TOLERANCE)


def require_isolated_documents(
    model: nn.Module, *, batch_size: int = 2, forward_options: Mapping[str, Any] | None = None
) -> None:
    """Refuse packing for a model that lets one document see another.

    Raises:
        DataError: with the measured leakage.
    """
    if documents_are_isolated(model, batch_size=batch_size, forward_options=forward_options):
        return
    leakage = document_leakage(model, batch_size=batch_size, forward_options=forward_options)
    raise DataError(
        f"{type(model).__name__} does not isolate packed documents: the first document of a row changes the "
        f"second one's outputs {leakage:.1e} times as much as the second one's own first token does",
        why="each document would be trained with a stranger's text as its context",
        fix="set model.config.use_cache = False where it is on; otherwise train without packing "
        "(pack_length unset), as recurrent models have to",
    )


def _second_document(
    model: nn.Module, ids: Tensor, positions: Tensor, length: int, options: Mapping[str, Any] | None
) -> Tensor:
    output = model(input_ids=ids, position_ids=positions, **(options or {}))
    return output.logits[:, length:].double()


def _vocabulary_size(model: nn.Module) -> int:
    unwrapped = getattr(model, "module", model)
    return int(unwrapped.get_input_embeddings().weight.shape[0])  # pyright: ignore[reportCallIssue]
