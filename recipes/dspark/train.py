"""The wiring of a drafter's training: target, answers and drafter into the engine, and out of it a folder."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokennorm.data import Batch, ChatDataset, WindowLoader, check_max_length, require_isolated_documents
from tokennorm.draft import (
    DraftModel,
    HiddenStateCache,
    HiddenStateCapture,
    export_drafter,
    raise_pending_slot_errors,
    target_weights,
)
from tokennorm.engine import (
    CheckpointStore,
    Engine,
    EvalReport,
    ProgressPrinter,
    RefusedFolder,
    RunFolder,
    Runtime,
    all_ranks_or_none,
    build_optimizer,
    build_scheduler,
    check_ranks_agree,
    distributed_session,
    evaluate,
    require_checkpoint,
    resume_run,
    seed_everything,
    train,
    wrap_ddp,
)
from tokennorm.recipes.common.guard import build_kit
from tokennorm.recipes.dspark.build import build_drafter, load_answers, load_target
from tokennorm.recipes.dspark.config import DSparkConfig
from tokennorm.recipes.dspark.folder import StageFolder
from tokennorm.recipes.dspark.identity import describe_drafter, run_identity
from tokennorm.recipes.dspark.objective import DSparkObjective, refused_record
from tokennorm.recipes.dspark.states import cached_states
from tokennorm.recipes.dspark.windows import BlockMaker, DraftWindows, held_out_batches, window_flops

__all__ = ["DSparkJob", "DSparkResult", "prepare", "run"]

# What the step's line shows besides the loss.
SHOWN = ("tau", "accept_rate")


@dataclass(frozen=True, kw_only=True)
class DSparkJob:
    """A training that is ready to start.

    Attributes:
        engine: drafter, optimizer, schedule and accounting.
        drafter: inside the engine's wrapper.
        tokenizer: of the target.
        windows: this rank's windows.
        total_steps: optimizer steps of the run.
        documents: prompts with the target's answers.
        held_out: this rank's evaluation batches; empty without held-out answers.
        identity: what a checkpoint of this run must have in common with it.
    """

    engine: Engine
    drafter: DraftModel
    tokenizer: Any
    windows: DraftWindows
    total_steps: int
    documents: ChatDataset
    held_out: Sequence[Batch]
    has_held_out: bool
    identity: dict[str, Any]

    def evaluate(self) -> EvalReport:
        """Evaluate, teacher-forced, on all ranks."""
        engine = self.engine
        return evaluate(engine.model, engine.objective, self.held_out, device=engine.device, group=engine.dp_group)


@dataclass(frozen=True, kw_only=True)
class DSparkResult:
    """What a training left: the drafter's folder, and tau on held-out answers (teacher-forced, sampling)."""

    folder: Path
    before: float | None
    after: float | None
    steps: int


def run(config: DSparkConfig) -> DSparkResult:
    """Train a drafter as configured; under torchrun, call it on every rank."""
    folder = StageFolder.of(config.run.dir)
    with distributed_session(config.distributed) as runtime:
        progress = ProgressPrinter(0, enabled=runtime.is_main, shown=SHOWN)
        with RunFolder(folder.train, runtime=runtime, resume=config.run.goes_on) as run_folder:
            return _run_in(run_folder, folder, config, runtime, progress)


def _run_in(
    run_folder: RunFolder, folder: StageFolder, config: DSparkConfig, runtime: Runtime, progress: ProgressPrinter
) -> DSparkResult:
    if config.run.resume_from is not None:
        require_checkpoint(config.run.resume_from, runtime)
    job = prepare(config, runtime, say=progress.say)
    progress.total_steps = job.total_steps
    store = CheckpointStore(
        run_folder.checkpoints,
        identity=job.identity,
        runtime=runtime,
        keep_last=config.loop.keep_last,
        allow_changes=config.run.allow_changes,
    )
    if config.run.goes_on:
        resume_run(job.engine, job.windows, store, run_folder, checkpoint=config.run.resume_from, say=progress.say)
    facts = {"total_steps": job.total_steps, "data": job.identity["data"]}
    run_folder.describe(config, facts={**facts, **({"changes": store.changes} if store.changes else {})})
    job.engine.on_refused = RefusedFolder(
        run_folder.path / "refused",
        runtime=runtime,
        limit=config.guard.files,
        decode=job.tokenizer.decode,
        describe=refused_record,
    )
    start = time.monotonic()
    report = train(
        job.engine,
        job.windows,
        total_steps=job.total_steps,
        config=config.loop,
        evaluate=job.evaluate if job.has_held_out else None,
        run=run_folder,
        checkpoints=store if config.run.checkpoints else None,
        progress=progress,
        work=functools.partial(window_flops, job.drafter),
    )
    progress.say(
        f"trained {report.steps} steps on {report.total_tokens:,} tokens in {time.monotonic() - start:.0f} s"
    )
    before, after = (None if one is None else one.metrics["tau"] for one in (report.before, report.after))
    if before is not None and after is not None:
        progress.say(f"tau on held-out answers, teacher-forced at temperature 1: {before:.2f} -> {after:.2f}")
    save_drafter(job, config, folder, runtime)
    progress.say(f"drafter saved in {folder.drafter}")
    return DSparkResult(folder=folder.drafter, before=before, after=after, steps=job.engine.step)


def prepare(config: DSparkConfig, runtime: Runtime, *, say: Callable[[str], None] = lambda _: None) -> DSparkJob:
    """Load, cache, build and wrap; nothing is trained yet.

    Raises:
        TokenNormError: target, answers and configuration don't go together, or ranks differ in them.
    """
    seed_everything(config.train.seed + runtime.rank)
    folder, data = StageFolder.of(config.run.dir), config.data
    folder.require(folder.answers, made_by="tokennorm draft generate")
    target, tokenizer = load_target(config, runtime.device)
    documents = load_answers(folder.answers, max_length=data.max_length)
    held_out = load_answers(folder.held_out, max_length=data.max_length) if folder.held_out.exists() else None
    say(f"answers: {documents.describe()}")
    for part in (documents, held_out):
        if part is not None:
            part.check_fits(target)
    drafter = build_drafter(config, target, tokenizer, documents).train()
    describe_drafter(drafter, documents, say)
    # A block reaches beyond its document's last token.
    check_max_length(max(documents.lengths) + config.draft.block_size, target.config)
    states = held_out_states = None
    if config.cache.enabled:
        states, held_out_states = (
            None
            if part is None
            else cached_states(
                config.cache,
                path,
                part,
                target=target,
                tokenizer=tokenizer,
                layer_ids=drafter.config.target_layer_ids,
                log_totals=config.draft.vocabulary is not None,
                runtime=runtime,
                say=say,
            )
            for path, part in ((folder.cache, documents), (folder.held_out_cache, held_out))
        )
    elif data.packing:
        require_isolated_documents(target, batch_size=data.micro_batch_size, forward_options={"use_cache": False})
    pad = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    maker = BlockMaker(drafter=drafter, anchors=data.anchors, anchor_rule=data.anchor_rule, seed=config.train.seed)
    windows = _windows(config, documents, pad, runtime, maker, states)
    total_steps = windows.loader.total_windows(config.train.epochs)
    if config.train.max_steps is not None:
        total_steps = min(total_steps, config.train.max_steps)
    identity = run_identity(config, documents, total_steps, target)
    check_ranks_agree({**identity, "torch": torch.__version__}, runtime)
    factor = config.train.markov_lr_factor
    optimizer = build_optimizer(
        drafter,
        config.optim,
        lr_factors={"markov_head.": factor} if drafter.markov_head is not None and factor != 1 else None,
    )
    capture = None if states is not None else HiddenStateCapture(target, drafter.config.target_layer_ids)
    engine = Engine(
        model=wrap_ddp(drafter, runtime),
        optimizer=optimizer,
        objective=DSparkObjective(
            config.loss,
            capture=capture,
            teacher_head=target_weights(target)[1],
            guarded=config.guard.enabled,
        ),
        scheduler=build_scheduler(optimizer, config.optim, total_steps),
        device=runtime.device,
        dp_world_size=runtime.world_size,
        dp_group=runtime.group,
        token_loss_kit=build_kit(config.guard, runtime, empty_window=config.train.empty_window),
        max_grad_norm=config.optim.max_grad_norm,
        after_reduce=raise_pending_slot_errors,
    )
    evaluated: Sequence[Batch] = ()
    if held_out is not None:
        evaluated = held_out_batches(
            held_out,
            maker=maker,
            states=held_out_states,
            pad_token_id=pad,
            rank=runtime.rank,
            world_size=runtime.world_size,
        )
    return DSparkJob(
        engine=engine,
        drafter=drafter,
        tokenizer=tokenizer,
        windows=windows,
        total_steps=total_steps,
        documents=documents,
        held_out=evaluated,
        has_held_out=held_out is not None,
        identity=identity,
    )


def save_drafter(job: DSparkJob, config: DSparkConfig, folder: StageFolder, runtime: Runtime) -> None:
    """Write the drafter in full precision, on the main rank."""

    def write() -> None:
        if runtime.is_main:
            export_drafter(
                job.drafter,
                folder.drafter,
                dtype=None,
                num_anchors=config.data.anchors,
                provenance={"target": config.target.path, "steps": job.engine.step, "identity": job.identity},
            )

    all_ranks_or_none(write, runtime)


def _windows(
    config: DSparkConfig,
    documents: ChatDataset,
    pad_token_id: int,
    runtime: Runtime,
    maker: BlockMaker,
    states: HiddenStateCache | None,
) -> DraftWindows:
    data = config.data
    loader = WindowLoader(
        documents,
        micro_batch_size=data.micro_batch_size,
        micro_batches_per_window=data.micro_batches_per_window,
        pad_token_id=pad_token_id,
        pack_length=(data.pack_length or data.max_length) if data.packing else None,
        shuffle=data.shuffle,
        seed=config.train.seed,
        rank=runtime.rank,
        world_size=runtime.world_size,
    )
    return DraftWindows(loader, config.train.epochs, maker=maker, states=states)
