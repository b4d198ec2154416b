"""The configuration of a drafter, the same for all stages. A configuration is a function that returns one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tokennorm.draft import AnchorRule
from tokennorm.draft.config import MarkovHeadType
from tokennorm.draft.formats.schema import DraftFormat
from tokennorm.draft.states.spec import CacheDtype
from tokennorm.engine import DistributedConfig, LoopConfig, OptimConfig
from tokennorm.errors import ConfigError
from tokennorm.recipes.common.guard import EmptyWindow, GuardConfig
from tokennorm.recipes.common.require import require

__all__ = [
    "AnswersConfig",
    "CacheConfig",
    "DSparkConfig",
    "DataConfig",
    "DrafterConfig",
    "EvaluateConfig",
    "ExportConfig",
    "GuardConfig",
    "LossConfig",
    "RunConfig",
    "TargetConfig",
    "TrainConfig",
    "default",
    "demo",
]


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The model that the drafter is to speed up. It is never changed."""

    path: str = "smollm2-135m"
    """A folder in Hugging Face format, an id of the hub (owner/name), or smollm2-135m, the embedded model."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type that the target computes in."""


@dataclass(frozen=True, kw_only=True)
class AnswersConfig:
    """What the drafter learns from: prompts, and the target's own answers to them."""

    prompts: str = "embedded"
    """A JSONL file with a {"prompt": "..."} or {"messages": [...]} per line, or embedded: structured tasks and
    questions about Python."""
    per_group: int | None = 400
    """Training prompts of each group; none: all of them."""
    only: Mapping[str, int] = field(default_factory=dict)
    """Groups that get another number of training prompts, such as: free_form 60. (Others are as above.)"""
    held_out_per_group: int = 24
    """Held-out prompts of each group: for the loss during training and for the evaluation by decoding."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    batch_size: int = 32
    """Prompts that are answered at once."""
    temperature: float = 0.0
    """0: the likeliest token (greedy); otherwise answers are sampled."""

    def __post_init__(self) -> None:
        per_group = self.per_group
        require(per_group is None or per_group >= 1, "answers.per_group", per_group, "1 or more, or none for all")
        for group, number in self.only.items():
            require(number >= 1, f"answers.only for {group}", number, "1 or more")
        for name in ("held_out_per_group", "max_new_tokens", "batch_size"):
            require(getattr(self, name) >= 1, f"answers.{name}", getattr(self, name), "1 or more")
        require(self.temperature >= 0, "answers.temperature", self.temperature, "0 (greedy) or more")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The target's hidden states on disk; without them the target runs again in every epoch."""

    enabled: bool = True
    """Fill the cache before training, and read it in training."""
    dtype: CacheDtype = "bfloat16"
    """Precision on disk."""
    batch_tokens: int = 4096
    """Tokens of one forward pass of the target."""
    shard_tokens: int = 16384
    """Tokens of one file; an interrupted stage goes on with the first missing file."""

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "shard_tokens"):
            require(getattr(self, name) >= 1, f"cache.{name}", getattr(self, name), "1 or more")


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """The drafter. Widths, heads, norms and rotary embedding are the target's."""

    layout: Literal["next_token", "bonus_anchor"] = "next_token"
    """next_token (DSpark): slot k proposes the token k + 1 places after the anchor. bonus_anchor (DFlash): slot 0
    holds the anchor and proposes nothing."""
    block_size: int = 7
    """Slots of a block."""
    layers: int = 5
    """Number of draft layers; the paper has five."""
    target_layers: tuple[int, ...] | None = None
    """Layers of the target whose outputs the drafter reads, counted from 0 (-1: the embedding); by default five,
    spread evenly."""
    mask_token_id: int | None = None
    """Token that stands in the slots to fill: one that never occurs in text, such as an unused special token."""
    vocabulary: int | None = None
    """Propose only the most frequent tokens of the answers, so many; none: the whole vocabulary."""
    markov_rank: int = 256
    """Rank of the Markov head; 0: none."""
    markov_head: MarkovHeadType = "vanilla"
    """Kind of the Markov head; servers know vanilla."""
    confidence: bool = True
    """Predict whether a proposal will be accepted."""
    detach_confidence: bool = False
    """Keep the confidence head's gradient out of the rest of the drafter."""
    qk_norm: bool = True
    """Norms on queries and keys, as in Qwen3. The servers' drafter classes have them, whatever the target."""
    init_from_target: bool = True
    """Start the draft layers from the target's last ones."""
    warm_start: str | None = None
    """Folder of a drafter of the same target (DSpark, DFlash or speculators schema) to start from."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the drafter's weights, gradients and optimizer state."""
    gradient_checkpointing: bool = False
    """Compute each draft layer again in backward: less memory, more time."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How answers become windows. A window is one optimizer step, over all ranks together."""

    max_length: int = 1024
    """Tokens kept of a prompt with its answer."""
    packing: bool = False
    """Put several documents into one row, isolated from each other."""
    pack_length: int | None = None
    """Tokens of a packed row; by default max_length."""
    micro_batch_size: int = 1
    """Rows of a micro-batch: what one forward pass of one rank sees."""
    micro_batches_per_window: int = 1
    """Micro-batches of one optimizer step, of all ranks together: more ranks take fewer each."""
    anchors: int = 512
    """Blocks of each row, started at random positions."""
    anchor_rule: AnchorRule = "next_supervised"
    """Where a block may start. classic: at an answer's token before another one. next_supervised: at the prompt's
    last token as well, where drafting starts in service."""
    shuffle: bool = True
    """Train in a new order in each epoch."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batches_per_window", "anchors"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "1 or more")
        require(self.max_length >= 2, "data.max_length", self.max_length, "2 or more")
        require(
            self.pack_length is None or (self.packing and self.pack_length >= self.max_length),
            "data.pack_length",
            self.pack_length,
            f"at least max_length ({self.max_length}), and switch packing on",
        )

    @property
    def rows_per_window(self) -> int:
        """Rows of one optimizer step, of all ranks together."""
        return self.micro_batch_size * self.micro_batches_per_window


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Weights of the three terms (DSpark, arXiv 2607.05147)."""

    gamma: float | None = 4.0
    """Decay over the proposals of a block: the k-th counts exp(-k / gamma); none: all alike."""
    ce: float = 0.1
    """Cross-entropy with the answer's tokens."""
    l1: float = 0.9
    """L1 distance to the target's distribution."""
    confidence: float = 1.0
    """Confidence head: cross-entropy with the probability of acceptance."""
    chunk_size: int | None = None
    """Slots of logits held at once; by default a memory budget decides. Changes memory, not results."""

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence"):
            require(getattr(self, name) >= 0, f"loss.{name}", getattr(self, name), "0 or more")
        require(self.ce + self.l1 > 0, "loss.ce and loss.l1", (self.ce, self.l1), "at least one above 0")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train."""

    epochs: int = 1
    """Passes over the answers."""
    max_steps: int | None = None
    """Stop after so many optimizer steps; the learning rate is scheduled for them."""
    seed: int = 0
    """Seed of the drafter's weights, of the order of the data and of the anchors."""
    markov_lr_factor: float = 1.0
    """The Markov head learns so many times faster."""
    empty_window: EmptyWindow = "raise"
    """What a window whose data have no supervised slot does: stop with an error, or move nothing and go on. (One
    that the guard empties is skipped in any case.)"""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "train.epochs", self.epochs, "1 or more")
        require(self.max_steps is None or self.max_steps >= 1, "train.max_steps", self.max_steps, "1 or more")
        require(self.markov_lr_factor > 0, "train.markov_lr_factor", self.markov_lr_factor, "a positive number")


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Decoding of held-out prompts, with the drafter and plainly, in one run."""

    prompts_per_group: int = 24
    """Held-out prompts of each group."""
    untrained_prompts_per_group: int = 2
    """Of them, so many also with the drafter as it was before training; 0: none."""
    max_new_tokens: int = 128
    """Most tokens of an answer."""
    temperature: float = 0.0
    """0: greedy; otherwise sampling at this temperature."""
    confidence_threshold: float | None = None
    """Decode once more, verifying a proposal only while the estimated probability that all up to it are accepted
    is at least this. None: what is fastest on this machine, with a limit of proposals. 0: don't."""
    schedule_prompts_per_group: int = 4
    """Held-out prompts of each group, none of those above, that the fastest schedule is chosen on."""
    calibrate: bool = True
    """Measure and calibrate the confidence head."""
    seed: int = 0
    """Seed of sampling, and of the halves that calibration is fit and reported on."""

    def __post_init__(self) -> None:
        for name, least in _EVALUATE_LEAST:
            require(getattr(self, name) >= least, f"evaluate.{name}", getattr(self, name), f"{least} or more")
        require(self.temperature >= 0, "evaluate.temperature", self.temperature, "0 (greedy) or more")
        threshold = self.confidence_threshold
        require(
            threshold is None or 0 <= threshold < 1,
            "evaluate.confidence_threshold",
            threshold,
            "a number in [0, 1), or none",
        )


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The folder for a server."""

    format: DraftFormat = "dspark"
    """Schema: dspark (vLLM, SGLang), speculators (vLLM) or dflash, for a drafter without Markov and confidence
    heads in the bonus_anchor layout."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The folder that the stages share."""

    dir: str = "runs/dspark"
    """Answers, cache, training, evaluation and export go here, a folder or file each."""
    resume: bool = False
    """Go on from the training's newest checkpoint (from the beginning if there is none yet)."""
    resume_from: str | None = None
    """Go on from this checkpoint (a step-... folder), of this run or of another with the same settings."""
    allow_changes: tuple[str, ...] = ()
    """Entries of the run's identity that may differ from the checkpoint's, by the names that a refusal gives them
    (optim.lr, train.max_steps) or the first part of them (optim). Each is reported and written down."""
    checkpoints: bool = True
    """Save checkpoints of the training, at the end and at loop.save_every."""

    @property
    def goes_on(self) -> bool:
        """Whether the run continues one, rather than being new."""
        return self.resume or self.resume_from is not None


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A drafter, from prompts to export."""

    target: TargetConfig = field(default_factory=TargetConfig)
    """The model that is to be sped up."""
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    """Prompts and the target's answers."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    """Hidden states on disk."""
    draft: DrafterConfig = field(default_factory=DrafterConfig)
    """The drafter."""
    data: DataConfig = field(default_factory=DataConfig)
    """Windows and anchors."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Weights of the terms."""
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
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    """Decoding of held-out prompts."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """The folder for a server."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Devices and ranks."""

    def __post_init__(self) -> None:
        if self.draft.confidence and self.loss.confidence == 0:
            raise ConfigError(
                "the drafter has a confidence head, but loss.confidence is 0",
                why="it would never learn, and its guesses would be exported",
                fix="set draft.confidence to False, or give loss.confidence a weight",
            )
        if self.distributed.strategy != "ddp":
            raise ConfigError(
                f"distributed.strategy is {self.distributed.strategy!r}, but a drafter is trained with ddp",
                why="it is small, and the frozen target that it learns from is not split",
                fix="leave distributed.strategy out",
            )


def default() -> DSparkConfig:
    """Return the values to start from: the paper's drafter and optimizer."""
    return DSparkConfig(
        optim=OptimConfig(lr=6e-4, warmup=0.04, weight_decay=0.0, max_grad_norm=1.0),
        data=DataConfig(max_length=4096, packing=True, micro_batches_per_window=16),
        loop=LoopConfig(eval_every=500, save_every=500),
    )


def demo() -> DSparkConfig:
    """Return the demonstration: a drafter of one layer for SmolLM2-135M, in a quarter of an hour on two cores.

    One answer per step and a Markov head that learns ten times faster: at this size many small steps do most.
    """
    return DSparkConfig(
        answers=AnswersConfig(
            per_group=300, only={"free_form": 60}, held_out_per_group=16, max_new_tokens=112, batch_size=60
        ),
        cache=CacheConfig(batch_tokens=2048, shard_tokens=4096),
        draft=DrafterConfig(block_size=5, layers=1, mask_token_id=16, vocabulary=8192, markov_rank=128),
        data=DataConfig(max_length=512, anchors=32),
        optim=OptimConfig(lr=2e-3, warmup=0.04, weight_decay=0.0, max_grad_norm=1.0),
        train=TrainConfig(epochs=5, markov_lr_factor=10.0),
        loop=LoopConfig(eval_every=300, save_every=300, log_every=25),
        run=RunConfig(dir="runs/dspark-demo"),
        evaluate=EvaluateConfig(prompts_per_group=12, max_new_tokens=96),
    )


_EVALUATE_LEAST = (
    ("prompts_per_group", 1),
    ("untrained_prompts_per_group", 0),
    ("schedule_prompts_per_group", 1),
    ("max_new_tokens", 2),
)
