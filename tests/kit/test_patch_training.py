"""The patch together with what people train with: adapters, checkpointing, compilation, autocast, frozen parts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.architecture_check import LogitsWatcher
from tokennorm.kit import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch
from tokennorm.kit.patch_head import DeferringHead

# peft still reads what transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

# V > D, and more supervised rows than D: nothing but logits is [rows, V].
V, D, B, S = 131, 16, 3, 14
CHUNK = 5


def llama(dtype: torch.dtype = torch.float64, **overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": V, **sizes, "initializer_range": 0.3, "use_cache": False, **overrides})
    return LlamaForCausalLM(config).to(dtype)


def lora(model: nn.Module, dropout: float = 0.0, **where: Any) -> PeftModel:
    torch.manual_seed(1)
    where = where or {"target_modules": ["q_proj", "lm_head"]}
    adapted = get_peft_model(model, LoraConfig(r=2, lora_dropout=dropout, **where)).double()
    for name, parameter in adapted.named_parameters():
        # The second factor starts at zero, which would hide an adapter that isn't used.
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


def batch() -> dict[str, torch.Tensor]:
    input_ids = torch.randint(3, V, (B, S), generator=torch.Generator().manual_seed(2))
    labels = input_ids.clone()
    labels[0, :6] = -100
    return {"input_ids": input_ids, "labels": labels}


def uneven(losses: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0, 2, losses.numel(), dtype=losses.dtype)
    weights[::4] = 0
    return (losses.flatten() * weights).sum()


def reference(model: nn.Module) -> torch.Tensor:
    inputs = batch()
    logits = model(input_ids=inputs["input_ids"]).logits.flatten(0, 1)
    targets = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].flatten()
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets, reduction="none")


def assert_same_training(
    patched: Any, plain: Any, *, tolerance: float = 1e-10, materialises: bool = False
) -> None:
    """Losses and gradients as unpatched; and, unless it materialises, no tensor with the logits of all tokens."""
    rows = int((batch()["labels"][:, 1:] != -100).sum())
    with LogitsWatcher({V}, rows) as watcher:
        losses = patched(**batch()).loss
        uneven(losses).backward()
    assert bool(watcher.seen) == materialises, watcher.seen[:3]
    assert_same_gradients(patched, plain, losses, tolerance)


def assert_same_gradients(patched: Any, plain: Any, losses: torch.Tensor, tolerance: float) -> None:
    """Losses, and all gradients for an uneven upstream, which ``patched`` has already."""
    want = reference(plain)
    uneven(want).backward()
    torch.testing.assert_close(losses, want, atol=tolerance, rtol=tolerance)
    trained = 0
    for (name, mine), theirs in zip(patched.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, atol=tolerance, rtol=tolerance, msg=name)
            trained += bool(theirs.grad.abs().sum() > 0)
    assert trained


def test_lora_on_the_head():
    patched = apply_chunked_token_loss_patch(lora(llama()), chunk_size=CHUNK)
    assert isinstance(patched, PeftModel)
    assert_same_training(patched, lora(llama()))


def test_lora_on_the_head_with_nothing_supervised():
    patched = apply_chunked_token_loss_patch(lora(llama()))
    inputs = batch()
    patched(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100)).loss.sum().backward()
    assert all(it.grad is not None and not it.grad.any() for it in patched.parameters() if it.requires_grad)


def test_lora_with_dropout_draws_the_same_mask_in_forward_and_backward():
    """With dropout on the head's adapter the checkpointed chunks must repeat their random numbers."""
    patched = apply_chunked_token_loss_patch(lora(llama(), dropout=0.5), chunk_size=CHUNK).train()
    adapter = patched.get_base_model().lm_head.lora_B["default"].weight

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return uneven(patched(**batch()).loss)

    (gradient,) = torch.autograd.grad(loss(), [adapter])
    step = 1e-6 * gradient / gradient.norm()
    with torch.no_grad():
        adapter.add_(step)
        above = loss()
        adapter.sub_(2 * step)
        below = loss()
    assert float((above - below) / 2e-6) == pytest.approx(float(gradient.norm()), rel=1e-4)


def test_head_that_is_trained_beside_an_adapter():
    where = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
    patched = apply_chunked_token_loss_patch(lora(llama(), **where), chunk_size=CHUNK)
    assert_same_training(patched, lora(llama(), **where))


def test_adapter_on_the_body_leaves_a_plain_head():
    where = {"target_modules": ["q_proj"]}
    patched = apply_chunked_token_loss_patch(lora(llama(), **where), chunk_size=CHUNK)
    assert_same_training(patched, lora(llama(), **where))


def test_frozen_head():
    patched, plain = llama(), llama()
    for model in (patched, plain):
        model.lm_head.requires_grad_(False)
    assert_same_training(apply_chunked_token_loss_patch(patched, chunk_size=CHUNK), plain)


def test_frozen_body():
    patched, plain = llama(), llama()
    for model in (patched, plain):
        model.model.requires_grad_(False)
    assert_same_training(apply_chunked_token_loss_patch(patched, chunk_size=CHUNK), plain)


def test_tied_head():
    patched = apply_chunked_token_loss_patch(llama(tie_word_embeddings=True), chunk_size=CHUNK)
    assert patched.lm_head.weight is patched.model.embed_tokens.weight
    assert_same_training(patched, llama(tie_word_embeddings=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("before", [False, True], ids=["after the patch", "before the patch"])
def test_gradient_checkpointing(reentrant, before):
    patched, plain = llama(), llama()
    options = {"activation_checkpointing_kwargs": {"use_reentrant": reentrant}}
    if before:
        patched.activation_checkpointing_enable(**options)
    patched = apply_chunked_token_loss_patch(patched, chunk_size=CHUNK).train()
    if not before:
        patched.activation_checkpointing_enable(**options)
    assert_same_training(patched, plain.train())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_base_model_is_one_graph_without_breaks():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    patched, plain = llama(torch.float32), llama(torch.float32)
    patched.model = torch.compile(patched.model, backend="aot_eager")
    apply_chunked_token_loss_patch(patched, chunk_size=CHUNK)
    torch._dynamo.reset()
    counters.clear()
    # Not under the watcher: dynamo compiles nothing there.
    losses = patched(**batch()).loss
    uneven(losses).backward()
    assert_same_gradients(patched, plain, losses, tolerance=3e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_model_compiled_after_the_patch_is_still_right():
    patched = apply_chunked_token_loss_patch(llama(torch.float32), chunk_size=CHUNK)
    compiled = torch.compile(patched, backend="eager")
    torch.testing.assert_close(compiled(**batch()).loss, patched(**batch()).loss)


def test_autocast():
    patched = apply_chunked_token_loss_patch(llama(torch.float32), chunk_size=CHUNK)
    plain = llama(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = patched(**batch()).loss, reference(plain)
        truth = reference(llama(torch.float64))
    assert got.dtype == torch.float32
    # Our logits are not rounded to bfloat16 on top.
    assert (got - truth).norm() <= 1.1 * (want - truth).norm()
    uneven(got).backward()
    uneven(want).backward()
    for mine, theirs in zip(patched.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm()


def test_bfloat16_model_has_float32_losses():
    patched = apply_chunked_token_loss_patch(llama(torch.bfloat16), chunk_size=CHUNK)
    losses = patched(**batch()).loss
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert patched.lm_head.weight.grad.dtype == torch.bfloat16
    truth = reference(copy.deepcopy(patched).double())
    assert (losses - truth).norm() <= 0.02 * truth.norm()


def test_evaluation_never_holds_all_logits():
    patched = apply_chunked_token_loss_patch(llama(), chunk_size=CHUNK).eval()
    rows = int((batch()["labels"][:, 1:] != -100).sum())
    with torch.no_grad(), LogitsWatcher({V}, rows) as watcher:
        losses = patched(**batch()).loss
    assert not watcher.seen
    torch.testing.assert_close(losses, reference(llama()).detach())


def test_head_whose_forward_was_replaced_gives_real_logits():
    """accelerate's device hooks replace ``forward`` on the instance: right, only bigger."""
    patched = llama()
    patched.lm_head.forward = lambda hidden, head=patched.lm_head: nn.Linear.forward(head, hidden)
    apply_chunked_token_loss_patch(patched, chunk_size=CHUNK)
    assert_same_training(patched, llama(), materialises=True)


class QuarterHead(nn.Linear):
    """A head with a forward of its own."""

    def forward(self, input):
        return super().forward(input) * 0.25


def test_head_with_a_forward_of_its_own_runs_by_checkpointed_chunks():
    models = [llama(), llama()]
    for model in models:
        model.lm_head.__class__ = QuarterHead
    assert_same_training(apply_chunked_token_loss_patch(models[0], chunk_size=CHUNK), models[1])
    remove_chunked_token_loss_patch(models[0])
    assert type(models[0].lm_head) is QuarterHead


def test_hooks_of_the_head_run_once_per_micro_batch():
    patched = apply_chunked_token_loss_patch(llama(), chunk_size=2)
    entered = []
    patched.lm_head.register_forward_hook(lambda module, args, output: entered.append(output.shape))
    patched(**batch())
    assert entered == [torch.Size([B * S])]
    patched(input_ids=batch()["input_ids"])
    assert entered[1:] == [torch.Size([B, S, V])]


def test_number_of_matrix_products_with_a_uniform_upstream():
    """Three per chunk: between model and operator the gradient keeps the stride 0 that ``.sum()`` gives it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    products: list[torch.Size] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in str(func) and any(V in getattr(it, "shape", ()) for it in args):
                products.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    patched = apply_chunked_token_loss_patch(llama(), chunk_size=B * S)
    losses = patched(**batch()).loss
    with Count():
        losses = patched(**batch()).loss
        losses.sum().backward()
    assert len(products) == 3


def test_patched_head_outside_of_a_loss_is_an_ordinary_module():
    patched = apply_chunked_token_loss_patch(llama())
    assert isinstance(patched.lm_head, DeferringHead)
    hidden = torch.randn(2, D, dtype=torch.float64)
    assert torch.equal(patched.lm_head(hidden), F.linear(hidden, patched.lm_head.weight))
