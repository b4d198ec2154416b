"""The target's own answers to prompts: what a drafter is trained on.

Batched and resumable. The order of the work is fixed by the prompts and the settings, each batch is seeded by its
own prompts, and the file grows by whole lines in that order; so an interrupted run ends with the same bytes as
one that ran through.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tokennorm.data.dataset import Progress
from tokennorm.draft.states.spec import fingerprint_target, fingerprint_tokenizer
from tokennorm.engine.progress import format_count, format_duration
from tokennorm.errors import ConfigError, DataError
from tokennorm.recipes.dspark.answering import Answerer, Work, stop_token_ids
from tokennorm.recipes.dspark.answers import Answer, open_manifest, parse_answers, read_answers
from tokennorm.recipes.dspark.prompt import Prompt

__all__ = ["Answer", "generate_answers", "read_answers", "stop_token_ids"]

SAY_EVERY_SECONDS = 10.0


def generate_answers(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: str | os.PathLike[str],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> list[Answer]:
    """Let the target answer every prompt, and write the answers to a JSONL file as they come.

    When the file is there already, the answers in it are kept and the missing ones added; a last line that was
    cut is written again. Nothing shapes the distribution but ``temperature`` and ``top_p``: penalties and
    other settings in the model's generation_config are not used. Prompts of similar length share a batch; the
    batch with the longest ones comes first, so that memory that does not suffice is found out at once.

    Args:
        model: a Hugging Face causal LM; it answers on its own device.
        tokenizer: with a chat template. ``prompt_ids`` are exactly its tokens with the generation prompt.
        prompts: with unique ids.
        path: of the JSONL file; ``<path>.manifest.json`` says what it was made with.
        batch_size: prompts that are answered together.
        max_new_tokens: at most so many tokens per answer, the end token included.
        temperature: 0 for greedy decoding.
        top_p: sample from the smallest set of tokens with this probability.
        seed: of the sampling.
        say: gets a line with rate and remaining time every ten seconds.
        progress: gets (answers so far, answers in all) after each batch.

    Returns:
        All answers, in the order of the file.

    Raises:
        ConfigError: a setting that can't work, or a file that was made with other settings.
        DataError: no prompts, an empty one, two with one id, one that is too long for the model, a file that
            holds something else, or a file that can't be written.
    """
    _check_settings(batch_size, max_new_tokens, temperature, top_p)
    path = Path(path)
    batches = _batches(_encode(prompts, tokenizer, model, max_new_tokens), batch_size)
    stops = stop_token_ids(model, tokenizer)
    manifest = {
        "target": fingerprint_target(model),
        "tokenizer": fingerprint_tokenizer(tokenizer),
        "prompts": _fingerprint(prompts),
        "num_prompts": len(prompts),
        "max_new_tokens": max_new_tokens,
        "stop_token_ids": list(stops),
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "batch_size": batch_size,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "name": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
    }
    answerer = Answerer(
        model, tokenizer, stops, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as file:
            open_manifest(path, manifest)
            done = _resume(file, path, batches)
            meter = _Meter(len(prompts), sum(len(batch) for batch in batches[:done]), say, progress)
            with answerer.prepared():
                for batch in batches[done:]:
                    answers = answerer.answer(batch)
                    file.write("".join(answer.to_line() for answer in answers).encode())
                    file.flush()
                    meter.add(answers)
            os.fsync(file.fileno())
    answers = read_answers(path)
    meter.finish(answers)
    return answers


class _Meter:
    """Says how far it is, how fast it goes and how long it will take."""

    def __init__(
        self, total: int, before: int, say: Callable[[str], None] | None, progress: Progress | None
    ) -> None:
        self.total, self.before, self.done, self.tokens = total, before, before, 0
        self.say, self.progress = say or (lambda _: None), progress or (lambda _done, _total: None)
        self.start = self.last = time.monotonic()
        if before:
            self.say(f"{before:,} of {total:,} answers are there already")

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a finished batch."""
        self.done += len(answers)
        self.tokens += sum(len(answer.answer_ids) for answer in answers)
        self.progress(self.done, self.total)
        now = time.monotonic()
        if now - self.last >= SAY_EVERY_SECONDS and self.done < self.total:
            self.last, seconds = now, now - self.start
            left = seconds / (self.done - self.before) * (self.total - self.done)
            self.say(
                f"answers {self.done:,}/{self.total:,}  {format_count(self.tokens / seconds)} tok/s  "
                f"eta {format_duration(left)}"
            )

    def finish(self, answers: Sequence[Answer]) -> None:
        """Say what the file holds."""
        tokens = sum(len(answer.answer_ids) for answer in answers)
        cut = sum(answer.finish == "length" for answer in answers)
        empty = sum(len(answer.answer_ids) == 1 and answer.finish == "stop" for answer in answers)
        line = f"{len(answers):,} answers, {tokens:,} tokens, {cut:,} cut at the limit"
        if empty:
            line += f", {empty:,} empty"
        if self.tokens:
            line += f"; {format_duration(time.monotonic() - self.start)}"
        self.say(line)


def _check_settings(batch_size: int, max_new_tokens: int, temperature: float, top_p: float) -> None:
    for name, number in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if number < 1:
            raise ConfigError(f"{name} is {number}", fix="at least 1")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature is {temperature}", fix="0 for greedy decoding, or a positive number")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}", fix="above 0 and at most 1")
    if temperature == 0 and top_p != 1:
        raise ConfigError(
            f"top_p is {top_p} and temperature is 0",
            why="greedy decoding does not sample",
            fix="leave top_p out, or set a temperature",
        )


def _encode(prompts: Sequence[Prompt], tokenizer: Any, model: Any, max_new_tokens: int) -> list[Work]:
    if not prompts:
        raise DataError("no prompts", fix="give at least one")
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    longest = getattr(config, "max_position_embeddings", None)
    seen: set[str] = set()
    encoded: list[Work] = []
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(f"two prompts have the id {prompt.id!r}", fix="make the ids unique")
        seen.add(prompt.id)
        if not prompt.text.strip():
            raise DataError(f"the prompt {prompt.id!r} is empty", fix="remove it or fill it")
        ids = _prompt_ids(tokenizer, prompt)
        if longest is not None and len(ids) + max_new_tokens > longest:
            raise DataError(
                f"the prompt {prompt.id!r} has {len(ids):,} tokens; with {max_new_tokens:,} new ones that is more "
                f"than the {longest:,} positions of the model",
                fix="shorten or remove the prompt, or lower max_new_tokens",
            )
        encoded.append(Work(prompt=prompt, ids=ids))
    return encoded


def _prompt_ids(tokenizer: Any, prompt: Prompt) -> tuple[int, ...]:
    try:
        ids = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # whatever a template raises, jinja's own errors and Python's alike
        raise DataError(
            f"the chat template refuses the prompt {prompt.id!r}: {type(error).__name__}: {error}",
            fix="change the order of its messages, or remove roles that the template does not know",
        ) from error
    return tuple(ids)


def _batches(encoded: Sequence[Work], batch_size: int) -> list[list[Work]]:
    """Like lengths together; the longest batch first, the others mixed, so that any beginning is a fair sample."""
    ordered = sorted(encoded, key=lambda work: (-len(work.ids), work.prompt.id))
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    rest = sorted(batches[1:], key=lambda batch: hashlib.sha256(batch[0].prompt.id.encode()).digest())
    return [batches[0], *rest]


def _resume(file: IO[bytes], path: Path, batches: Sequence[Sequence[Work]]) -> int:
    """Cut the file behind its last whole batch; return how many batches that are."""
    data = file.read()
    # Only a line that ends is whole.
    lines = data[: data.rfind(b"\n") + 1]
    answers = parse_answers(path, lines)
    planned = [work.prompt.id for batch in batches for work in batch]
    for number, answer in enumerate(answers):
        if number >= len(planned) or answer.id != planned[number]:
            raise DataError(
                f"{path.name}:{number + 1}: the id {answer.id!r} does not belong there",
                why="answers are written in an order that the prompts decide; this file was changed",
                fix="name another file, or remove this one and its manifest",
            )
    whole = kept = 0
    for batch in batches:
        if kept + len(batch) > len(answers):
            break
        kept += len(batch)
        whole += 1
    size = sum(len(line) + 1 for line in lines.split(b"\n")[:kept])
    file.truncate(size)
    file.seek(size)
    return whole


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    rows = sorted([p.id, p.group, p.task, p.held_out, p.messages] for p in prompts)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"can't write {path}: {error.strerror or error}",
            why="the answers up to here are kept",
            fix="make room or name another place; the same call continues where it stopped",
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, opened for reading and writing; for one process at a time."""
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process writes {path}", fix="wait for it, or name another file") from error
        file.seek(0)
        yield file
