"""Adapters on a base in 4 bits: the gradient is that of the decoded weights, which nothing changes."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from recipes.sft.tests.tiny import EPOCHS, build_folder, job_of, tiny_config
from tests.distributed.exactness import by_definition, relative_error, with_learned_adapters
from tests.distributed.test_model_options import SAMPLES, train_once
from tokennorm.engine import DistributedConfig, LoopConfig, Runtime, frozen_fingerprint
from tokennorm.engine.throughput import StepCost
from tokennorm.errors import CheckpointError, ConfigError
from tokennorm.kit import apply_chunked_token_loss_patch
from tokennorm.recipes.common import quantised
from tokennorm.recipes.common.quantised import decode_nf4, quantised_layers, require_true_decoding
from tokennorm.recipes.sft import run
from tokennorm.recipes.sft.config import LoraConfig, ModelConfig, RunConfig, SftConfig, TrainConfig
from tokennorm.recipes.sft.modelling import adapt, load, place

LORA = LoraConfig(rank=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers whose inputs are multiples of 64, as bitsandbytes wants them on a CPU."""
    return build_folder(tmp_path_factory.mktemp("quantised"), hidden_size=64)


def settings(folder: Path, **options: Any) -> SftConfig:
    model = ModelConfig(path=str(folder / "model"), quantize="nf4", **options)
    return SftConfig(model=model, lora=LORA)


def adapted(config: SftConfig) -> Any:
    """In 4 bits, with adapters that have already learned something."""
    model, _ = load(config.model)
    return with_learned_adapters(adapt(model, config))


def decoded(model: Any, config: SftConfig) -> Any:
    """The same model with plain weights."""
    plain = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    for name, layer in quantised_layers(model.get_base_model()).items():
        plain.get_submodule(name).weight.data.copy_(decode_nf4(layer.weight))
    plain = adapt(plain, SftConfig(lora=LORA))
    with torch.no_grad():
        for own, theirs in zip(_adapters(plain), _adapters(model), strict=True):
            own.copy_(theirs)
    return plain


def _adapters(model: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"autocast": "bfloat16"}])
def test_the_gradient_is_that_of_the_decoded_weights(folder: Path, options: dict[str, Any]) -> None:
    config = settings(folder, **options)
    model = adapted(config)
    plain = decoded(model, config)
    truth = by_definition(plain, SAMPLES, torch.float64)
    half = options.get("autocast") is not None
    naive = relative_error(by_definition(plain, SAMPLES, torch.bfloat16 if half else torch.float32), truth)
    patched = place(apply_chunked_token_loss_patch(model, chunk_size=3), config, Runtime())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        error = relative_error(train_once(patched), truth)
    print(f"4 bits {options} {error:.1e}, naive {naive:.1e}")
    assert error < 1.5 * naive
    # The weights from before they were quantised have another gradient.
    original = adapt(AutoModelForCausalLM.from_pretrained(config.model.path), SftConfig(lora=LORA))
    with torch.no_grad():
        for own, theirs in zip(_adapters(original), _adapters(plain), strict=True):
            own.copy_(theirs)
    assert relative_error(by_definition(original, SAMPLES, torch.float64), truth) > 5 * error


def test_an_evaluation_leaves_the_base_as_it_is(folder: Path) -> None:
    model, _ = load(settings(folder).model)
    layers = quantised_layers(model)
    assert len(layers) == 2 * 7, "all linear layers but the head"
    model = adapt(model, settings(folder))
    before = frozen_fingerprint(model)
    state = copy.deepcopy([decode_nf4(layer.weight) for layer in layers.values()])
    model.eval()
    with torch.inference_mode():
        model(input_ids=torch.arange(1, 9).unsqueeze(0))
    assert frozen_fingerprint(model) == before
    for layer, weight in zip(layers.values(), state, strict=True):
        assert torch.equal(decode_nf4(layer.weight), weight)


def test_a_run_resumes_bit_for_bit_and_exports_what_it_trained(folder: Path) -> None:
    def short(name: str, *, resume: bool = False) -> SftConfig:
        return tiny_config(
            folder,
            name,
            model=settings(folder).model,
            lora=LORA,
            train=TrainConfig(epochs=EPOCHS, max_steps=4),
            loop=LoopConfig(save_every=2, eval_every=2, keep_last=2),
            run=RunConfig(dir=str(folder / name), resume=resume, question="say beta 1 times", answer_tokens=3),
        )

    whole = run(short("whole"))
    assert whole.after is not None
    assert whole.before is not None
    assert whole.after < whole.before - 0.05
    run(short("again"))
    shutil.rmtree(folder / "again" / "checkpoints" / "step-00000004")
    run(short("again", resume=True))
    exports = [load_file(folder / name / "export" / "model.safetensors") for name in ("whole", "again")]
    for name, weight in exports[0].items():
        assert torch.equal(weight, exports[1][name]), name
    adapter = load_file(folder / "whole" / "export-adapter" / "adapter_model.safetensors")
    base, _ = load(settings(folder).model)
    for name, layer in quantised_layers(base).items():
        stem = f"base_model.model.{name}"
        learned = adapter[f"{stem}.lora_B.weight"].double() @ adapter[f"{stem}.lora_A.weight"].double()
        assert learned.abs().max() > 1e-4
        want = decode_nf4(layer.weight).double() + 2 * learned
        torch.testing.assert_close(exports[0][f"{name}.weight"].double(), want, rtol=1e-5, atol=1e-6)
    # Another precision of the base is another run.
    other = dataclasses.replace(short("again", resume=True), model=ModelConfig(path=str(folder / "model")))
    with pytest.raises(CheckpointError, match="quantize"):
        run(other)


def test_weights_that_are_decoded_wrongly_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load(settings(folder).model)
    require_true_decoding(model)
    right = quantised.decode_nf4
    monkeypatch.setattr(quantised, "decode_nf4", lambda weight: 1.1 * right(weight))
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj \(64 x 64\) with weights 9% off"):
        require_true_decoding(model)


def test_the_packed_weights_count_in_the_work_of_a_step(folder: Path) -> None:
    window = [{"input_ids": torch.zeros(1, 8), "total_tokens": 8}]
    counts = {"total_tokens": 8.0, "effective_tokens": 4.0, "seconds": 1.0}
    plain = job_of(folder, lora=LORA, model=ModelConfig(path=str(folder / "model"))).engine.model
    packed = job_of(folder, lora=LORA, model=settings(folder).model).engine.model
    work = [
        StepCost(model, torch.device("cpu"), peak_tflops=1.0).measure(window, **counts)["mfu"]
        for model in (plain, packed)
    ]
    assert work[0] == work[1] > 0


def test_what_can_not_be_in_4_bits_is_refused() -> None:
    nf4 = ModelConfig(quantize="nf4")
    with pytest.raises(ConfigError, match="'nf4' without adapters"):
        SftConfig(model=nf4)
    with pytest.raises(ConfigError, match=r"'nf4' with distributed\.strategy 'fsdp'"):
        SftConfig(model=nf4, lora=LORA, distributed=DistributedConfig(strategy="fsdp"))
    with pytest.raises(ConfigError, match="'nf4' with float64"):
        SftConfig(model=ModelConfig(quantize="nf4", dtype="float64"), lora=LORA)
    with pytest.raises(ConfigError, match=r"model\.quantize is 'int4'"):
        ModelConfig(quantize="int4")  # type: ignore[arg-type]
