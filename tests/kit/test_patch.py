"""What the patched model promises to its caller."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput

from tokennorm.errors import LabelError, LossUsageError, PatchError
from tokennorm.kit import apply_chunked_token_loss_patch, remove_chunked_token_loss_patch

V, D, B, S = 97, 32, 2, 9


def llama(**overrides) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": V, **sizes, "initializer_range": 0.3, **overrides}))


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MixtralConfig(
        vocab_size=V, **sizes, num_local_experts=4, num_key_value_heads=2, output_router_logits=True
    )
    return MixtralForCausalLM(config)


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, V, (B, S), generator=generator)
    labels = input_ids.clone()
    labels[0, :4] = -100
    labels[1, 6] = -100
    return {"input_ids": input_ids, "labels": labels}


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def reference(model: nn.Module, targets: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """``[B*S]`` from the logits of a model that is not patched, or called without labels."""
    logits = model(**inputs).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")


@pytest.fixture
def model():
    return apply_chunked_token_loss_patch(llama(), chunk_size=4)


@pytest.fixture
def expected():
    inputs = batch()
    return reference(llama(), shifted(inputs["labels"]), input_ids=inputs["input_ids"])


def test_losses_are_one_per_token_at_the_position_that_predicts_it(model, expected):
    outputs = model(**batch())
    assert outputs.loss.shape == (B * S,)
    assert outputs.loss.dtype == torch.float32
    torch.testing.assert_close(outputs.loss, expected)
    assert outputs["loss"] is outputs.loss
    assert outputs.extra_loss is None
    assert outputs.logits is None
    assert isinstance(outputs, CausalLMOutputWithPast)
    assert not outputs.loss.view(B, S)[:, -1].any()


def test_shift_labels_are_used_as_they_are(model):
    inputs = batch()
    targets = inputs["labels"]
    want = reference(llama(), targets, input_ids=inputs["input_ids"])
    for extra in ({}, {"labels": torch.full_like(targets, 5)}):
        got = model(input_ids=inputs["input_ids"], shift_labels=targets, **extra).loss
        torch.testing.assert_close(got, want)
        assert got.view(B, S)[:, -1].all()


def test_labels_may_be_positional(model, expected):
    inputs = batch()
    names = list(inspect.signature(model.forward).parameters)
    before = [None] * (names.index("labels") - 1)
    torch.testing.assert_close(model(inputs["input_ids"], *before, inputs["labels"]).loss, expected)


def test_other_ignore_index(model, expected):
    inputs = batch()
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, -7)
    torch.testing.assert_close(model(**inputs, ignore_index=-7).loss, expected)


def test_num_items_in_batch_divides_nothing(model, expected):
    for count in (3, torch.tensor(1000)):
        torch.testing.assert_close(model(**batch(), num_items_in_batch=count).loss, expected)


def test_host_count_saves_the_look_at_the_labels(model, expected):
    inputs = batch()
    count = int((shifted(inputs["labels"]) != -100).sum())
    torch.testing.assert_close(model(**inputs, num_supervised=count).loss, expected)
    with pytest.raises(LossUsageError, match="num_supervised"):
        model(**inputs, num_supervised=count + 1)


@pytest.mark.parametrize(
    "keep",
    [5, torch.arange(4, S), torch.tensor([list(range(4, S))] * B), torch.arange(B * S).view(B, S) % S >= 4],
    ids=["last 5", "positions", "positions per row", "mask"],
)
def test_logits_to_keep_leaves_other_positions_without_loss(model, keep):
    inputs = batch()
    inputs["labels"][:, :5] = -100
    want = reference(llama(), shifted(inputs["labels"]), input_ids=inputs["input_ids"])
    got = model(**inputs, logits_to_keep=keep).loss
    torch.testing.assert_close(got, want)
    got.sum().backward()


def test_logits_to_keep_with_labels_of_the_kept_positions(model):
    inputs = batch()
    want = reference(llama(), shifted(inputs["labels"]), input_ids=inputs["input_ids"]).view(B, S)[:, -4:]
    got = model(input_ids=inputs["input_ids"], labels=inputs["labels"][:, -4:], logits_to_keep=4).loss
    torch.testing.assert_close(got, want.flatten())


def test_logits_to_keep_never_drops_a_supervised_token(model):
    with pytest.raises(PatchError, match="leaves out"):
        model(**batch(), logits_to_keep=2)


def test_tuple_outputs(model, expected):
    got = model(**batch(), return_dict=False)
    assert isinstance(got, tuple)
    torch.testing.assert_close(got[0], expected)
    assert isinstance(model(**batch(), return_dict=True), ModelOutput)


def test_tuple_of_a_model_with_a_router_loss_ends_with_it():
    model = apply_chunked_token_loss_patch(mixtral())
    want = model(**batch()).extra_loss
    got = model(**batch(), return_dict=False)
    torch.testing.assert_close(got[-1], want)


def test_router_loss_is_apart_and_has_its_graph():
    unpatched, model = mixtral(), apply_chunked_token_loss_patch(mixtral())
    outputs, inputs = model(**batch()), batch()
    own = unpatched(**inputs)
    mean = reference(unpatched, shifted(inputs["labels"]), input_ids=inputs["input_ids"]).sum()
    mean = mean / (shifted(inputs["labels"]) != -100).sum()
    torch.testing.assert_close(outputs.extra_loss, own.loss - mean)
    assert type(outputs.extra_loss) is torch.Tensor
    outputs.extra_loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


@dataclass
class OwnOutput(ModelOutput):
    loss: torch.Tensor | None = None
    extra_loss: torch.Tensor | None = None


def test_output_class_of_the_caller(expected):
    model = apply_chunked_token_loss_patch(llama(), output_cls=OwnOutput)
    outputs = model(**batch())
    assert type(outputs) is OwnOutput
    torch.testing.assert_close(outputs.loss, expected)
    with pytest.raises(PatchError, match="extra_loss"):
        apply_chunked_token_loss_patch(llama(), output_cls=CausalLMOutputWithPast)
    with pytest.raises(PatchError, match="ModelOutput"):
        apply_chunked_token_loss_patch(llama(), output_cls=dict)


def test_outputs_can_be_copied_and_pickled(model):
    outputs = model(**batch())
    outputs.loss = outputs.loss.detach()
    for twin in (copy.copy(outputs), pickle.loads(pickle.dumps(outputs))):
        assert type(twin) is type(outputs)
        assert torch.equal(twin.loss, outputs.loss)


def test_without_labels_nothing_is_changed(model):
    inputs = batch()["input_ids"]
    plain, patched = llama()(input_ids=inputs), model(input_ids=inputs)
    assert type(plain) is type(patched)
    assert torch.equal(plain.logits, patched.logits)
    assert patched.loss is None
    generated = [it.generate(inputs, max_new_tokens=3, do_sample=False, pad_token_id=0) for it in (llama(), model)]
    assert torch.equal(*generated)


def test_signature_name_and_state_dict_stay(model):
    plain = llama()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert isinstance(model, LlamaForCausalLM)
    assert isinstance(model.lm_head, nn.Linear)
    assert repr(model) == repr(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_removal_restores_the_model():
    model, plain = llama(), llama()
    head, own = type(model.lm_head), plain(**batch()).loss
    apply_chunked_token_loss_patch(model)
    assert remove_chunked_token_loss_patch(model) is model
    assert (type(model), type(model.lm_head)) == (LlamaForCausalLM, head)
    assert vars(model).keys() == vars(plain).keys()
    assert vars(model.lm_head).keys() == vars(plain.lm_head).keys()
    assert torch.equal(model(**batch()).loss, own)
    assert remove_chunked_token_loss_patch(model) is model


def test_second_application_changes_the_settings(model, expected):
    patched = type(model)
    assert apply_chunked_token_loss_patch(model, chunk_size=2, output_cls=OwnOutput) is model
    assert type(model) is patched
    outputs = model(**batch())
    assert type(outputs) is OwnOutput
    torch.testing.assert_close(outputs.loss, expected)
    remove_chunked_token_loss_patch(model)
    assert type(model) is LlamaForCausalLM


def test_on_request_only_a_call_that_asks_gets_token_losses(expected):
    plain = llama()
    own = plain(**batch())
    model = apply_chunked_token_loss_patch(plain, on_request=True)
    outputs = model(**batch())
    assert torch.equal(outputs.loss, own.loss)
    assert torch.equal(outputs.logits, own.logits)
    torch.testing.assert_close(model(**batch(), token_losses=True).loss, expected)
    apply_chunked_token_loss_patch(model)
    torch.testing.assert_close(model(**batch()).loss, expected)
    assert torch.equal(model(**batch(), token_losses=False).loss, own.loss)


def test_copies_keep_the_patch(model, expected):
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            torch.testing.assert_close(twin(**batch()).loss, expected)
            twin.lm_head.weight.zero_()
            torch.testing.assert_close(model(**batch()).loss, expected)
        remove_chunked_token_loss_patch(twin)
        assert type(twin) is LlamaForCausalLM
        assert model(**batch()).loss.dim() == 1


def test_copy_that_lost_the_patch_raises(model):
    """Whoever rebuilds a model around the ``__dict__`` of a patched one must not train on a mean."""
    twin = LlamaForCausalLM(model.config)
    twin.__dict__.update(copy.deepcopy(model.__dict__))
    with pytest.raises(PatchError, match="lost"):
        twin(**batch())


def test_model_saved_and_loaded_has_no_patch_and_says_its_name(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded(**batch()).loss.dim() == 0
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_losses_in_evaluation_have_no_graph(model, expected):
    model.eval()
    with torch.no_grad():
        loss = model(**batch()).loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch()).loss.clone(), expected.detach())


def test_nothing_supervised_is_zero_with_a_graph_to_every_parameter(model):
    inputs = batch()
    loss = model(input_ids=inputs["input_ids"], labels=torch.full_like(inputs["labels"], -100)).loss
    assert not loss.any()
    loss.sum().backward()
    assert all(it.grad is not None and not it.grad.any() for it in model.parameters())


def test_label_outside_the_vocabulary(model):
    inputs = batch()
    inputs["labels"][1, 3] = V
    with pytest.raises(LabelError, match=str(V)):
        model(**inputs)


def test_nan_in_an_unsupervised_row_stays_there():
    model = apply_chunked_token_loss_patch(llama())
    inputs = batch()
    inputs["labels"][0] = -100
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    embeddings[0] = float("nan")
    loss = model(inputs_embeds=embeddings, labels=inputs["labels"]).loss
    loss.sum().backward()
    assert loss.isfinite().all()
    assert model.lm_head.weight.grad.isfinite().all()


def test_probe_leaves_no_trace():
    model = llama(attention_dropout=0.5)
    model.train()
    model.lm_head.eval()
    model.register_buffer("counter", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.counter.add_(1) and None)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    apply_chunked_token_loss_patch(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.counter == 0
    assert (model.training, model.model.training, model.lm_head.training) == (True, True, False)
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(it.grad is None for it in model.model.parameters())


def test_on_the_meta_device_the_probe_waits_for_the_first_loss(monkeypatch):
    from tokennorm.kit import patch

    probes: list[nn.Module] = []
    real_probe = patch.probe
    monkeypatch.setattr(patch, "probe", lambda model, run: (probes.append(model), real_probe(model, run)))
    with torch.device("meta"):
        model = llama()
    apply_chunked_token_loss_patch(model)
    assert not probes
    model.to_empty(device="cpu")
    plain = llama()
    model.load_state_dict(plain.state_dict())
    model.model.rotary_emb.load_state_dict(plain.model.rotary_emb.state_dict())
    for name, buffer in plain.named_buffers():
        model.get_submodule(name.rpartition(".")[0]).register_buffer(
            name.rpartition(".")[2], buffer, persistent=False
        )
    inputs = batch()
    model(input_ids=inputs["input_ids"])
    assert not probes
    for _ in range(2):
        got = model(**inputs).loss
        torch.testing.assert_close(got, reference(plain, shifted(inputs["labels"]), input_ids=inputs["input_ids"]))
    assert probes == [model]


class NoLossFunction(nn.Module):
    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return input_ids


class Scaled(LlamaForCausalLM):
    """Multiplies its loss, which the patch can't follow."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss * 2
        return outputs


class Rebuilt(LlamaForCausalLM):
    """Gives back a loss that isn't the one it was given."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if outputs.loss is not None:
            outputs.loss = torch.zeros(()) + 1.0
        return outputs


class TwoLosses(LlamaForCausalLM):
    def forward(self, *args, labels=None, **kwargs):
        outputs = super().forward(*args, **kwargs, labels=labels)
        if labels is not None:
            logits = self.lm_head(torch.ones(*labels.shape, D))
            outputs.loss = outputs.loss + self.loss_function(logits, labels, V)
        return outputs


# torch.compile imports what warns about torch.jit.
ignore_jit = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@ignore_jit
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: NoLossFunction(), "no loss_function"),
        (lambda: torch.nn.functional, "needs a torch.nn.Module"),
        (lambda: torch.compile(llama()), "whole model is compiled"),
        (lambda: Scaled(llama().config), "applies mul to its loss"),
        (lambda: Rebuilt(llama().config), "does not hold the loss"),
        (lambda: TwoLosses(llama().config), "more than once"),
    ],
    ids=["no loss_function", "no module", "compiled", "scaled loss", "rebuilt loss", "two losses"],
)
def test_what_cannot_be_patched_is_refused(wrong, message):
    with pytest.raises(PatchError, match=message):
        apply_chunked_token_loss_patch(wrong())


@ignore_jit
def test_model_compiled_in_place_is_refused():
    model = llama()
    model.compile()
    with pytest.raises(PatchError, match="compiled"):
        apply_chunked_token_loss_patch(model)


def test_forward_replaced_on_the_instance_is_refused():
    model = llama()
    model.forward = model.forward
    with pytest.raises(PatchError, match="replaced on the instance"):
        apply_chunked_token_loss_patch(model)


def test_loss_function_of_the_user_is_kept():
    from transformers.loss.loss_utils import ForCausalLMLoss

    model = llama()
    model.loss_function = own = lambda *args, **kwargs: ForCausalLMLoss(*args, **kwargs)
    apply_chunked_token_loss_patch(model)
    assert model.loss_function is own
    assert model(**batch()).loss.shape == (B * S,)
    remove_chunked_token_loss_patch(model)
    assert model.loss_function is own


def test_loss_function_of_the_user_is_compared_too():
    model = llama()
    model.loss_function = lambda logits, labels, **_: logits.float().logsumexp(-1).mean()
    with pytest.raises(PatchError, match="differs"):
        apply_chunked_token_loss_patch(model)
    assert model.loss_function.__name__ == "<lambda>"


def test_head_replaced_after_the_patch(model):
    model.resize_token_embeddings(V + 8)
    with pytest.raises(PatchError, match="was replaced after the patch"):
        model(**batch())
    remove_chunked_token_loss_patch(model)
    apply_chunked_token_loss_patch(model)
    assert model(**batch()).loss.shape == (B * S,)


def test_chunk_size_must_be_positive():
    with pytest.raises(PatchError, match="chunk_size"):
        apply_chunked_token_loss_patch(llama(), chunk_size=0)


def test_a_model_that_failed_once_works_again(model, expected):
    with pytest.raises(LabelError):
        model(input_ids=batch()["input_ids"], labels=torch.full((B, S), V + 1))
    torch.testing.assert_close(model(**batch()).loss, expected)
    assert model(input_ids=batch()["input_ids"]).logits.shape == (B, S, V)


def test_gpt2_tied_head_gets_both_gradients():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_embd=D, n_layer=1, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    plain = GPT2LMHeadModel(config)
    model = apply_chunked_token_loss_patch(copy.deepcopy(plain))
    assert model.lm_head.weight is model.transformer.wte.weight
    inputs = batch()
    model(**inputs).loss.sum().backward()
    reference(plain, shifted(inputs["labels"]), input_ids=inputs["input_ids"]).sum().backward()
    torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_importing_the_kit_needs_torch_only():
    code = (
        "import sys; sys.modules['transformers'] = None; sys.modules['peft'] = None\n"
        "from tokennorm.kit import apply_chunked_token_loss_patch, TokenNormedLossKit\n"
        "import torch\n"
        "from tokennorm.errors import PatchError\n"
        "try:\n    apply_chunked_token_loss_patch(torch.nn.Linear(2, 2))\n"
        "except PatchError as error:\n    print(error.what)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "no loss_function" in done.stdout


def test_two_threads_in_one_model_are_refused(model):
    """``torch.nn.DataParallel`` runs replicas, which share the patch, in threads."""
    import threading

    caught: list[BaseException] = []

    def second() -> None:
        try:
            model(**batch())
        except PatchError as error:
            caught.append(error)

    def during(*_: Any) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    handle = model.model.register_forward_pre_hook(during)
    model(**batch())
    handle.remove()
    assert len(caught) == 1
    assert "same time" in str(caught[0])
