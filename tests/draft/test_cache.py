"""Cached states are those of an online forward pass; whatever they are not made of is refused."""

from __future__ import annotations

import dataclasses
import pickle
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tokennorm.draft.states.cache as cache_module
from tests.draft.targets import VOCAB, tiny_target
from tokennorm.draft.states.cache import (
    HiddenStateCache,
    collate_log_totals,
    collate_states,
    describe_size,
    fill_cache,
)
from tokennorm.draft.states.capture import HiddenStateCapture
from tokennorm.draft.states.files import plan_shards, write_manifest
from tokennorm.draft.states.spec import CacheSpec, fingerprint_target, fingerprint_tokenizer
from tokennorm.errors import ConfigError, DataError

LENGTHS = (7, 3, 12, 5, 5, 9, 1, 20, 4)


def documents(seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [
        SimpleNamespace(
            input_ids=torch.randint(VOCAB, (length,), generator=generator),
            supervised=torch.rand(length, generator=generator) < 0.5,
        )
        for length in LENGTHS
    ]


def target(seed: int = 0, **options: Any) -> Any:
    return tiny_target("llama", seed=seed, dtype=torch.float32, **options)


def spec_of(model: Any, *, layer_ids: tuple[int, ...] = (-1, 2), **options: Any) -> CacheSpec:
    return CacheSpec.of(model, None, layer_ids, documents(), shard_tokens=16, **{"dtype": "float32"} | options)


@pytest.mark.parametrize("layer_ids", [(-1, 2), (3, 0)], ids=["own teacher states", "teacher is a layer"])
def test_what_comes_back_is_what_the_target_computes(layer_ids: tuple[int, ...], tmp_path: Path) -> None:
    model = target()
    capture = HiddenStateCapture(model, layer_ids)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 0.02)):
        spec = spec_of(model, layer_ids=layer_ids, dtype=dtype)
        folder = tmp_path / dtype
        lines: list[str] = []
        fill_cache(model, documents(), folder, spec, batch_tokens=24, say=lines.append)
        cache = HiddenStateCache(folder, spec)
        assert len(cache) == len(LENGTHS)
        assert lines[0] == describe_size(spec, sum(LENGTHS))
        for document, cached in zip(documents(), cache, strict=True):
            online = capture(input_ids=document.input_ids.unsqueeze(0))
            assert torch.equal(cached.input_ids, document.input_ids)
            assert torch.equal(cached.supervised, document.supervised)
            assert cached.features.dtype == spec.torch_dtype
            for got, expected in ((cached.features, online.features), (cached.last_hidden, online.last_hidden)):
                assert (got.float() - expected[0]).abs().max() < tolerance * expected.abs().max()
        on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        headers = 1000 * len(list(folder.glob("*.safetensors")))
        assert spec.bytes_for(sum(LENGTHS)) <= on_disk <= spec.bytes_for(sum(LENGTHS)) + headers


@pytest.mark.parametrize("layer_ids", [(-1, 2), (3, 0)], ids=["own teacher states", "teacher is a layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_the_logits_belong_to_the_states_on_disk(
    layer_ids: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    model = target()
    spec = spec_of(model, layer_ids=layer_ids, dtype=dtype, log_totals=True)
    fill_cache(model, documents(), tmp_path, spec)
    cache = HiddenStateCache(tmp_path, spec)
    head = model.get_output_embeddings().weight.detach()
    for cached in cache:
        assert cached.log_total is not None
        teaches = torch.zeros_like(cached.supervised)
        teaches[:-1] = cached.supervised[1:]
        expected = (cached.last_hidden.float() @ head.t()).logsumexp(-1)
        torch.testing.assert_close(cached.log_total[teaches], expected[teaches], rtol=1e-5, atol=1e-5)
        assert cached.log_total[~teaches].isnan().all()
    totals = collate_log_totals([[cache[0], cache[1]], [cache[2]]], row_length=2 * max(LENGTHS))
    assert totals is not None
    assert totals.shape == (2, 2 * max(LENGTHS))
    second = totals[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]]
    torch.testing.assert_close(second, cache[1].log_total, rtol=0, atol=0, equal_nan=True)
    assert totals[0, LENGTHS[0] + LENGTHS[1] :].isnan().all()
    with pytest.raises(DataError, match="sums of the logits"):
        HiddenStateCache(tmp_path, spec_of(model, layer_ids=layer_ids, dtype=dtype))


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    model = target()
    spec = spec_of(model)
    fill_cache(model, documents(), tmp_path / "whole", spec, batch_tokens=24)
    lines: list[str] = []

    class StoppedError(Exception):
        pass

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("file 2"):
            raise StoppedError

    folder = tmp_path / "resumed"
    with pytest.raises(StoppedError):
        fill_cache(model, documents(), folder, spec, batch_tokens=24, say=stop)
    with pytest.raises(DataError, match="not finished: 4 of 6"):
        HiddenStateCache(folder)
    (folder / ".partial-1-states-00002.safetensors").write_bytes(b"half")
    # Two processes share the rest; what is there is not made again.
    before = (folder / "states-00000.safetensors").stat().st_mtime_ns
    for rank in (1, 0):
        fill_cache(model, documents(), folder, spec, batch_tokens=24, rank=rank, world_size=2)
    assert (folder / "states-00000.safetensors").stat().st_mtime_ns == before
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(names) == 7
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_files_hold_consecutive_documents() -> None:
    parts = list(plan_shards(LENGTHS, 16))
    assert [LENGTHS[part] for part in parts] == [(7, 3), (12,), (5, 5), (9, 1), (20,), (4,)]
    assert list(plan_shards([], 16)) == []


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    model = target()
    spec = spec_of(model)
    fill_cache(model, documents(), tmp_path, spec)
    HiddenStateCache(tmp_path, spec)
    trained = target()
    with torch.no_grad():
        trained.model.layers[1].mlp.up_proj.weight.add_(1e-4)
    others = {
        "another target model": spec_of(trained),
        "another precision of the target": spec_of(target().to(torch.bfloat16)),
        "another tokenizer": dataclasses.replace(spec, tokenizer="0123456789abcdef"),
        # The same layers in another order are other features.
        "another set of layers": spec_of(model, layer_ids=(2, -1)),
        "another precision of the cache": spec_of(model, dtype="bfloat16"),
        "another set of documents": CacheSpec.of(
            model, None, (-1, 2), documents(1), dtype="float32", shard_tokens=16
        ),
    }
    for message, other in others.items():
        with pytest.raises(DataError, match=message):
            HiddenStateCache(tmp_path, other)
        with pytest.raises(DataError, match=message):
            fill_cache(model, documents(), tmp_path, other)


def test_fingerprints_see_settings_and_vocabulary() -> None:
    model = target()
    first = fingerprint_target(model)
    assert first == fingerprint_target(target())
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    assert fingerprint_target(model) != first

    def tokenizer(vocabulary: dict[str, int], template: str = "x") -> Any:
        return SimpleNamespace(get_vocab=lambda: vocabulary, chat_template=template)

    prints = {
        fingerprint_tokenizer(tokenizer({"a": 0, "b": 1})),
        fingerprint_tokenizer(tokenizer({"a": 1, "b": 0})),
        fingerprint_tokenizer(tokenizer({"a": 0, "b": 1}, "y")),
    }
    assert len(prints) == 3
    assert fingerprint_tokenizer(tokenizer({"b": 1, "a": 0})) in prints


def test_the_size_is_known_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 5 layers of Qwen3-4B and the teacher's states: 31 kB per token in bfloat16.
    spec = dataclasses.replace(
        spec_of(target()), layer_ids=(1, 9, 17, 25, 33), num_layers=36, hidden_size=2560, dtype="bfloat16"
    )
    assert spec.bytes_for(1) == 6 * 2560 * 2 + 9
    assert describe_size(spec, 1_000_000_000) == (
        "1,000,000,000 tokens x 6 hidden states of 2560 in bfloat16: 30.7 TB (30.7 kB per token)"
    )
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda folder: usage(10**9, 0, 5000))
    with pytest.raises(ConfigError, match=r"needs 13\.\d kB more, .* has 5 kB free"):
        fill_cache(target(), documents(), tmp_path / "new", spec_of(target()))


def test_folders_that_are_no_cache_are_refused(tmp_path: Path) -> None:
    model = target()
    with pytest.raises(DataError, match="no cache"):
        HiddenStateCache(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="other files"):
        fill_cache(model, documents(), tmp_path, spec_of(model))
    with pytest.raises(DataError, match="documents"):
        fill_cache(model, documents()[:-1], tmp_path / "new", spec_of(model))
    folder = tmp_path / "cache"
    fill_cache(model, documents(), folder, spec_of(model))
    (folder / "states-00001.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(DataError, match="can't be read"):
        HiddenStateCache(folder)[2]


def test_another_rank_starts_the_same_cache_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, listed = target(), Path.iterdir

    def list_after_the_other_rank(folder: Path) -> Iterator[Path]:
        write_manifest(folder, spec_of(model), [len(document.input_ids) for document in documents()])
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", list_after_the_other_rank)
    fill_cache(model, documents(), tmp_path, spec_of(model))
    assert len(HiddenStateCache(tmp_path)) == len(documents())


def test_packed_rows_and_workers(tmp_path: Path) -> None:
    model = target()
    fill_cache(model, documents(), tmp_path, spec_of(model))
    cache = HiddenStateCache(tmp_path)
    cache[0]
    other = pickle.loads(pickle.dumps(cache))
    assert torch.equal(other[8].features, cache[8].features)
    assert [len(document) for document in cache[1:3]] == [3, 12]
    features, last = collate_states([[cache[0], cache[1]], [cache[3]]])
    assert features.shape == (2, 10, 32)
    assert torch.equal(features[0, 7:], cache[1].features)
    assert torch.equal(last[1, :5], cache[3].last_hidden)
    assert not features[1, 5:].any()
    assert collate_states([[cache[1]]], 8)[0].shape == (1, 8, 32)
