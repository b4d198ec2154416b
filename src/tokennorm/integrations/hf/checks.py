"""What is refused, before anything runs: combinations that were not shown to be exact, each with its reason."""

from __future__ import annotations

from typing import Any

from tokennorm.errors import ConfigError

__all__ = ["refuse_unsized", "refuse_unsupported"]

_PLAIN_FIX = (
    "use DistributedDataParallel (torchrun or accelerate launch without a plugin), or a loop with the kit."
)


def refuse_unsupported(trainer: Any) -> None:
    """Refuse a trainer whose gradient, clipping or evaluation could not be shown to be exact.

    Raises:
        ConfigError: with what was found, why it is refused, and what to do.
    """
    _refuse_losses(trainer)
    _refuse_parallelism(trainer)
    _refuse_models(trainer)
    _refuse_arguments(trainer.args)
    if trainer.args.accelerator_config.dispatch_batches is False and not trainer.args.dataloader_drop_last:
        datasets = trainer.eval_dataset
        for dataset in datasets.values() if isinstance(datasets, dict) else [datasets]:
            refuse_unsized(trainer.accelerator, dataset)


def refuse_unsized(accelerator: Any, dataset: Any) -> None:
    """Refuse an evaluation dataset of unknown length whose samples are dealt out to several ranks.

    Raises:
        ConfigError: that is the case.
    """
    if dataset is None or accelerator.num_processes == 1 or hasattr(dataset, "__len__"):
        return
    raise ConfigError(
        f"the evaluation dataset ({type(dataset).__name__}) has no length, on {accelerator.num_processes} ranks",
        why="the data loader repeats samples to fill its last batches, and only the length tells which.",
        fix="evaluate on a dataset with a length, in one process, or with dispatch_batches=True.",
    )


def _refuse_losses(trainer: Any) -> None:
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func was given",
            why="it returns one number for a micro-batch; whether that is a sum of token losses can't be told.",
            fix="override token_losses instead (see token_normalised): it returns the loss of every token.",
        )


def _refuse_parallelism(trainer: Any) -> None:
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    reasons = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "a model sharded at load time (DistributedConfig)": getattr(
            trainer, "is_distributed_loading_by_transformers", False
        ),
        "a model split over several devices (device_map)": trainer.is_model_parallel,
        "torch.nn.DataParallel (several GPUs in one process)": trainer.args.n_gpu > 1,
        f"the distributed type {kind}": kind not in ("NO", "DEEPSPEED", "FSDP") and not kind.startswith("MULTI_"),
    }
    parallelism = getattr(accelerator, "parallelism_config", None)
    for axis in ("tp", "cp", "sp"):
        reasons[f"{axis.upper()} (parallelism_config)"] = bool(getattr(parallelism, f"{axis}_enabled", False))
    for name, found in reasons.items():
        if found:
            raise ConfigError(
                f"the trainer uses {name}",
                why="what it divides gradients and counts by was not shown to be what is undone here.",
                fix=_PLAIN_FIX,
            )
    steps = accelerator.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"the Accelerator divides each loss by {steps} accumulation steps",
            why="the Trainer counts the window itself; a second division makes gradients too small.",
            fix="set gradient_accumulation_steps in the TrainingArguments only.",
        )


def _refuse_models(trainer: Any) -> None:
    model = trainer.model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ConfigError(
            f"{type(model).__name__} is an encoder-decoder model",
            why="its labels are not shifted, and its loss is computed by code that was not tested.",
            fix="token_normalised is for causal language models.",
        )
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ConfigError(
                f"the PEFT adapter {name!r} ({config.peft_type}) puts virtual tokens in front of the batch",
                why="the number of supervised targets is then another than that of the batch's labels.",
                fix="use LoRA or another adapter that leaves the sequence as it is.",
            )


def _refuse_arguments(args: Any) -> None:
    optimizer = str(getattr(args.optim, "value", args.optim))
    if args.torch_compile:
        raise ConfigError(
            "torch_compile=True",
            why="it compiles the whole model, whose head answers with losses here, and nothing would be compiled.",
            fix="compile the base model yourself: model.model = torch.compile(model.model).",
        )
    if args.use_liger_kernel:
        raise ConfigError(
            "use_liger_kernel=True",
            why="it replaces the model's forward, where the losses of the tokens come from.",
            fix="leave it off: the token losses never hold all logits either.",
        )
    if "lomo" in optimizer or "layerwise" in optimizer:
        raise ConfigError(
            f"optim={optimizer!r}",
            why="it steps inside backward, micro-batch by micro-batch, so there is no gradient of a window.",
            fix="use an optimizer that steps once per window.",
        )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ConfigError(
            f"average_tokens_across_devices=False on {args.world_size} ranks",
            why="that asks for a mean of the ranks' own means, in which tokens count unequally.",
            fix="leave it at True, its default.",
        )
