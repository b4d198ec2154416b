"""The wiring: windows are exact, anchors don't depend on ranks, a run continues only itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.dspark.tests.tiny import EPOCHS, MASK, tiny_config, write_answers
from tokennorm.draft import DraftVocabulary
from tokennorm.engine import CheckpointStore, LoopConfig, OptimConfig, Runtime
from tokennorm.errors import CheckpointError, ConfigError, DataError
from tokennorm.recipes.dspark import DSparkJob, demo, prepare
from tokennorm.recipes.dspark.build import draft_config
from tokennorm.recipes.dspark.config import (
    AnswersConfig,
    CacheConfig,
    DataConfig,
    DrafterConfig,
    EvaluateConfig,
    GuardConfig,
    LossConfig,
    TrainConfig,
)


def job_of(folder: Path, **changes: Any) -> DSparkJob:
    return prepare(tiny_config(folder, "shared", **changes), Runtime())


def draft(folder: Path, **changes: Any) -> DrafterConfig:
    return dataclasses.replace(tiny_config(folder, "shared").draft, **changes)


def blocks_of(batch: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Anchors and whether they are kept, row by row."""
    return list(zip(batch["blocks"].anchors, batch["blocks"].keep, strict=True))


def online(folder: Path, **changes: Any) -> DSparkJob:
    """In float64 throughout: the target runs with the batch instead of coming from the cache."""
    return job_of(folder, cache=CacheConfig(enabled=False), **changes)


def naive_sums(job: DSparkJob, batch: Any, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator of one micro-batch by definition, from the logits of all slots."""
    blocks = batch["blocks"]
    objective: Any = job.engine.objective
    captured = objective.capture(**{name: batch[name] for name in ("input_ids", "position_ids", "attention_mask")})
    output = job.drafter(
        blocks=blocks,
        features=captured.features,
        position_ids=batch["position_ids"],
        documents=batch["documents"],
    )
    slots = torch.arange(blocks.block_size)
    first = blocks.first_supervised_slot
    rows = (blocks.anchors.unsqueeze(-1) + slots - first).clamp(0, batch["input_ids"].shape[1] - 1)
    hidden = captured.last_hidden[torch.arange(rows.shape[0]).view(-1, 1, 1), rows]
    teacher = (hidden @ objective.teacher_head.T).softmax(-1)
    student = output.logits()
    # The weights are float32 by definition; their sums are not.
    weight = (blocks.eval_mask * torch.exp(-(slots - first).clamp(min=0) / (loss.gamma or 1e9))).double()
    ce = F.cross_entropy(student.flatten(0, 2), blocks.target_ids.flatten(), reduction="none")
    l1 = (student.softmax(-1) - teacher).abs().sum(-1)
    accepted = (1 - l1 / 2).clamp(0, 1).detach()
    assert output.confidence is not None
    confidence = F.binary_cross_entropy_with_logits(output.confidence, accepted, reduction="none")
    per_slot = loss.ce * ce.view_as(l1) + loss.l1 * l1 + loss.confidence * confidence
    return (weight * per_slot).sum(), weight.sum()


@pytest.mark.parametrize("layout", ["next_token", "bonus_anchor"])
def test_the_gradient_of_a_window_is_that_of_one_division(tiny_folder: Path, layout: Any) -> None:
    job = online(tiny_folder, draft=draft(tiny_folder, layout=layout))
    window = next(iter(job.windows))
    assert len({int(batch["blocks"].eval_mask.sum()) for batch in window}) > 1, "micro-batches must be uneven"
    sums = [naive_sums(job, batch, LossConfig()) for batch in window]
    loss = torch.stack([num for num, _ in sums]).sum() / torch.stack([den for _, den in sums]).sum()
    mean_of_means = torch.stack([num / den for num, den in sums]).mean()
    trained = {name: p for name, p in job.drafter.named_parameters() if p.requires_grad}
    expected = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
    wrong = torch.autograd.grad(mean_of_means, list(trained.values()))
    seen: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        seen.update({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})

    job.engine.max_grad_norm = None
    job.engine.optimizer.register_step_pre_hook(keep)
    report = job.engine.train_step(window)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    assert seen.keys() == trained.keys(), "everything that can learn does"
    error = torch.stack([(seen[n] - e).norm() for n, e in zip(trained, expected, strict=True)]).norm()
    other = torch.stack([(seen[n] - e).norm() for n, e in zip(trained, wrong, strict=True)]).norm()
    scale = torch.stack([e.norm() for e in expected]).norm()
    assert error < 1e-10 * scale
    assert other > 1e-3 * scale, "the usual mistake would be seen"


def test_the_cache_holds_what_the_target_gives(tiny_folder: Path) -> None:
    cached, live = job_of(tiny_folder), online(tiny_folder)
    one, two = next(iter(cached.windows)), next(iter(live.windows))
    objective: Any = live.engine.objective
    for mine, theirs in zip(one, two, strict=True):
        inputs = {name: theirs[name] for name in ("input_ids", "position_ids", "attention_mask")}
        captured = objective.capture(**inputs)
        torch.testing.assert_close(mine["features"].double(), captured.features, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine["last_hidden"].double(), captured.last_hidden, rtol=1e-4, atol=1e-5)
    assert cached.engine.train_step(one).loss == pytest.approx(live.engine.train_step(two).loss, rel=1e-4)


def test_a_reduced_vocabulary_needs_only_its_own_logits_of_the_target(tiny_folder: Path) -> None:
    """The cache then holds the sum over the other tokens; without it the whole head is multiplied. Same loss."""
    write_answers(tiny_folder, tiny_folder / "reduced")
    reduced = draft(tiny_folder, vocabulary=64)
    cached = prepare(tiny_config(tiny_folder, "reduced", draft=reduced), Runtime())
    live = online(tiny_folder, draft=reduced)
    one, two = next(iter(cached.windows)), next(iter(live.windows))
    assert one[0]["log_total"] is not None
    assert "log_total" not in two[0]
    assert cached.engine.train_step(one).loss == pytest.approx(live.engine.train_step(two).loss, rel=1e-4)


def test_packed_rows_train_on_the_same_states(tiny_folder: Path) -> None:
    """Documents are isolated whether the target runs over the packed row or over each of them for the cache."""
    data = DataConfig(max_length=128, packing=True, micro_batches_per_window=2, anchors=20)
    cached, live = job_of(tiny_folder, data=data), online(tiny_folder, data=data)
    one, two = next(iter(cached.windows)), next(iter(live.windows))
    assert max(int(batch["documents"].max()) for batch in one) > 0, "rows must hold several documents"
    assert cached.engine.train_step(one).loss == pytest.approx(live.engine.train_step(two).loss, rel=1e-4)


def test_blocks_depend_on_the_place_in_the_run_and_not_on_the_ranks(tiny_folder: Path) -> None:
    def blocks(rank: int, ranks: int) -> list[list[torch.Tensor]]:
        job = prepare(tiny_config(tiny_folder, "shared"), Runtime())
        # The loader's plan knows nothing of ranks; only the view does.
        job.windows.loader.rank, job.windows.loader.world_size = rank, ranks
        return [[batch["blocks"].anchors for batch in window] for window in job.windows]

    alone, shared = blocks(0, 1), [blocks(rank, 2) for rank in range(2)]
    for index, window in enumerate(alone):
        for number, anchors in enumerate(window):
            assert torch.equal(anchors, shared[number % 2][index][number // 2])
    # Another epoch draws others.
    half = len(alone) // EPOCHS
    assert {str(a) for w in alone[:half] for a in w} != {str(a) for w in alone[half : 2 * half] for a in w}


def test_a_windows_rows_have_the_same_blocks_however_it_is_cut(tiny_folder: Path, tmp_path: Path) -> None:
    def cut(size: int, count: int, **changes: Any) -> DSparkJob:
        data = DataConfig(max_length=128, micro_batch_size=size, micro_batches_per_window=count, anchors=6)
        return job_of(tiny_folder, data=data, **changes)

    cuts = {size: cut(size, 4 // size) for size in (1, 2, 4)}
    windows = {size: list(job.windows) for size, job in cuts.items()}
    rows = {
        size: [
            [anchors[keep].tolist() for batch in window for anchors, keep in blocks_of(batch)] for window in found
        ]
        for size, found in windows.items()
    }
    assert rows[1] == rows[2] == rows[4]
    assert any(len(set(map(str, window))) == len(window) for window in rows[4]), "each row draws for itself"
    reports = {size: job.engine.train_step(windows[size][0]) for size, job in cuts.items()}
    for size in (2, 4):
        assert reports[size].effective_tokens == pytest.approx(reports[1].effective_tokens, rel=1e-14)
        assert reports[size].loss == pytest.approx(reports[1].loss, rel=1e-12)
        assert reports[size].grad_norm == pytest.approx(reports[1].grad_norm, rel=1e-10)
    # So a run goes on with another cut, and says so; with a guard, which judges micro-batches, it does not.
    state = {"epoch": 0, "window": 1}
    CheckpointStore(tmp_path / "plain", identity=cuts[1].identity).save(cuts[1].engine, loader_state=state)
    said: list[str] = []
    store = CheckpointStore(tmp_path / "plain", identity=cuts[4].identity)
    assert store.restore(cuts[4].engine, say=said.append) == state
    assert "micro_batch_size: 1 there, 4 here" in "\n".join(said)
    one, four = (cut(size, 4 // size, guard=GuardConfig(enabled=True)) for size in (1, 4))
    CheckpointStore(tmp_path / "guarded", identity=one.identity).save(one.engine, loader_state=state)
    for other, named in ((four, "guard.micro_batch_size: 1 there, 4 here"), (cut(1, 3), "per_window: 4 there, 3")):
        with pytest.raises(CheckpointError, match=named):
            CheckpointStore(tmp_path / "guarded", identity=other.identity).restore(other.engine)
    # As it was before there were a guard and other cuts: those checkpoints still fit.
    assert set(cuts[1].identity) == {"layout", "data", "target", "states", "draft", "loss", "optim", "train"}
    assert (cuts[4].identity["data"]["micro_batch_size"], cuts[1].identity["data"]["micro_batch_size"]) == (1, 1)
    assert "empty_window" not in cuts[1].identity["train"]


def test_a_reduced_vocabulary_is_the_answers_most_frequent_tokens(tiny_folder: Path) -> None:
    job = online(tiny_folder, draft=draft(tiny_folder, vocabulary=64))
    vocabulary = job.drafter.vocabulary
    assert isinstance(vocabulary, DraftVocabulary)
    counts: dict[int, int] = {}
    for sample in job.documents:
        for token in sample.input_ids[sample.supervised].tolist():
            counts[token] = counts.get(token, 0) + 1
    assert set(counts) <= set(vocabulary.ids.tolist())
    assert job.engine.train_step(next(iter(job.windows))).loss is not None
    few = online(tiny_folder, draft=draft(tiny_folder, vocabulary=4)).drafter.vocabulary
    assert isinstance(few, DraftVocabulary)
    least = min(counts[token] for token in few.ids.tolist())
    assert all(count <= least for token, count in counts.items() if token not in few.ids.tolist())


def test_the_markov_head_learns_faster_when_told_to(tiny_folder: Path) -> None:
    job = job_of(tiny_folder, train=TrainConfig(epochs=EPOCHS, markov_lr_factor=10.0))
    rates = {id(p): group["lr"] for group in job.engine.optimizer.param_groups for p in group["params"]}
    for name, parameter in job.drafter.named_parameters():
        if parameter.requires_grad:
            assert rates[id(parameter)] == pytest.approx(0.1 if name.startswith("markov_head.") else 0.01), name
    assert not job.drafter.lm_head.weight.requires_grad


def test_a_run_continues_only_itself(tiny_folder: Path, tmp_path: Path) -> None:
    job = job_of(tiny_folder)
    job.engine.train_step(next(iter(job.windows)))
    CheckpointStore(tmp_path, identity=job.identity).save(job.engine, loader_state=job.windows.state_dict())
    for changes, named in (
        ({"optim": OptimConfig(lr=0.02, warmup=1, weight_decay=0.0)}, "optim.lr: 0.01 there, 0.02 here"),
        ({"loss": LossConfig(gamma=2.0)}, "loss.gamma: 4.0 there, 2.0 here"),
        ({"draft": draft(tiny_folder, layout="bonus_anchor")}, "draft.layout: 'next_token' there"),
    ):
        other = job_of(tiny_folder, **changes)
        with pytest.raises(CheckpointError, match=named):
            CheckpointStore(tmp_path, identity=other.identity).restore(other.engine)
    same = job_of(tiny_folder, loop=LoopConfig(log_every=5), evaluate=EvaluateConfig(seed=3))
    assert CheckpointStore(tmp_path, identity=same.identity).restore(same.engine) == {"epoch": 0, "window": 1}


def test_what_does_not_fit_is_refused_before_anything_is_done(tiny_folder: Path, tmp_path: Path) -> None:
    for build in (
        lambda: AnswersConfig(per_group=0),
        lambda: AnswersConfig(temperature=-1.0),
        lambda: DataConfig(anchors=0),
        lambda: DataConfig(packing=False, pack_length=256),
        lambda: LossConfig(ce=0.0, l1=0.0),
        lambda: TrainConfig(markov_lr_factor=0.0),
        lambda: EvaluateConfig(confidence_threshold=1.0),
        lambda: tiny_config(tiny_folder, "x", loss=LossConfig(confidence=0.0)),
    ):
        with pytest.raises(ConfigError):
            build()
    with pytest.raises(ConfigError, match="tokennorm draft generate"):
        prepare(tiny_config(tmp_path, "nothing"), Runtime())
    target = AutoModelForCausalLM.from_pretrained(tiny_folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder / "model")
    with pytest.raises(ConfigError, match=r"mask_token_id is not set"):
        draft_config(draft(tiny_folder, mask_token_id=None), target, tokenizer)
    with pytest.raises(ConfigError, match=r"<\|im_end\|>"):
        draft_config(draft(tiny_folder, mask_token_id=tokenizer.eos_token_id), target, tokenizer)
    assert draft_config(draft(tiny_folder), target, tokenizer).mask_token_id == MASK
    assert demo().draft.vocabulary == 8192


def test_a_cache_of_other_answers_is_refused(tiny_folder: Path) -> None:
    run = tiny_folder / "changed"
    write_answers(tiny_folder, run)
    prepare(tiny_config(tiny_folder, "changed"), Runtime())
    lines = (run / "answers.jsonl").read_text().splitlines(keepends=True)
    (run / "answers.jsonl").write_text("".join(lines[1:]))
    with pytest.raises(DataError, match="another set of documents"):
        prepare(tiny_config(tiny_folder, "changed"), Runtime())
