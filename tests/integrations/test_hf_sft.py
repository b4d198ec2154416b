"""TRL's SFTTrainer with its own head, against the objective of each window by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor
from transformers import set_seed
from trl import SFTTrainer

from tests.integrations import hf_toy as toy
from tokennorm.errors import ConfigError
from tokennorm.integrations.hf import token_normalised

ORDER = (0, 1, 2, 3, 11, 6, 7, 10, 5, 8, 9)
PEFT_READS_AN_OLD_NAME = "ignore:`is_gradient_checkpointing` is deprecated"

Exact: Any = token_normalised(SFTTrainer)


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


def trainer(cls: Any = Exact, model: Any = None, *, data: Any = None, **options: Any) -> Any:
    model = toy.dense(torch.float32) if model is None else model
    given = {
        name: options.pop(name)
        for name in ("peft_config", "compute_loss_func", "compute_metrics", "eval_dataset")
        if name in options
    }
    return cls(
        model=model,
        args=toy.sft_arguments(**options),
        train_dataset=Dataset.from_list(toy.rows(ORDER)) if data is None else data,
        processing_class=toy.tokenizer(),
        # With an adapter the trainable parameters are known only later.
        optimizers=(None if "peft_config" in given else toy.Recording(model), None),
        **given,
    )


def gradients(run: Any) -> list[Tensor]:
    return run.optimizer.optimizer.seen


def logged(run: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def windows(per_window: int = 3) -> list[list[dict[str, Tensor]]]:
    return list(toy.windows(ORDER, per_window))


@pytest.mark.parametrize("make", [toy.dense, toy.mixture])
def test_gradient_and_logs_are_those_of_the_whole_window(make: Any) -> None:
    run = trainer(model=make(torch.float32), activation_checkpointing=make is toy.dense)
    run.train()
    expected = [toy.truth(make(), window) for window in windows()]
    for got, want in zip(gradients(run), expected, strict=True):
        assert toy.error(got, want.gradient) < 2e-6
    assert logged(run) == pytest.approx([want.loss for want in expected], rel=1e-6)
    assert logged(run, "supervised_tokens") == [want.tokens for want in expected]
    if make is toy.mixture:
        assert logged(run, "router_loss") == pytest.approx([want.router for want in expected], rel=1e-6)
        assert logged(run, "aux_loss") == pytest.approx([want.router / 0.5 for want in expected], rel=1e-6)


def test_trl_itself_is_wrong_where_there_is_a_router_loss() -> None:
    """Or the test above could not fail: it means the router loss over micro-batches, whatever their tokens."""
    run = trainer(SFTTrainer, toy.mixture(torch.float32))
    run.train()
    for got, window in zip(gradients(run), windows(), strict=True):
        assert toy.error(got, toy.truth(toy.mixture(), window).gradient) > 0.01


def entropy_and_accuracy(batches: list[dict[str, Tensor]]) -> tuple[float, float]:
    entropy, right, tokens = 0.0, 0, 0
    for batch in batches:
        with torch.no_grad():
            logits = toy.dense()(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        log_p = logits[targets != -100].log_softmax(-1)
        entropy -= float((log_p.exp() * log_p).sum())
        right += int((log_p.argmax(-1) == targets[targets != -100]).sum())
        tokens += int((targets != -100).sum())
    return entropy / tokens, right / tokens


def test_metrics_of_trl_are_means_over_tokens() -> None:
    run = trainer(logging_steps=2)
    run.train()
    assert len(logged(run)) == 2
    for place, per_log in enumerate((windows()[:2], windows()[2:])):
        entropy, accuracy = entropy_and_accuracy([batch for window in per_log for batch in window])
        assert logged(run, "entropy")[place] == pytest.approx(entropy, rel=1e-5)
        assert logged(run, "mean_token_accuracy")[place] == pytest.approx(accuracy, rel=1e-6)
        total = sum(toy.truth(toy.dense(), w).loss * toy.truth(toy.dense(), w).tokens for w in per_log)
        assert logged(run)[place] == pytest.approx(total / logged(run, "supervised_tokens")[place], rel=1e-6)
    lengths = [len(toy.POOL[number].input_ids) for number in ORDER]
    assert logged(run, "num_tokens") == [sum(lengths[:6]), sum(lengths)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_does_not_depend_on_the_batches(batch_size: int) -> None:
    data = Dataset.from_list(toy.rows(ORDER))
    metrics = trainer(eval_dataset=data, per_device_eval_batch_size=batch_size).evaluate()
    everything = [batch for window in windows() for batch in window]
    assert metrics["eval_loss"] == pytest.approx(toy.truth(toy.dense(), everything).loss, rel=1e-6)
    entropy, accuracy = entropy_and_accuracy(everything)
    assert metrics["eval_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["eval_mean_token_accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_evaluation_with_metrics_sees_the_logits() -> None:
    shapes = []

    def look(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {}

    run = trainer(
        eval_dataset=Dataset.from_list(toy.rows(ORDER)), per_device_eval_batch_size=4, compute_metrics=look
    )
    metrics = run.evaluate()
    everything = [batch for window in windows() for batch in window]
    assert metrics["eval_loss"] == pytest.approx(toy.truth(toy.dense(), everything).loss, rel=1e-6)
    assert shapes == [(len(ORDER), len(toy.POOL[10].input_ids), toy.VOCABULARY)]


def dft(batches: list[dict[str, Tensor]]) -> Tensor:
    """Each token's loss times its own probability, detached (arXiv:2508.05629)."""
    model, total, tokens = toy.dense(), torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:].flatten()
        losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")[targets != -100]
        total = total + (losses * (-losses).exp().detach()).sum()
        tokens += len(losses)
    (total / tokens).backward()
    return toy.flat(parameter.grad for parameter in model.parameters())


def test_dynamic_fine_tuning() -> None:
    run = trainer(loss_type="dft")
    run.train()
    for got, window in zip(gradients(run), windows(), strict=True):
        assert toy.error(got, dft(window)) < 2e-6


@pytest.mark.filterwarnings("ignore:Padding-free training")
@pytest.mark.parametrize("packing", [False, True])
def test_packed_and_padding_free(packing: bool) -> None:
    """Through TRL's own preparation: prompts are masked, rows without a supervised token dropped."""
    rows = toy.rows([number for number in ORDER if number != 11])
    data = Dataset.from_list(
        [
            {
                "input_ids": row["input_ids"],
                "completion_mask": [int(label != -100) for label in row["labels"]],
            }
            for row in rows
        ]
    )
    options: dict[str, Any] = {"packing": True, "max_length": 60} if packing else {"padding_free": True}
    run = trainer(
        data=data,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=20,
        completion_only_loss=True,
        dataset_kwargs=None,
        **{"max_length": None, **options},
    )
    run.train()
    order = [number for number in ORDER if number != 11]
    # A document's first token is predicted by nothing; TRL's rows count the same tokens.
    (want,) = (toy.truth(toy.dense(), window) for window in toy.windows(order, len(order)))
    (got,) = gradients(run)
    assert toy.error(got, want.gradient) < 2e-6
    assert logged(run, "supervised_tokens") == [want.tokens]


class RecordingAdapters(token_normalised(SFTTrainer)):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = toy.Recording(self.model)
        self.optimizer.param_groups[0]["params"] = [p for p in self.model.parameters() if p.requires_grad]
        return self.optimizer


def lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


@pytest.mark.filterwarnings(PEFT_READS_AN_OLD_NAME)
def test_adapters() -> None:
    run = trainer(RecordingAdapters, peft_config=lora(), seed=7)
    run.train()
    for got, window in zip(gradients(run), windows(), strict=True):
        assert toy.error(got, adapter_truth(window)) < 2e-6


def adapter_truth(window: list[dict[str, Tensor]]) -> Tensor:
    """The same adapters (the trainer seeds them), in float64."""
    base = toy.dense(torch.float32)
    set_seed(7)
    model = get_peft_model(base, lora()).double().train()
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in window:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:].flatten()
        total = total + F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        tokens += int((targets != -100).sum())
    (total / tokens).backward()
    return toy.flat(p.grad for p in model.parameters() if p.requires_grad)


@pytest.mark.filterwarnings(
    "ignore:`label_smoothing_factor` is deprecated",
    "ignore:`compute_loss_func` is deprecated",
    PEFT_READS_AN_OLD_NAME,
)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"compute_loss_func": lambda *args, **kwargs: None}, "compute_loss_func"),
        (
            {"peft_config": PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2)},
            "virtual tokens",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trainer(**options)
