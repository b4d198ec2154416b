"""What is trained on and what is held out: one source, several, and sources with too little."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest

from recipes.sft.tests.tiny import job_of, tiny_config
from tokennorm.data import Position
from tokennorm.engine import Runtime
from tokennorm.errors import DataError, NoSupervisedTokenError
from tokennorm.recipes.sft import prepare
from tokennorm.recipes.sft.config import DataConfig


def test_one_chat_cannot_be_both_trained_on_and_held_out(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text((tiny_folder / "chats.jsonl").read_text().splitlines()[0] + "\n")
    data = DataConfig(path=str(tmp_path / "one.jsonl"), max_length=128)
    with pytest.raises(DataError, match="can't be both trained on and held out"):
        job_of(tiny_folder, data=data)
    assert job_of(tiny_folder, data=dataclasses.replace(data, eval_fraction=0.0)).held_out == ()


def test_a_held_out_part_without_a_supervised_token_is_a_note_and_no_evaluation(
    tiny_folder: Path, tmp_path: Path
) -> None:
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines()
    order = list(range(len(lines)))
    random.Random("held out 0").shuffle(order)
    cut = [{"role": "user", "content": "why " * 300}, {"role": "assistant", "content": "yes"}]
    lines[order[0]] = json.dumps({"messages": cut})
    (tmp_path / "cut.jsonl").write_text("\n".join(lines))
    data = dataclasses.replace(
        tiny_config(tiny_folder, "x").data, path=str(tmp_path / "cut.jsonl"), eval_fraction=1 / len(lines)
    )
    said: list[str] = []
    job = prepare(tiny_config(tiny_folder, "cut", data=data), Runtime(), say=said.append)
    assert job.held_out == ()
    assert [line for line in said if line.startswith("note: no evaluation on") and "the 1 conversations" in line]
    data = dataclasses.replace(data, eval_path=str(tmp_path / "only.jsonl"))
    (tmp_path / "only.jsonl").write_text(lines[order[0]])
    with pytest.raises(NoSupervisedTokenError):
        job_of(tiny_folder, data=data)


def test_a_mixture_trains_on_each_source_by_its_weight_and_reports_its_loss(tiny_folder: Path) -> None:
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("few", lines[:8]), ("many", lines[8:])):
        (tiny_folder / f"{name}.jsonl").write_text("".join(part))
    mixture = (f"few={tiny_folder / 'few.jsonl'}@2", f"many={tiny_folder / 'many.jsonl'}")
    said: list[str] = []
    data = dataclasses.replace(tiny_config(tiny_folder, "x").data, mixture=mixture, eval_fraction=0.1)
    job = prepare(tiny_config(tiny_folder, "mixture", data=data), Runtime(), say=said.append)
    expected = "mixture: few with weight 2: 14 samples in the first epoch (it has 7)"
    assert any(line.startswith(expected) for line in said)
    loader = job.windows.loader
    seen: dict[str | None, int] = {}
    for window in range(loader.num_windows(0)):
        for i in (i for batch in loader.window_samples(Position(0, window)) for i in batch):
            seen[loader.dataset[i].group] = seen.get(loader.dataset[i].group, 0) + 1
    assert seen == {"few": 14, "many": 27}
    window = next(iter(job.windows))
    sums = {"few": [0.0, 0], "many": [0.0, 0]}
    for batch in window:
        losses = job.engine.forward_step(batch).token_losses
        assert losses is not None
        losses = losses.reshape(batch["groups"].shape)
        for place, name in enumerate(("few", "many")):
            chosen = (batch["groups"] == place) & (batch["shift_labels"] != -100)
            sums[name][0] += float(losses[chosen].sum())
            sums[name][1] += int(chosen.sum())
    report = job.engine.train_step(window)
    for name, (total, count) in sums.items():
        assert report.metrics[f"loss/{name}"] == pytest.approx(total / count, rel=1e-12)
    assert report.loss == pytest.approx(sum(s for s, _ in sums.values()) / sum(n for _, n in sums.values()))
    assert set(job.evaluate().metrics) >= {"loss/few", "loss/many"}
    # Another weight is another run.
    other = dataclasses.replace(data, mixture=(mixture[0][:-2], mixture[1]))
    changed = prepare(tiny_config(tiny_folder, "mixture", data=other), Runtime())
    assert changed.identity["data"]["mixture"] != job.identity["data"]["mixture"]
    assert "mixture" not in job_of(tiny_folder).identity["data"]


def test_bad_rows_are_left_out_and_reported_where_that_is_configured(tiny_folder: Path, tmp_path: Path) -> None:
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join([*lines[:3], "nonsense\n", *lines[3:]]))
    data = dataclasses.replace(tiny_config(tiny_folder, "x").data, path=str(tmp_path / "some.jsonl"))
    with pytest.raises(DataError, match=r"some\.jsonl:4: not JSON"):
        job_of(tiny_folder, data=data)
    said: list[str] = []
    data = dataclasses.replace(data, bad_rows="skip", max_bad_share=0.1)
    job = prepare(tiny_config(tiny_folder, "x", data=data), Runtime(), say=said.append)
    assert any("1 bad rows of 39 in" in line and "some.jsonl:4" in line for line in said)
    assert len(job.datasets.train) + sum(batch["input_ids"].shape[0] for batch in job.held_out) == 38


def test_the_share_of_bad_rows_is_that_of_the_whole_source(tiny_folder: Path, tmp_path: Path) -> None:
    """A chat that the template refuses is many of the few that are held out, but few of all."""
    lines = (tiny_folder / "chats.jsonl").read_text().splitlines(keepends=True)
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    bad = json.dumps({"messages": [{"role": "user", "content": "q"}, call]}) + "\n"
    for place in (0, 10, 20, 30):
        (tmp_path / "some.jsonl").write_text("".join([*lines[:place], bad, *lines[place:]]))
        data = dataclasses.replace(
            tiny_config(tiny_folder, "x").data,
            path=str(tmp_path / "some.jsonl"),
            bad_rows="skip",
            max_bad_share=0.03,
        )
        assert len(job_of(tiny_folder, data=data).datasets.train) < len(lines)
    with pytest.raises(DataError, match=r"1 bad rows of 39 in .*more than the share 0\.02"):
        job_of(tiny_folder, data=dataclasses.replace(data, max_bad_share=0.02))
