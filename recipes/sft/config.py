"""The configuration of a fine-tuning run. A configuration is a function that returns one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tokennorm.engine import DistributedConfig, LoopConfig, OptimConfig
from tokennorm.errors import ConfigError
from tokennorm.recipes.common.guard import EmptyWindow, GuardConfig
from tokennorm.recipes.common.require import require
from tokennorm.recipes.sft.data_config import DataConfig

__all__ = [
    "DataConfig",
    "GuardConfig",
    "LoraConfig",
    "ModelConfig",
    "RunConfig",
    "SftConfig",
    "TrainConfig",
    "default",
    "demo",
]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model that learns."""

    path: str = "smollm2-135m"
    """A folder in Hugging Face format, an id of the hub (owner/name), or smollm2-135m, the embedded model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of weights, gradients and optimizer state. Sums of losses are float64 in any case."""
    quantize: Literal["none", "nf4"] = "none"
    """Keep the frozen weights of the decoder's linear layers in 4 bits (NF4, by bitsandbytes) and train adapters
    on them: QLoRA. Products are computed in model.autocast, or else in model.dtype."""
    chunk_size: int | None = None
    """Rows of logits held at once; by default a memory budget decides. Changes memory, not results."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Compute in this, with float32 weights, gradients and reductions. float16 scales the loss (GradScaler)."""
    attention: Literal["auto", "varlen", "model"] = "auto"
    """Of packed rows. varlen: inside their documents only, by the kernel of PyTorch for that on a GPU, one by one
    on a CPU. model: the model's own, with a square mask. auto: varlen where the model can have it."""
    gradient_checkpointing: bool = False
    """Compute each block again in backward instead of keeping what it held: less memory, a third more time."""
    compile: bool = False
    """Compile the decoder (with fsdp or hsdp each block); head and loss stay as they are. Same gradients."""
    compile_backend: str = "inductor"
    """Backend of torch.compile; inductor needs a C++ compiler on CPU."""

    def __post_init__(self) -> None:
        require(self.autocast in ("none", "bfloat16", "float16"), "model.autocast", self.autocast, "a half dtype")
        require(self.quantize in ("none", "nf4"), "model.quantize", self.quantize, "none or nf4")
        attentions = ("auto", "varlen", "model")
        require(self.attention in attentions, "model.attention", self.attention, " or ".join(attentions))
        require(
            self.attention != "varlen" or not self.compile,
            "model.attention",
            self.attention,
            "auto or model with model.compile: its documents are of other lengths in each micro-batch",
        )
        require(
            self.autocast == "none" or self.dtype != "float64",
            "model.autocast",
            self.autocast,
            "none with float64 weights: half precision would undo them",
        )


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters that learn on a frozen base. With model.dtype bfloat16 the base takes half the memory, with
    model.quantize nf4 its linear layers an eighth of it; the adapters are float32 all the same."""

    rank: int = 0
    """Rank of the adapters; 0: none, and all weights learn."""
    alpha: int | None = None
    """The adapters' output is multiplied by alpha / rank; by default alpha is twice the rank."""
    dropout: float = 0.0
    """Part of the adapters' input that is dropped in training."""
    target_modules: tuple[str, ...] = ()
    """Last parts of the names of the linear layers that get one; by default all but the head."""
    export: Literal["merged", "adapter"] = "merged"
    """Export the model that base and adapters make together, or the adapters alone (for peft)."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "1 or more, or 0 for none")
        require(self.alpha is None or self.alpha >= 1, "lora.alpha", self.alpha, "1 or more")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "a number in [0, 1)")
        require(self.export in ("merged", "adapter"), "lora.export", self.export, "merged or adapter")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train."""

    epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after so many optimizer steps; the learning rate is scheduled for them."""
    seed: int = 0
    """Seed of the order of the data and of dropout."""
    empty_window: EmptyWindow = "raise"
    """What a window whose data have no supervised token does: stop with an error, or move nothing and go on. (One
    that the guard empties is skipped in any case.)"""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "train.epochs", self.epochs, "1 or more")
        require(
            self.max_steps is None or self.max_steps >= 1, "train.max_steps", self.max_steps, "1 or more, or none"
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder, and what is left at the end."""

    dir: str | None = None
    """Folder for the configuration, metrics.jsonl, checkpoints and export; by default runs/sft-DATE-TIME."""
    resume: bool = False
    """Go on from the newest checkpoint in run.dir (from the beginning if there is none yet)."""
    resume_from: str | None = None
    """Go on from this checkpoint (a step-... folder), of this run or of another with the same settings."""
    allow_changes: tuple[str, ...] = ()
    """Entries of the run's identity that may differ from the checkpoint's, by the names that a refusal gives them
    (optim.lr, train.max_steps) or the first part of them (optim). Each is reported and written down."""
    checkpoints: bool = True
    """Save checkpoints, at the end and at loop.save_every."""
    export: bool = True
    """Write the trained model as a folder that from_pretrained loads."""
    question: str | None = None
    """Let the model answer this before and after training (greedy)."""
    answer_tokens: int = 60
    """Length of these answers."""

    def __post_init__(self) -> None:
        if self.resume and self.dir is None:
            raise ConfigError(
                "run.resume is on, but run.dir does not say which run", fix="add --run.dir runs/NAME"
            )
        require(self.answer_tokens >= 1, "run.answer_tokens", self.answer_tokens, "1 or more")

    @property
    def goes_on(self) -> bool:
        """Whether the run continues one, rather than being new."""
        return self.resume or self.resume_from is not None


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """A fine-tuning run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model that learns."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters instead of all weights; off by default."""
    data: DataConfig = field(default_factory=DataConfig)
    """Chats and windows."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer, learning rate and clipping."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How long to train."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Refuse broken micro-batches; off by default."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """How often to report, evaluate and save."""
    run: RunConfig = field(default_factory=RunConfig)
    """The run folder."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Devices and ranks."""

    def __post_init__(self) -> None:
        if self.data.stream and (self.train.max_steps is None or self.train.epochs != 1):
            raise ConfigError(
                f"data.stream with train.max_steps {self.train.max_steps} and train.epochs {self.train.epochs}",
                why="how long a stream is nobody knows: it is read again and again until the last step, for which "
                "the learning rate is scheduled",
                fix="set train.max_steps, and leave train.epochs at 1",
            )
        if self.model.quantize != "none":
            self._check_quantised()
        if self.model.autocast == "float16" and self.model.dtype != "float32" and self.lora.rank == 0:
            raise ConfigError(
                f"model.autocast is 'float16' with {self.model.dtype} weights",
                why="a loss scaler needs weights and gradients that float16 is narrower than",
                fix="use model.dtype float32, or model.autocast bfloat16",
            )

    def _check_quantised(self) -> None:
        """Raise a ConfigError where a base in 4 bits can't be."""
        setting = f"model.quantize is {self.model.quantize!r}"
        if self.lora.rank == 0:
            raise ConfigError(
                f"{setting} without adapters",
                why="weights in 4 bits can't learn",
                fix="give lora.rank 1 or more, or model.quantize none",
            )
        if self.distributed.strategy != "ddp":
            raise ConfigError(
                f"{setting} with distributed.strategy {self.distributed.strategy!r}",
                why="packed weights and their scales can't be split apart",
                fix="use ddp (each rank holds the base in 4 bits), or a split base with model.dtype bfloat16",
            )
        if self.model.dtype == "float64":
            raise ConfigError(f"{setting} with float64", fix="use model.dtype float32 or bfloat16")


def default() -> SftConfig:
    """Return the values to start from: one epoch, packed, cosine schedule."""
    return SftConfig(loop=LoopConfig(eval_every=200, save_every=200))


def demo() -> SftConfig:
    """Return the demonstration: SmolLM2-135M on about 25,000 tokens of pydoc, in a few minutes on two cores.

    A micro-batch is one docstring, so supervised tokens range from a dozen to some 200: as uneven as it gets.
    """
    return SftConfig(
        data=DataConfig(
            max_length=256, packing=False, micro_batch_size=1, micro_batches_per_window=16, eval_tokens=5_000
        ),
        optim=OptimConfig(lr=1e-4, warmup=2, min_lr_ratio=0.1),
        train=TrainConfig(max_steps=15),
        run=RunConfig(checkpoints=False, question="What does `shutil.copyfile` do in Python?"),
    )
