"""The training engine: one exact optimizer step, and the run around it. It knows no data and no model family."""

from tokennorm.engine.checkpoint import CheckpointStore
from tokennorm.engine.checkpoint_choice import require_checkpoint, saved_identity
from tokennorm.engine.checkpoint_state import frozen_fingerprint
from tokennorm.engine.clipping import clip_gradients
from tokennorm.engine.distributed import (
    DistributedConfig,
    Runtime,
    all_ranks_or_none,
    broadcast_from_main,
    check_ranks_agree,
    distributed_session,
    set_gradient_sync,
    unwrap_model,
    wrap_ddp,
)
from tokennorm.engine.engine import Engine, StepReport
from tokennorm.engine.evaluate import EvalReport, evaluate, move_to_device
from tokennorm.engine.export import export_pretrained
from tokennorm.engine.loop import LoopConfig, TrainReport, WindowSource, train
from tokennorm.engine.objective import Batch, CausalLMObjective, Objective, ObjectiveOutput
from tokennorm.engine.optim import OptimConfig, build_optimizer, build_scheduler, learning_rate_factor
from tokennorm.engine.precision import (
    AutocastObjective,
    autocast_dtype,
    build_scaler,
    fixed_divisor,
    precision_notes,
)
from tokennorm.engine.progress import ProgressPrinter, format_step_line
from tokennorm.engine.refused import RefusedFolder, RefusedMicroBatch
from tokennorm.engine.resume import resume_run
from tokennorm.engine.rng import capture_rng_state, restore_rng_state, seed_everything
from tokennorm.engine.run_folder import RunFolder, config_to_dict
from tokennorm.engine.sharding import decoder_blocks, is_sharded, reshard, wrap_fsdp, wrap_model
from tokennorm.engine.signals import RunStopped, StopRequest

__all__ = [
    "AutocastObjective",
    "Batch",
    "CausalLMObjective",
    "CheckpointStore",
    "DistributedConfig",
    "Engine",
    "EvalReport",
    "LoopConfig",
    "Objective",
    "ObjectiveOutput",
    "OptimConfig",
    "ProgressPrinter",
    "RefusedFolder",
    "RefusedMicroBatch",
    "RunFolder",
    "RunStopped",
    "Runtime",
    "StepReport",
    "StopRequest",
    "TrainReport",
    "WindowSource",
    "all_ranks_or_none",
    "autocast_dtype",
    "broadcast_from_main",
    "build_optimizer",
    "build_scaler",
    "build_scheduler",
    "capture_rng_state",
    "check_ranks_agree",
    "clip_gradients",
    "config_to_dict",
    "decoder_blocks",
    "distributed_session",
    "evaluate",
    "export_pretrained",
    "fixed_divisor",
    "format_step_line",
    "frozen_fingerprint",
    "is_sharded",
    "learning_rate_factor",
    "move_to_device",
    "precision_notes",
    "require_checkpoint",
    "reshard",
    "restore_rng_state",
    "resume_run",
    "saved_identity",
    "seed_everything",
    "set_gradient_sync",
    "train",
    "unwrap_model",
    "wrap_ddp",
    "wrap_fsdp",
    "wrap_model",
]
