"""Answers of a tiny model: batched as one by one, stopped where it says, the same bytes however interrupted."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from recipes.sft.tests.tiny import build_folder
from tokennorm.errors import ConfigError, DataError
from tokennorm.recipes.dspark.answers import manifest_path, read_answers
from tokennorm.recipes.dspark.generate import generate_answers, stop_token_ids
from tokennorm.recipes.dspark.prompts import Prompt

PROMPTS = [
    Prompt(
        id=f"p{i}",
        group="g",
        task=f"t{i % 2}",
        text=f"say {' '.join(['alpha', 'beta'] * (i % 5 + 1))} {i}",
        held_out=i == 3,
    )
    for i in range(11)
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = build_folder(tmp_path_factory.mktemp("dspark")) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        # Larger logits, so that answers vary and stop tokens come up.
        model.lm_head.weight.mul_(20)
    return model, AutoTokenizer.from_pretrained(folder)


def make(tiny: tuple[Any, Any], path: Path, **changes: Any) -> bytes:
    options = {"batch_size": 3, "max_new_tokens": 24, **changes}
    prompts = options.pop("prompts", PROMPTS)
    generate_answers(*tiny, prompts, path, **options)
    return path.read_bytes()


@torch.no_grad()
def greedy(model: Any, ids: list[int], stops: tuple[int, ...], limit: int) -> list[int]:
    """The naive way: the whole sequence through the model for each token, no cache, no padding."""
    new: list[int] = []
    while len(new) < limit and not (new and new[-1] in stops):
        new.append(int(model(torch.tensor([ids + new]), use_cache=False).logits[0, -1].argmax()))
    return new


def test_batched_answers_are_those_of_one_prompt_at_a_time(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    # End tokens that this random model writes at times.
    free = [greedy(model, template_ids(tokenizer, prompt), (), 24) for prompt in PROMPTS]
    stops = (tokenizer.eos_token_id, free[0][5], free[4][9])
    with generation_config(model, GenerationConfig(eos_token_id=[free[0][5], free[4][9]])):
        make(tiny, tmp_path / "a.jsonl")
    answers = {answer.id: answer for answer in read_answers(tmp_path / "a.jsonl")}
    assert set(answers) == {prompt.id for prompt in PROMPTS}
    for prompt in PROMPTS:
        answer = answers[prompt.id]
        assert list(answer.prompt_ids) == template_ids(tokenizer, prompt)
        expected = greedy(model, list(answer.prompt_ids), stops, 24)
        assert list(answer.answer_ids) == expected
        assert answer.finish == ("stop" if expected[-1] in stops else "length")
        assert (answer.group, answer.task, answer.held_out) == (prompt.group, prompt.task, prompt.held_out)
        kept = expected[:-1] if answer.finish == "stop" else expected
        assert answer.messages == (
            {"role": "user", "content": prompt.text},
            {"role": "assistant", "content": tokenizer.decode(kept, skip_special_tokens=True)},
        )
    assert {answer.finish for answer in answers.values()} == {"stop", "length"}


def test_padding_that_is_seen_changes_answers(tiny: tuple[Any, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """The comparison above has teeth: without the mask, prompts beside longer ones get other answers."""
    model, _ = tiny
    right = make(tiny, tmp_path / "a.jsonl", batch_size=11)
    original = model.generate

    def unmasked(*, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return original(input_ids=input_ids, attention_mask=torch.ones_like(attention_mask))

    monkeypatch.setattr(model, "generate", unmasked)
    assert make(tiny, tmp_path / "b.jsonl", batch_size=11) != right
    monkeypatch.setattr(model, "generate", original)
    # With it, the size of the batch does not matter to a float64 model.
    one = make(tiny, tmp_path / "c.jsonl", batch_size=1)
    assert sorted(one.splitlines()) == sorted(right.splitlines())


def test_settings_of_the_model_do_not_shape_the_answers(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = tiny
    plain = make(tiny, tmp_path / "a.jsonl")
    model.train()
    own = GenerationConfig(eos_token_id=1, repetition_penalty=3.0, do_sample=True, temperature=2.0, num_beams=2)
    with generation_config(model, own):
        assert make(tiny, tmp_path / "b.jsonl") == plain
        assert model.generation_config is own
    assert model.training
    model.eval()


def test_end_tokens_of_model_tokenizer_and_template(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    end, start = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    with generation_config(model, GenerationConfig(eos_token_id=[7, 9])):
        assert stop_token_ids(model, tokenizer) == tuple(sorted({7, 9, end}))
    with generation_config(model, GenerationConfig(eos_token_id=7)):
        tokenizer.eos_token = "<|im_start|>"
        try:
            # The template's own is found without anybody naming it.
            assert stop_token_ids(model, tokenizer) == tuple(sorted({7, start, end}))
        finally:
            tokenizer.eos_token = "<|im_end|>"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_interrupted_run_ends_with_the_same_bytes(
    tiny: tuple[Any, Any], tmp_path: Path, temperature: float
) -> None:
    whole = make(tiny, tmp_path / "whole.jsonl", temperature=temperature)
    lines = whole.splitlines(keepends=True)
    assert len(lines) == len(PROMPTS)
    path = tmp_path / "cut.jsonl"
    # Cut in the middle of a line, in the middle of a batch, behind the first batch, at the very end, at nothing.
    for cut in (b"".join(lines[:4]) + lines[4][:37], b"".join(lines[:5]), b"".join(lines[:3]), whole[:-1], b""):
        make(tiny, path, temperature=temperature)
        path.write_bytes(cut)
        assert make(tiny, path, temperature=temperature) == whole


def test_finished_answers_are_not_generated_again(
    tiny: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    whole = make(tiny, path)
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    rows, original = [], tiny[0].generate

    def counting(**kwargs: Any) -> Any:
        rows.append(len(kwargs["input_ids"]))
        return original(**kwargs)

    monkeypatch.setattr(tiny[0], "generate", counting)
    said: list[str] = []
    assert make(tiny, path, say=said.append) == whole
    assert rows == [3, 2]
    assert said[0] == "6 of 11 answers are there already"
    assert re.match(r"11 answers, \d+ tokens, \d+ cut at the limit; \ds", said[-1])


def test_sampling_depends_on_seed_and_batch_alone(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    one = make(tiny, tmp_path / "a.jsonl", temperature=1.0)
    torch.rand(3)
    state = torch.get_rng_state()
    assert make(tiny, tmp_path / "b.jsonl", temperature=1.0) == one
    assert torch.equal(torch.get_rng_state(), state)
    assert make(tiny, tmp_path / "c.jsonl", temperature=1.0, seed=1) != one
    assert make(tiny, tmp_path / "d.jsonl", temperature=1.0, top_p=0.3) != one
    # The order of the prompts is no part of the work.
    assert make(tiny, tmp_path / "e.jsonl", temperature=1.0, prompts=PROMPTS[::-1]) == one


def test_another_manifest_is_refused(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = make(tiny, path)
    for changes, named in (
        ({"temperature": 0.7}, "temperature: 0.0 there, 0.7 here"),
        ({"seed": 5}, "seed: 0 there, 5 here"),
        ({"max_new_tokens": 25}, "max_new_tokens: 24 there, 25 here"),
        ({"batch_size": 4}, "batch_size: 3 there, 4 here"),
        ({"prompts": PROMPTS[1:]}, "number of prompts: 11 there, 10 here"),
    ):
        with pytest.raises(ConfigError, match=named):
            make(tiny, path, **changes)
    with torch.no_grad():
        tiny[0].lm_head.weight.mul_(2)
    try:
        with pytest.raises(ConfigError, match="target model: "):
            make(tiny, path)
    finally:
        with torch.no_grad():
            tiny[0].lm_head.weight.div_(2)
    assert path.read_bytes() == before
    manifest_path(path).unlink()
    with pytest.raises(DataError, match="nothing says which model"):
        make(tiny, path)


def test_prompts_that_cannot_be_answered_are_refused(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    blank = Prompt(id="x", group="g", task="t", text=" \n", held_out=False)
    long = Prompt(id="x", group="g", task="t", text="7 " * 300, held_out=False)
    for prompts, named in (
        ([], "no prompts"),
        ([*PROMPTS, PROMPTS[2]], "two prompts have the id 'p2'"),
        ([*PROMPTS, blank], "the prompt 'x' is empty"),
        ([*PROMPTS, long], "more than the 256 positions of the model"),
    ):
        with pytest.raises(DataError, match=named):
            make(tiny, path, prompts=prompts)
    for changes in (
        {"batch_size": 0},
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
    ):
        with pytest.raises(ConfigError):
            make(tiny, path, **changes)
    for changes in ({"top_p": 0.0, "temperature": 1.0}, {"top_p": 0.9}):
        with pytest.raises(ConfigError):
            make(tiny, path, **changes)
    assert not path.exists()


def test_a_disk_that_is_full(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    """A limit on the size of files makes a write fail half-way, as a full disk does."""
    whole = make(tiny, tmp_path / "whole.jsonl")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(DataError, match=r"can't write .*a.jsonl: File too large"):
            make(tiny, tmp_path / "a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    part = (tmp_path / "a.jsonl").read_bytes()
    assert whole.startswith(part)
    assert len(part) > len(whole) // 4
    assert make(tiny, tmp_path / "a.jsonl") == whole


def test_a_place_that_cannot_be_written(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"can't write .*file/a.jsonl"):
        make(tiny, tmp_path / "file" / "a.jsonl")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda row: row.pop("finish"), "a.jsonl:2: no finish"),
        (lambda row: row.update(finish="end"), "a.jsonl:2: finish is 'end'"),
        (lambda row: row.update(answer_ids=[]), "a.jsonl:2: answer_ids is not a list of token ids"),
        (lambda row: row.update(prompt_ids=[1, True]), "a.jsonl:2: prompt_ids is not a list of token ids"),
        (lambda row: row.update(id="p0"), "a.jsonl:2: the id 'p0' stands in line 1 already"),
        (lambda row: row.update(task=3), "a.jsonl:2: task is 3"),
        (lambda row: row.update(held_out=1), "a.jsonl:2: held_out is 1"),
        (lambda row: row.update(messages=[{"role": "user", "content": "x"}]), "a.jsonl:2: messages is not a chat"),
        (lambda row: row["messages"][-1].update(role="user"), "a.jsonl:2: the last message is the user's"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, change: Any, named: str) -> None:
    rows = [
        {
            **{"id": f"p{i}", "group": "g", "task": "t", "held_out": False},
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}],
            **{"prompt_ids": [1, 2], "answer_ids": [3], "finish": "stop"},
        }
        for i in range(2)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [answer.id for answer in read_answers(path)] == ["p0", "p1"]
    change(rows[1])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=re.escape(named)):
        read_answers(path)


def test_files_without_answers(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file"):
        read_answers(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no answer"):
        read_answers(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"id": "p0", "gro')
    with pytest.raises(DataError, match=r"a.jsonl:1: not JSON"):
        read_answers(tmp_path / "a.jsonl")


def template_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    text = f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


class generation_config:  # noqa: N801
    """Give the model another generation_config for a while."""

    def __init__(self, model: Any, config: GenerationConfig) -> None:
        self.model, self.config, self.own = model, config, model.generation_config

    def __enter__(self) -> None:
        self.model.generation_config = self.config

    def __exit__(self, *_: object) -> None:
        self.model.generation_config = self.own
