"""A Trainer in one process, against the objective of each window by its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainerCallback

from tests.integrations import hf_toy as toy
from tokennorm.errors import ConfigError, DataError, EmptyWindowError, KitUsageError, PatchError
from tokennorm.integrations.hf import TokenLosses, token_normalised
from tokennorm.kit import remove_chunked_token_loss_patch

# Four windows at 3 accumulation steps: one with an empty micro-batch (11), one with a very long sample (10), a
# short last one.
ORDER = (0, 1, 2, 3, 11, 6, 7, 10, 5, 8, 9)
FLOOR = {torch.float64: 1e-13, torch.float32: 2e-6}

Exact: Any = token_normalised(Trainer)


def trainer(cls: Any = Exact, model: Any = None, *, order: Any = ORDER, lr: float = 0.0, **options: Any) -> Any:
    model = toy.dense() if model is None else model
    collator = options.pop("data_collator", toy.pad)
    given = {
        name: options.pop(name)
        for name in ("eval_dataset", "callbacks", "compute_loss_func", "compute_metrics")
        if name in options
    }
    return cls(
        model=model,
        args=toy.arguments(**options),
        train_dataset=toy.rows(order),
        data_collator=collator,
        optimizers=(toy.Recording(model, lr), None),
        **given,
    )


def gradients(run: Any) -> list[Tensor]:
    return run.optimizer.optimizer.seen


def logged(run: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in run.state.log_history if name in entry]


def truths(model: Any, order: Any = ORDER, per_window: int = 3, **options: Any) -> list[toy.Truth]:
    return [toy.truth(model, window, **options) for window in toy.windows(order, per_window)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("make", [toy.dense, toy.mixture])
def test_gradient_and_logs_are_those_of_the_whole_window(make: Any, dtype: torch.dtype) -> None:
    # transformers computes router losses in float32.
    floor = FLOOR[torch.float32 if make is toy.mixture else dtype]
    run = trainer(model=make(dtype))
    output = run.train()
    expected = truths(make())
    assert len(gradients(run)) == 4
    for got, want in zip(gradients(run), expected, strict=True):
        assert toy.error(got, want.gradient) < floor
    assert logged(run) == pytest.approx([want.loss for want in expected], rel=FLOOR[dtype])
    assert logged(run, "grad_norm") == pytest.approx([w.gradient.norm().item() for w in expected], rel=1e-6)
    assert logged(run, "supervised_tokens") == [want.tokens for want in expected]
    if make is toy.mixture:
        assert logged(run, "router_loss") == pytest.approx([w.router for w in expected], rel=floor)
    else:
        assert not logged(run, "router_loss")
    tokens = sum(want.tokens for want in expected)
    mean = sum(want.loss * want.tokens for want in expected) / tokens
    assert output.training_loss == pytest.approx(mean, rel=FLOOR[dtype])
    assert logged(run, "train_loss") == [output.training_loss]


def test_the_trainer_itself_is_wrong_where_there_is_a_router_loss() -> None:
    """Or the test above could not fail."""
    run = trainer(Trainer, toy.mixture())
    run.train()
    errors = [
        toy.error(got, want.gradient) for got, want in zip(gradients(run), truths(toy.mixture()), strict=True)
    ]
    assert min(errors) > 0.1


def test_every_step_starts_from_the_exact_one() -> None:
    """With a learning rate: the weights after the run."""
    run = trainer(lr=0.1, lr_scheduler_type="constant")
    run.train()
    model = toy.dense()
    for window in toy.windows(ORDER, 3):
        step = toy.truth(model, window).gradient
        with torch.no_grad():
            for parameter, part in zip(
                model.parameters(), step.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter -= 0.1 * part.view_as(parameter)
    assert toy.error(toy.flat(run.model.parameters()), toy.flat(model.parameters())) < 1e-13


def test_clipping_comes_after_the_exact_gradient() -> None:
    run = trainer(max_grad_norm=3.0)
    run.train()
    for got, want in zip(gradients(run), truths(toy.dense()), strict=True):
        norm = want.gradient.norm()
        assert toy.error(got, want.gradient * min(1.0, 3.0 / norm)) < 1e-6
    assert logged(run, "grad_norm") == pytest.approx([w.gradient.norm().item() for w in truths(toy.dense())])


def test_the_logged_loss_of_several_steps_is_a_sum_over_a_count() -> None:
    run = trainer(logging_steps=3)
    run.train()
    parts = truths(toy.dense())
    first = sum(w.loss * w.tokens for w in parts[:3]) / sum(w.tokens for w in parts[:3])
    assert logged(run)[0] == pytest.approx(first, rel=1e-12)
    assert first != pytest.approx(sum(w.loss for w in parts[:3]) / 3, rel=1e-3)


def test_a_loss_scaler_is_undone_before_clipping_as_ever() -> None:
    """As Accelerate runs fp16: unscale, clip, step."""
    run = trainer(max_grad_norm=3.0)
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.accelerator.native_amp = True
    run.accelerator.state._mixed_precision = "fp16"
    try:
        run.train()
    finally:
        run.accelerator.state._mixed_precision = "no"
    for got, want in zip(gradients(run), truths(toy.dense()), strict=True):
        assert toy.error(got, want.gradient * min(1.0, 3.0 / want.gradient.norm())) < 1e-6


def test_bfloat16_autocast() -> None:
    run = trainer(model=toy.dense(torch.float32), bf16=True)
    run.train()
    for got, want in zip(gradients(run), truths(toy.dense()), strict=True):
        assert toy.error(got, want.gradient) < 2e-2


def test_flattened_micro_batches_recomputed_in_backward() -> None:
    run = trainer(
        per_device_train_batch_size=2,
        data_collator=toy.flatten,
        gradient_accumulation_steps=2,
        activation_checkpointing=True,
    )
    run.train()
    for got, want in zip(gradients(run), truths(toy.dense(), per_window=4), strict=True):
        assert toy.error(got, want.gradient) < 1e-13


def test_label_smoothing() -> None:
    run = trainer(label_smoothing_factor=0.1)
    run.train()
    expected = truths(toy.dense(), smoothing=0.1)
    for got, want in zip(gradients(run), expected, strict=True):
        assert toy.error(got, want.gradient) < 1e-13
    assert logged(run) == pytest.approx([want.loss for want in expected], rel=1e-12)
    with pytest.raises(ConfigError, match="router loss"):
        trainer(model=toy.mixture(), label_smoothing_factor=0.1).train()


def test_a_window_without_supervised_tokens_is_an_error() -> None:
    run = trainer(order=(0, 1, 2, 11, 12))
    with pytest.raises(EmptyWindowError, match="dataset"):
        run.train()
    assert len(gradients(run)) == 1


def test_a_batch_without_labels_is_an_error() -> None:
    run = trainer(data_collator=lambda samples: {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    with pytest.raises(DataError, match="labels"):
        run.train()


class StopsInsideAWindow(TrainerCallback):
    """Ends the first epoch after one micro-batch of its second window."""

    done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1 and not self.done:
            self.done = control.should_epoch_stop = True


def test_what_a_stopped_epoch_leaves_is_in_no_other_window() -> None:
    run = trainer(callbacks=[StopsInsideAWindow()], num_train_epochs=2)
    run.train()
    expected = truths(toy.dense())
    assert len(gradients(run)) == 5
    for got, want in zip(gradients(run), [expected[0], *expected], strict=True):
        assert toy.error(got, want.gradient) < 1e-13


def test_the_model_still_has_its_own_loss_for_others() -> None:
    run = trainer()
    run.train()
    batch = toy.pad(toy.rows([0, 1]))
    outputs = run.model(**batch)
    assert outputs.loss.dim() == 0
    assert torch.equal(outputs.logits, toy.dense()(**batch).logits)


def test_resumed_from_a_checkpoint(tmp_path: Any) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path), "lr": 0.1}
    whole = trainer(**options)
    whole.train()
    rest = trainer(**options)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert rest.state.global_step == 4
    assert len(gradients(rest)) == 2
    assert torch.equal(toy.flat(rest.model.parameters()), toy.flat(whole.model.parameters()))
    assert logged(rest) == logged(whole)


def test_a_new_model_for_each_run() -> None:
    run = Exact(
        model_init=lambda: toy.dense(), args=toy.arguments(), train_dataset=toy.rows(ORDER), data_collator=toy.pad
    )
    for _ in range(2):
        run.train()
    want = truths(toy.dense())[0]
    assert logged(run)[0] == pytest.approx(want.loss, rel=1e-12)
    assert logged(run, "grad_norm")[0] == pytest.approx(want.gradient.norm().item(), rel=1e-6)


# Subclasses.


class Watching(Trainer):
    """An override that leaves the loss alone."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.seen = getattr(self, "seen", [])
        loss, outputs = super().compute_loss(
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        self.seen.append((int(num_items_in_batch), outputs["logits"].shape[1]))
        return (loss, outputs) if return_outputs else loss


def test_a_subclass_that_leaves_the_loss_alone_works() -> None:
    run = trainer(token_normalised(Watching))
    run.train()
    for got, want in zip(gradients(run), truths(toy.dense()), strict=True):
        assert toy.error(got, want.gradient) < 1e-13
    assert len(run.seen) == len(ORDER)
    assert run.seen[0] == (truths(toy.dense())[0].tokens, len(toy.POOL[0].input_ids))
    with pytest.raises(ConfigError, match="router loss"):
        trainer(token_normalised(Watching), toy.mixture()).train()


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        return model(**inputs).loss


class Scaled(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class ScaledInPlace(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        with torch.no_grad():
            loss.mul_(2)
        return loss


class Twice(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        super().compute_loss(*args, **kwargs)
        return super().compute_loss(*args, **kwargs)


class MasksMore(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs["labels"][:, -1] = -100
        return super().compute_loss(model, {**inputs}, *args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (OwnLoss, "OwnLoss.compute_loss called super"),
        (Scaled, "Scaled.compute_loss"),
        (ScaledInPlace, "ScaledInPlace.compute_loss"),
        (Twice, "2 times"),
        (MasksMore, "announced"),
        (OwnStep, "announced"),
    ],
)
def test_a_subclass_that_changes_the_loss_is_refused_before_the_first_step(cls: Any, reason: str) -> None:
    run = trainer(token_normalised(cls))
    with pytest.raises((ConfigError, KitUsageError), match=reason):
        run.train()
    assert not gradients(run)


class OwnTokenLosses(token_normalised(Trainer)):
    """Squared distance of the probability of each target, later ones counting more."""

    def token_losses(self, model: Any, inputs: Any) -> TokenLosses:
        return TokenLosses(
            losses=squared(model, inputs), metrics={"ones": torch.ones_like(inputs["labels"])[:, 1:]}
        )

    def token_weights(self, inputs: Any) -> Tensor:
        return position_weights(inputs)


def squared(model: Any, inputs: Any) -> Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    targets = inputs["labels"][:, 1:]
    chosen = logits.softmax(-1).gather(2, targets.clamp_min(0)[..., None])[..., 0]
    return torch.where(targets == -100, 0.0, (1 - chosen).square())


def position_weights(inputs: Any) -> Tensor:
    targets = inputs["labels"][:, 1:]
    return torch.where(targets == -100, 0.0, torch.arange(1, targets.shape[1] + 1, dtype=torch.float64))


def test_a_loss_of_ones_own() -> None:
    run = trainer(OwnTokenLosses, eval_dataset=toy.rows(ORDER), per_device_eval_batch_size=4)
    run.train()
    for got, window in zip(gradients(run), toy.windows(ORDER, 3), strict=True):
        model = toy.dense()
        weights = sum(position_weights(batch).sum() for batch in window)
        (sum((squared(model, batch) * position_weights(batch)).sum() for batch in window) / weights).backward()
        assert toy.error(got, toy.flat(p.grad for p in model.parameters())) < 1e-13
    assert logged(run, "ones") == pytest.approx([1.0] * 4)
    with torch.no_grad():
        sums = [
            ((squared(toy.dense(), b) * position_weights(b)).sum(), position_weights(b).sum())
            for window in toy.windows(ORDER, 3)
            for b in window
        ]
    metrics = run.evaluate()
    assert metrics["eval_loss"] == pytest.approx(
        float(sum(n for n, _ in sums) / sum(d for _, d in sums)), rel=1e-12
    )
    assert metrics["eval_ones"] == pytest.approx(1.0)


class OnlyLateTokens(token_normalised(Trainer)):
    """The model's own losses, of some of its tokens."""

    def token_losses(self, model: Any, inputs: Any) -> TokenLosses:
        part = super().token_losses(model, inputs)
        return TokenLosses(losses=3 * part.losses, outputs=part.outputs)

    def token_weights(self, inputs: Any) -> Tensor:
        weights = super().token_weights(inputs)
        return weights & (torch.arange(weights.shape[1]) > 1)


def test_other_tokens_of_the_models_own_losses() -> None:
    run = trainer(OnlyLateTokens)
    run.train()
    for got, window in zip(gradients(run), toy.windows(ORDER, 3), strict=True):
        late = [
            {**batch, "labels": batch["labels"].index_fill(1, torch.tensor([0, 1, 2]), -100)} for batch in window
        ]
        # Llama's norms round to float32, differently at three times the scale.
        assert toy.error(got, 3 * toy.truth(toy.dense(), late).gradient) < 1e-6


class CallsByName(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        Trainer.__init__(self, *args, **kwargs)


def test_a_constructor_that_goes_past_the_exact_one_is_noticed() -> None:
    with pytest.raises(ConfigError, match=r"super\(\).__init__"):
        trainer(token_normalised(CallsByName)).train()


# Evaluation.


def mean_loss(order: Any, smoothing: float = 0.0, model: Any = None) -> float:
    return toy.truth(model or toy.dense(), next(toy.windows(order, len(order))), smoothing=smoothing).loss


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_does_not_depend_on_the_batches(batch_size: int) -> None:
    options = {"per_device_eval_batch_size": batch_size, "eval_dataset": toy.rows(ORDER)}
    metrics = trainer(**options).evaluate()
    assert metrics["eval_loss"] == pytest.approx(mean_loss(ORDER), rel=1e-12)
    stock = trainer(Trainer, **options).evaluate()
    assert not abs(stock["eval_loss"] / mean_loss(ORDER) - 1) < 1e-3


def test_evaluation_of_a_mixture_keeps_the_router_loss_apart() -> None:
    metrics = trainer(model=toy.mixture(), eval_dataset=toy.rows(ORDER), per_device_eval_batch_size=1).evaluate()
    want = toy.truth(toy.mixture(), next(toy.windows(ORDER, len(ORDER))))
    assert metrics["eval_loss"] == pytest.approx(want.loss, rel=1e-12)
    assert metrics["eval_router_loss"] == pytest.approx(want.router, rel=1e-6)


def test_evaluation_with_metrics_sees_the_logits() -> None:
    shapes = []

    def count(prediction: Any) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {"rows": float(len(prediction.predictions))}

    run = trainer(
        eval_dataset={"one": toy.rows(ORDER), "two": toy.rows((3, 4))},
        compute_metrics=count,
        per_device_eval_batch_size=4,
        label_smoothing_factor=0.1,
    )
    metrics = run.evaluate()
    assert metrics["eval_one_loss"] == pytest.approx(mean_loss(ORDER, smoothing=0.1), rel=1e-12)
    assert metrics["eval_two_loss"] == pytest.approx(mean_loss((3, 4), smoothing=0.1), rel=1e-12)
    assert metrics["eval_one_rows"] == len(ORDER)
    assert shapes[0][0] == (*shapes[0][1], toy.VOCABULARY)
    predicted = run.predict(toy.rows(ORDER))
    assert predicted.metrics["test_loss"] == pytest.approx(mean_loss(ORDER, smoothing=0.1), rel=1e-12)


def test_evaluation_during_training() -> None:
    run = trainer(eval_dataset=toy.rows((1, 5, 9)), eval_strategy="steps", eval_steps=2, eval_on_start=True)
    run.train()
    assert logged(run, "eval_loss") == pytest.approx([mean_loss((1, 5, 9))] * 3, rel=1e-12)
    assert toy.error(gradients(run)[3], truths(toy.dense())[3].gradient) < 1e-13


class OwnPrediction(Trainer):
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return model(**inputs).loss, None, None


def test_a_prediction_step_with_its_own_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"OwnPrediction\.prediction_step"):
        trainer(token_normalised(OwnPrediction), eval_dataset=toy.rows(ORDER)).evaluate()


# Models.


class NoLossFunction(torch.nn.Module):
    """A model of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(toy.VOCABULARY, 8)
        self.head = torch.nn.Linear(8, toy.VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        logits = self.head(self.embed(input_ids))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def test_a_model_whose_token_losses_cannot_be_had_is_refused() -> None:
    with pytest.raises(PatchError, match="override token_losses"):
        trainer(model=NoLossFunction())


def test_a_patch_that_somebody_removed_is_noticed() -> None:
    run = trainer()
    remove_chunked_token_loss_patch(run.model)
    with pytest.raises(PatchError, match="removed the patch"):
        run.train()


def test_returned_logits_that_are_not_those_of_the_loss_are_refused() -> None:
    run = trainer(label_smoothing_factor=0.1)

    def double(module: Any, args: Any, outputs: Any) -> None:
        if "logits" in outputs:
            outputs["logits"] = 2 * outputs["logits"]

    run.model.register_forward_hook(double)
    with pytest.raises(PatchError, match="logits"):
        run.train()
