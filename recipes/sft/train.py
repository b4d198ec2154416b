"""The wiring of a fine-tuning run: model and data into the engine, and out of it a trained folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokennorm.data import Batch, Prefetch, StreamWindows, require_isolated_documents
from tokennorm.engine import (
    AutocastObjective,
    CausalLMObjective,
    CheckpointStore,
    Engine,
    EvalReport,
    ProgressPrinter,
    RefusedFolder,
    RunFolder,
    Runtime,
    autocast_dtype,
    broadcast_from_main,
    build_optimizer,
    build_scaler,
    build_scheduler,
    check_ranks_agree,
    distributed_session,
    evaluate,
    export_pretrained,
    fixed_divisor,
    frozen_fingerprint,
    is_sharded,
    precision_notes,
    require_checkpoint,
    reshard,
    resume_run,
    seed_everything,
    train,
    unwrap_model,
)
from tokennorm.recipes.common.guard import build_kit
from tokennorm.recipes.common.quiet import quiet_transformers
from tokennorm.recipes.sft.adapters import export_lora
from tokennorm.recipes.sft.attention import choose_attention
from tokennorm.recipes.sft.config import SftConfig
from tokennorm.recipes.sft.datasets import Datasets
from tokennorm.recipes.sft.identity import run_identity
from tokennorm.recipes.sft.modelling import adapt, load, place
from tokennorm.recipes.sft.streams import StreamData, stream_report
from tokennorm.recipes.sft.template_date import hold_date
from tokennorm.recipes.sft.windows import RunWindows, eval_batches, load_data, pad_id

__all__ = ["SftJob", "SftResult", "prepare", "run"]


@dataclass(frozen=True, kw_only=True)
class SftJob:
    """A run that is ready to start.

    Attributes:
        engine: model, optimizer, schedule and accounting.
        windows: this rank's windows.
        total_steps: optimizer steps of the run.
        tokenizer: of the model.
        datasets: the encoded chats, or the sources that are streamed.
        held_out: this rank's evaluation batches.
        identity: what a checkpoint of this run must have in common with it.
        frozen: fingerprint of the weights that don't learn, which checkpoints leave out.
    """

    engine: Engine
    windows: RunWindows | StreamWindows
    total_steps: int
    tokenizer: Any
    datasets: Datasets | StreamData
    held_out: Sequence[Batch]
    identity: dict[str, Any]
    frozen: str | None = None

    def evaluate(self) -> EvalReport:
        """Evaluate on all ranks."""
        engine = self.engine
        return evaluate(engine.model, engine.objective, self.held_out, device=engine.device, group=engine.dp_group)


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """What a run left: its folder, and the held-out loss (nats per token) before and after."""

    folder: Path
    before: float | None
    after: float | None
    steps: int


def run(config: SftConfig) -> SftResult:
    """Fine-tune a model as configured; under torchrun, call it on every rank."""
    with distributed_session(config.distributed) as runtime:
        progress = ProgressPrinter(0, enabled=runtime.is_main)
        folder = broadcast_from_main(config.run.dir or time.strftime("runs/sft-%Y%m%d-%H%M%S"), runtime)
        with RunFolder(folder, runtime=runtime, resume=config.run.goes_on) as run_folder:
            return _run_in(run_folder, config, runtime, progress)


def _run_in(run_folder: RunFolder, config: SftConfig, runtime: Runtime, progress: ProgressPrinter) -> SftResult:
    if config.run.resume_from is not None:
        require_checkpoint(config.run.resume_from, runtime)
    job = prepare(config, runtime, say=progress.say)
    progress.total_steps = job.total_steps
    store = CheckpointStore(
        run_folder.checkpoints,
        identity=job.identity,
        runtime=runtime,
        keep_last=config.loop.keep_last,
        frozen=job.frozen,
        allow_changes=config.run.allow_changes,
    )
    if config.run.goes_on:
        resume_run(job.engine, job.windows, store, run_folder, checkpoint=config.run.resume_from, say=progress.say)
    facts = {"total_steps": job.total_steps, "data": job.identity["data"]}
    run_folder.describe(config, facts={**facts, **({"changes": store.changes} if store.changes else {})})
    job.engine.on_refused = RefusedFolder(
        run_folder.path / "refused", runtime=runtime, limit=config.guard.files, decode=job.tokenizer.decode
    )
    _answer(job, config, runtime, progress, "before")
    start = time.monotonic()
    depth = config.data.prefetch
    windows = Prefetch(job.windows, depth) if depth else job.windows
    report = train(
        job.engine,
        windows,
        total_steps=job.total_steps,
        config=config.loop,
        evaluate=job.evaluate if job.datasets.held_out is not None else None,
        run=run_folder,
        checkpoints=store if config.run.checkpoints else None,
        progress=progress,
    )
    progress.say(
        f"trained {report.steps} steps on {report.total_tokens:,} tokens ({report.effective_tokens:,} "
        f"supervised) in {time.monotonic() - start:.0f} s"
    )
    if isinstance(job.windows, StreamWindows):
        for line in stream_report(job.windows, windows.state_dict()):
            progress.say(line)
    before, after = (None if one is None else one.loss for one in (report.before, report.after))
    if before is not None and after is not None:
        progress.say(f"held-out loss {before:.4f} -> {after:.4f}  ({after - before:+.4f} nats per token)")
    _answer(job, config, runtime, progress, "after")
    if config.run.export:
        _export(job, config, run_folder, runtime, progress)
    return SftResult(folder=run_folder.path, before=before, after=after, steps=job.engine.step)


def prepare(config: SftConfig, runtime: Runtime, *, say: Callable[[str], None] = lambda _: None) -> SftJob:
    """Load, encode, patch and wrap; nothing is trained yet.

    Raises:
        TokenNormError: model, data and configuration don't go together, or ranks differ in them.
    """
    seed_everything(config.train.seed + runtime.rank)
    model, tokenizer = load(config.model)
    config = hold_date(config, tokenizer, runtime, say)
    data = load_data(config, tokenizer, model, runtime, say=say)
    datasets, total_steps = data.datasets, data.total_steps
    kit = build_kit(config.guard, runtime, empty_window=config.train.empty_window)
    objective = CausalLMObjective(groups=datasets.groups)
    choose_attention(model, config, runtime.device, say=say)
    if config.data.packing:
        require_isolated_documents(
            model, batch_size=config.data.micro_batch_size, forward_options=objective.model_kwargs
        )
    model = adapt(model, config)
    model = kit.apply_chunked_token_loss_patch(model, chunk_size=config.model.chunk_size)
    precision = autocast_dtype(config.model.autocast)
    identity = run_identity(config, data)
    frozen = frozen_fingerprint(model)
    check_ranks_agree({**identity, "torch": torch.__version__, "frozen": frozen}, runtime)
    wrapped = place(model, config, runtime)
    for note in precision_notes(wrapped, precision):
        say(f"note: {note}")
    optimizer = build_optimizer(wrapped, config.optim)
    engine = Engine(
        model=wrapped,
        optimizer=optimizer,
        objective=AutocastObjective(objective, precision, runtime.device.type) if precision else objective,
        scheduler=build_scheduler(optimizer, config.optim, total_steps),
        scaler=build_scaler(precision, runtime.device.type),
        device=runtime.device,
        dp_world_size=runtime.world_size,
        dp_group=runtime.group,
        token_loss_kit=kit,
        backward_divisor=_divisor(config, runtime) if precision is torch.float16 else None,
        max_grad_norm=config.optim.max_grad_norm,
    )
    held_out: Sequence[Batch] = ()
    if datasets.held_out is not None:
        held_out = eval_batches(
            datasets.held_out,
            batch_size=config.data.eval_batch_size,
            pad_token_id=pad_id(tokenizer),
            rank=runtime.rank,
            world_size=runtime.world_size,
            groups=datasets.groups,
        )
    return SftJob(
        engine=engine,
        windows=data.windows,
        total_steps=total_steps,
        tokenizer=tokenizer,
        datasets=datasets,
        held_out=held_out,
        identity=identity,
        frozen=frozen,
    )


def _divisor(config: SftConfig, runtime: Runtime) -> float:
    data = config.data
    rows = data.micro_batch_size * data.micro_batches_per_window
    length = (data.pack_length or data.max_length) if data.packing else data.max_length
    return fixed_divisor(rows * length, runtime.world_size)


def _answer(job: SftJob, config: SftConfig, runtime: Runtime, progress: ProgressPrinter, when: str) -> None:
    # A split model answers on all ranks or on none: each forward gathers its weights from all of them.
    if config.run.question is None or not (runtime.is_main or is_sharded(job.engine.model)):
        return
    text = generate_answer(
        unwrap_model(job.engine.model), job.tokenizer, config.run.question, config.run.answer_tokens
    )
    progress.say(f"question: {config.run.question}\nanswer {when}: {text}")


def generate_answer(model: Any, tokenizer: Any, question: str, tokens: int) -> str:
    """Return the model's greedy answer to one question."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    training = model.training
    model.eval()
    try:
        ids = model.generate(
            **inputs,
            max_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=pad_id(tokenizer),
        )
    finally:
        model.train(training)
        reshard(model)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def _export(
    job: SftJob, config: SftConfig, run_folder: RunFolder, runtime: Runtime, progress: ProgressPrinter
) -> None:
    model: Any = unwrap_model(job.engine.model)
    # Training switches the cache off; who loads the export wants to generate.
    model.config.use_cache = True
    files: dict[str, Any] = {"tokenizer": job.tokenizer, "runtime": runtime}
    with quiet_transformers():
        if config.lora.rank:
            path = export_lora(model, run_folder.export, config=config.lora, base=config.model, **files)
        else:
            path = export_pretrained(model, run_folder.export, **files)
    progress.say(f"exported {path}")
