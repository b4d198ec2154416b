"""The patch against the unpatched model, for families that differ in what is between head and loss."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from benchmarks.architecture_check import LogitsWatcher, compare, gradient_error, inputs_for
from benchmarks.shrunk_models import VOCABULARY, build, shrunk_config
from tokennorm.errors import PatchError
from tokennorm.kit import apply_chunked_token_loss_patch, patch
from tokennorm.kit.deferred_recording import Recording
from tokennorm.kit.patch_call import ForwardCall
from tokennorm.kit.patch_placeholder import LossPlaceholder

FAMILIES = {
    "plain": "LlamaForCausalLM",
    "labels shifted by the model": "GPT2LMHeadModel",
    "head with a bias": "PhiForCausalLM",
    "logits divided": "GraniteForCausalLM",
    "logits multiplied, tied head": "CohereForCausalLM",
    "logits multiplied by a base model's attribute": "FalconH1ForCausalLM",
    "softcap": "Gemma2ForCausalLM",
    "softcap, nn.functional": "RecurrentGemmaForCausalLM",
    "logits cast": "MambaForCausalLM",
    "softcap in a helper": "xLSTMForCausalLM",
    "vocabulary slice": "InklingForCausalLM",
    "router loss": "MixtralForCausalLM",
    "router loss, shared expert": "Qwen2MoeForCausalLM",
    "router loss and scale": "GraniteMoeForCausalLM",
    "encoder-style decoder": "BertGenerationDecoder",
    "head inside a prediction module": "RobertaForCausalLM",
    "output_projection": "BioGptForCausalLM",
    "vision-language": "LlavaForConditionalGeneration",
    "vision-language, three rope axes": "Qwen2VLForConditionalGeneration",
}
WITH_EXTRA_LOSS = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")


def tiny(name: str, dtype: torch.dtype = torch.float64):
    model_class = getattr(transformers, name)
    return build(shrunk_config(model_class.config_class()), model_class, dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_right_in_float64_without_materialising(family):
    name = FAMILIES[family]
    model = tiny(name)
    verdict = compare(model)
    assert verdict.outcome == "right", verdict.detail
    assert verdict.has_extra == (name in WITH_EXTRA_LOSS)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"])
def test_float32_is_as_close_to_float64_as_the_unpatched_model(name):
    truth = _weighted_gradients(tiny(name), patched=False)
    naive = _weighted_gradients(tiny(name, torch.float32), patched=False)
    ours = _weighted_gradients(tiny(name, torch.float32), patched=True)
    assert _distance(ours, truth) <= 2 * _distance(naive, truth) + 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_float64_as_the_unpatched_model(dtype):
    half = tiny("LlamaForCausalLM", dtype)
    truth = _weighted_gradients(copy.deepcopy(half).double(), patched=False)
    naive = _weighted_gradients(half, patched=False)
    ours = _weighted_gradients(copy.deepcopy(half), patched=True)
    assert _distance(ours, truth) <= 1.5 * _distance(naive, truth) + 1e-3


def _weighted_gradients(model, *, patched: bool) -> list[torch.Tensor]:
    """Gradients for an uneven upstream with zeros, of losses taken from the patch or from plain logits."""
    inputs = inputs_for(model)
    targets = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].flatten()
    if patched:
        apply_chunked_token_loss_patch(model, chunk_size=16)
        losses = model(**inputs).loss
    else:
        logits = model(**inputs).logits.flatten(0, 1)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = torch.nn.functional.cross_entropy(logits.to(wide), targets, reduction="none")
    weights = torch.linspace(0, 2, len(losses), dtype=losses.dtype)
    weights[::4] = 0
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((losses * weights).sum(), parameters, allow_unused=True)
    return [g for g in gradients if g is not None]


def _distance(got, want) -> float:
    pairs = list(zip(got, want, strict=True))
    difference = sum(float((a.double() - b).square().sum()) for a, b in pairs)
    return (difference / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5


def test_logits_that_are_needed_at_once_are_computed_and_right():
    """Bamba's z-loss takes a logsumexp over all logits: right, but materialised."""
    verdict = compare(tiny("BambaForCausalLM"))
    assert (verdict.outcome, verdict.has_extra) == ("materialised", True), verdict.detail


def test_watcher_sees_logits_of_all_tokens():
    """The watcher that the other tests rely on notices one chunk of everything."""
    model = apply_chunked_token_loss_patch(tiny("LlamaForCausalLM"), chunk_size=1000)
    inputs = inputs_for(model)
    count = int((inputs["labels"][:, 1:] != -100).sum())
    with LogitsWatcher({VOCABULARY}, count - 1) as watcher:
        model(**inputs)
    assert watcher.seen


@pytest.mark.parametrize(
    "name", ["BartForCausalLM", "XLNetLMHeadModel", "WhisperForCausalLM", "T5Gemma2ForConditionalGeneration"]
)
def test_family_with_a_loss_of_its_own_is_refused(name):
    model = tiny(name)
    before = type(model)
    with pytest.raises(PatchError, match=r"never calls self\.loss_function|differs from the unpatched"):
        apply_chunked_token_loss_patch(model)
    assert type(model) is before
    assert "_tokennorm_patch" not in vars(model)


def _forget_scale(monkeypatch):
    monkeypatch.setattr(Recording, "times", lambda self, factor: self)


def _forget_softcap(monkeypatch):
    monkeypatch.setattr(Recording, "tanh", lambda self: self)


def _shift_too_far(monkeypatch):
    answer = ForwardCall.loss_function
    monkeypatch.setattr(
        ForwardCall,
        "loss_function",
        lambda self, logits, labels, *a, **k: answer(self, logits, labels.roll(1), *a, **k),
    )


def _forget_extra_loss(monkeypatch):
    monkeypatch.setattr(LossPlaceholder, "extra", property(lambda self: None, lambda *_: None), raising=False)


PLANTED = {
    "scale forgotten": (_forget_scale, "GraniteForCausalLM"),
    "softcap forgotten": (_forget_softcap, "Gemma2ForCausalLM"),
    "labels shifted too far": (_shift_too_far, "GPT2LMHeadModel"),
    "extra loss forgotten": (_forget_extra_loss, "MixtralForCausalLM"),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistake_is_refused_by_the_probe(mistake, monkeypatch):
    plant, name = PLANTED[mistake]
    model = tiny(name, torch.float32)
    plant(monkeypatch)
    with pytest.raises(PatchError, match="differs from the unpatched"):
        apply_chunked_token_loss_patch(model)


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistake_is_noticed_by_the_comparison(mistake, monkeypatch):
    plant, name = PLANTED[mistake]
    model = tiny(name)
    plant(monkeypatch)
    monkeypatch.setattr(patch, "probe", lambda *_: None)
    assert compare(model).outcome == "wrong"


def test_comparison_is_not_blinded_by_large_gradients_of_the_body():
    """An error of 1e-6 in the head's gradient, beside a body whose gradient is 10,000 times larger."""
    model = tiny("LlamaForCausalLM")
    head = next(i for i, (name, _) in enumerate(model.named_parameters()) if name == "lm_head.weight")
    want = [torch.full_like(parameter, 1e4) for parameter in model.parameters()]
    want[head].fill_(1.0)
    got = [gradient.clone() for gradient in want]
    got[head] *= 1 + 1e-6
    assert gradient_error(model, got, want) == pytest.approx(1e-6, rel=1e-3)
