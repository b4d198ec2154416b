"""The configuration of the data of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokennorm.data import parse_mixture, read_date
from tokennorm.errors import ConfigError
from tokennorm.recipes.common.require import require

__all__ = ["DataConfig"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Chats, and how they become windows. A window is one optimizer step, over all ranks together."""

    path: str = "pydoc"
    """JSONL files or a folder of them ({"messages": [...]} or {"text": ...} per line), plain text, a save_to_disk
    folder, an id of the Hugging Face hub (owner/name:split), or pydoc, the embedded question-answer set."""
    mixture: tuple[str, ...] = ()
    """Several sources in place of path: NAME=PATH or NAME=PATH@WEIGHT each; a weight says how often a source's
    samples come in an epoch (2, 0.5, 1/3). The loss of each is reported as loss/NAME."""
    eval_path: str | None = None
    """A source to evaluate on; by default pydoc's own held-out part, or a fraction of each source."""
    eval_fraction: float = 0.05
    """Part of each source that is held out when there is no eval_path; 0: no evaluation."""
    eval_tokens: int | None = 20_000
    """Evaluate on at least so many supervised tokens of the held-out part, drawn once; none: on all."""
    eval_batch_size: int = 4
    """Rows of an evaluation batch."""
    max_length: int = 1024
    """Tokens kept of a chat."""
    workers: int = 0
    """Processes that encode a rank's data; 0: the rank itself."""
    stream: bool = False
    """Read and encode the sources while training, instead of before: of any size, only buffers are held. Needs
    train.max_steps, and eval_path or eval_fraction 0. A weight of the mixture is then a share of the rows."""
    shuffle_buffer: int = 10_000
    """Rows of each source that a stream shuffles together."""
    cache: bool = True
    """Keep encoded data (from 1,000 rows on) in $TOKENNORM_CACHE, by default ~/.cache/tokennorm, and find them
    again by their content, tokenizer, template and settings."""
    prefetch: int = 2
    """Windows that are prepared ahead while a step runs; 0: none."""
    turns: Literal["all", "each"] = "all"
    """Supervise all assistant turns of a chat at once, or make each turn the last of a sample of its own: for
    templates that drop the reasoning of earlier turns."""
    template_date: str | None = None
    """The day (YYYY-MM-DD) that a template which prints the date shows; by default that on which the run began,
    also when it is resumed."""
    bad_rows: Literal["error", "skip"] = "error"
    """Rows that can't be read or masked: stop with an error, or leave them out, count and report them."""
    max_bad_share: float = 0.01
    """Largest share of bad rows in a source that is left out; more are an error in any case."""
    packing: bool = True
    """Put several chats into one row, isolated from each other; off: one chat per row, padded."""
    pack_length: int | None = None
    """Tokens of a packed row; by default max_length."""
    pack_buffer: int | None = None
    """Documents that packing looks at together, which keeps them near their place in the order; none: all, of a
    stream 512."""
    pad_to_multiple_of: int | None = None
    """Fill rows up to a multiple of so many tokens, so that the same shapes come again: for each, kernels and
    allocators keep memory. By default 64 for packed rows, 1 for others."""
    micro_batch_size: int = 1
    """Rows of a micro-batch: what one forward pass of one rank sees."""
    micro_batches_per_window: int = 16
    """Micro-batches of one optimizer step, of all ranks together: more ranks take fewer each."""
    shuffle: bool = True
    """Train in a new order in each epoch."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batches_per_window", "eval_batch_size"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "1 or more")
        for name in ("workers", "prefetch"):
            require(getattr(self, name) >= 0, f"data.{name}", getattr(self, name), "0 or more")
        require(self.shuffle_buffer >= 1, "data.shuffle_buffer", self.shuffle_buffer, "1 or more")
        require(self.max_length >= 2, "data.max_length", self.max_length, "2 or more")
        require(0 <= self.max_bad_share <= 1, "data.max_bad_share", self.max_bad_share, "a number in [0, 1]")
        parse_mixture(self.mixture)
        if self.template_date is not None:
            read_date(self.template_date)
        buffer = self.pack_buffer
        require(
            buffer is None or (self.packing and buffer >= 1),
            "data.pack_buffer",
            buffer,
            "1 or more and leave packing on, or none for all",
        )
        require(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "a number in [0, 1)")
        tokens = self.eval_tokens
        require(tokens is None or tokens >= 1, "data.eval_tokens", tokens, "1 or more, or none for all")
        multiple = self.pad_to_multiple_of
        require(multiple is None or multiple >= 1, "data.pad_to_multiple_of", multiple, "1 or more")
        pack_length = self.pack_length
        require(
            pack_length is None or (self.packing and pack_length >= self.max_length),
            "data.pack_length",
            pack_length,
            f"at least max_length ({self.max_length}), and leave packing on",
        )
        if self.stream:
            self._check_stream()

    def _check_stream(self) -> None:
        paths = [source.path for source in parse_mixture(self.mixture)] or [self.path]
        if "pydoc" in paths:
            raise ConfigError(
                "data.stream with pydoc, the embedded set, which is small and has no file to read",
                fix="name a source in data.path or data.mixture, or leave data.stream out",
            )
        if self.eval_path is None and self.eval_fraction > 0:
            raise ConfigError(
                f"data.stream with data.eval_fraction {self.eval_fraction} and no data.eval_path",
                why="a fraction of a source can't be held out before its length is known",
                fix="name a source to evaluate on in data.eval_path, or set data.eval_fraction to 0 for none",
            )
