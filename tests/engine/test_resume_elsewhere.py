"""A run goes on with another number of ranks; a rank that fails or dies in a save harms nobody else."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.small_disk import SmallDisk, small_disk
from tests.engine.toy import WINDOWS, ToyLM, ToyWindows, build_engine, micro_batch, weights
from tokennorm.engine import CheckpointStore, Engine, Runtime, checkpoint_files, unwrap_model, wrap_ddp, wrap_fsdp
from tokennorm.errors import CheckpointError, TokenNormError
from tokennorm.testing import spawn_ranks

SAVED, STEPS, REPEAT = 3, 8, 2
TIMEOUT_S = 500.0

# What a sample is known by.
IDS = [
    [
        tuple(micro_batch(*sizes, seed=100 * number + index)["input_ids"].flatten().tolist())
        for index, sizes in enumerate(window)
    ]
    for number, window in enumerate(WINDOWS * REPEAT)
]


def runtime_of(rank: int, world_size: int) -> Runtime:
    return Runtime(rank=rank, local_rank=rank, world_size=world_size)


def run(engine: Engine, windows: ToyWindows, steps: int) -> list[tuple[float | None, list[Any]]]:
    """Train; return for each step the loss and the samples of this rank, without dummies."""
    seen = []
    for window in windows:
        report = engine.train_step(window)
        own = [tuple(b["input_ids"].flatten().tolist()) for b in window if b["total_tokens"]]
        seen.append((report.loss, own))
        if engine.step == steps:
            break
    return seen


def parts(rank: int, world_size: int, seed: int = 1) -> tuple[Engine, ToyWindows, Runtime]:
    runtime = runtime_of(rank, world_size)
    engine = build_engine(wrap_ddp(ToyLM(seed=seed), runtime), total_steps=STEPS, dp_world_size=world_size)
    return engine, ToyWindows(rank=rank, world_size=world_size, repeat=REPEAT), runtime


def resumed(rank: int, world_size: int, folder: str) -> Any:
    engine, windows, runtime = parts(rank, world_size, seed=99)
    said: list[str] = []
    windows.load_state_dict(CheckpointStore(folder, runtime=runtime).restore(engine, say=said.append))
    return run(engine, windows, STEPS), weights(unwrap_model(engine.model)), said


def sharded(world_size: int, seed: int) -> Engine:
    """FSDP2 with a unit of its own for a layer; its first dimension of 17 divides by no number of ranks."""
    model = ToyLM(seed=seed)
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.norm, mesh=mesh)
    return build_engine(fully_shard(model, mesh=mesh), total_steps=STEPS, dp_world_size=world_size)


def by_hand(engine: Engine, steps: int) -> None:
    """Steps whose data are the same on every rank, so that any split gives the same weights."""
    for seed in range(steps):
        batch = micro_batch(5, 9, seed)
        loss = engine.model(batch["input_ids"], batch["shift_labels"])["loss"].sum()
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.step += 1


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Every weight and moment, whole."""
    named = dict(engine.model.named_parameters())
    found = {**named}
    for name, parameter in named.items():
        found |= {f"{name}.{key}": value for key, value in engine.optimizer.state[parameter].items()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for name, v in found.items()}


def hybrid(rank: int, world_size: int, seed: int, group: dist.ProcessGroup | None = None) -> Any:
    """HSDP 2x2 on four ranks, FSDP2 on two, nothing on one; as :func:`parts`."""
    runtime = Runtime(rank=rank, local_rank=rank, world_size=world_size, group=group)
    model = ToyLM(seed=seed)
    model = wrap_fsdp(model, runtime, shard_ranks=min(2, world_size), blocks=[model.norm])
    engine = build_engine(model, total_steps=STEPS, dp_world_size=world_size, dp_group=group)
    return engine, ToyWindows(rank=rank, world_size=world_size, repeat=REPEAT), runtime


def hybrid_resumed(rank: int, world_size: int, folder: str, group: dist.ProcessGroup | None = None) -> Any:
    """State right after the resume, the losses from there on, and the state at the end."""
    engine, windows, runtime = hybrid(rank, world_size, 99, group)
    windows.load_state_dict(CheckpointStore(folder, runtime=runtime).restore(engine))
    there = state_of(engine)
    return there, [loss for loss, _ in run(engine, windows, STEPS)], state_of(engine)


def first_two(rank: int, world_size: int, folder: str, disk: SmallDisk) -> Any:
    engine, windows, runtime = parts(rank, world_size)
    store = CheckpointStore(disk.path / "ddp", runtime=runtime)
    before = run(engine, windows, SAVED)
    store.save(engine, loader_state=windows.state_dict())

    # What the second rank alone has to write doesn't fit on the disk, and nobody could know before.
    used = disk.used()
    state = windows.state_dict()
    if rank == 1:
        state["much"] = torch.ones(2**20, dtype=torch.float64)
        disk.limit(2**20)
    engine.step += 1
    try:
        store.save(engine, loader_state=state)
        message = ""
    except TokenNormError as error:
        message = str(error)
    engine.step -= 1
    disk.clear()
    dist.barrier()
    given_back = disk.used() == used
    dist.barrier()

    split = sharded(world_size, seed=1)
    by_hand(split, 2)
    CheckpointStore(f"{folder}/fsdp", runtime=runtime).save(split)
    CheckpointStore(f"{folder}/apart", runtime=runtime).save(split, loader_state={"place": rank})
    return before, message, given_back, state_of(split)


def then_four(rank: int, world_size: int, folder: str, ddp: str) -> Any:
    split = sharded(world_size, seed=99)
    CheckpointStore(f"{folder}/fsdp", runtime=runtime_of(rank, world_size)).restore(split)
    other = resumed(rank, world_size, ddp), state_of(split)

    engine, windows, runtime = hybrid(rank, world_size, 1)
    run(engine, windows, SAVED)
    CheckpointStore(f"{folder}/hsdp", runtime=runtime).save(engine, loader_state=windows.state_dict())
    whole = state_of(engine), [loss for loss, _ in run(engine, windows, STEPS)], state_of(engine)
    again = hybrid_resumed(rank, world_size, f"{folder}/hsdp")
    pair = dist.new_group([0, 1])
    if rank < 2:
        on_two = hybrid_resumed(rank, 2, f"{folder}/hsdp", pair)
    else:
        # Every rank takes part in making the mesh of the two.
        DeviceMesh("cpu", [0, 1], mesh_dim_names=("shard",))
        on_two = None
    dist.barrier()
    return *other, whole, again, on_two


def test_two_ranks_then_one_or_four(tmp_path: Path) -> None:
    engine, windows, _ = parts(0, 1)
    undisturbed = run(engine, windows, STEPS)
    assert [own for _, own in undisturbed] == IDS

    with small_disk(tmp_path / "disk") as disk:
        ddp = disk.path / "ddp"
        spawned = spawn_ranks(first_two, 2, str(tmp_path), disk, timeout_s=TIMEOUT_S)
        two = [result.value for result in spawned]
        assert f"rank 1 of 2 failed: the checkpoint of step {SAVED + 1} could not be written" in two[0][1]
        for rank, (_, message, given_back, _) in enumerate(two):
            assert disk.words in message, rank
            assert f"the last complete checkpoint is step-{SAVED:08d}; it is untouched" in message, rank
            assert given_back, "what both ranks had written is gone"
        assert os.listdir(ddp) == [f"step-{SAVED:08d}"]

        spawned = spawn_ranks(then_four, 4, str(tmp_path), str(ddp), timeout_s=TIMEOUT_S)
        four = [result.value for result in spawned]
        resumed_on_one = resumed(0, 1, str(ddp))
    for ranks in ([resumed_on_one], [own for own, *_ in four]):
        for number, (loss, _) in enumerate(undisturbed[SAVED:]):
            window = IDS[SAVED + number]
            for rank, (steps, _, _) in enumerate(ranks):
                assert steps[number][0] == pytest.approx(loss, rel=1e-10)
                assert steps[number][1] == window[rank :: len(ranks)], "the same samples in the same order"
        for _, final, said in ranks:
            assert torch.allclose(final, weights(engine.model), rtol=0, atol=1e-9)
            assert said[0] == f"note: saved by 2 ranks, resumed by {len(ranks)}"

    whole = build_engine(ToyLM(seed=99), total_steps=STEPS)
    CheckpointStore(tmp_path / "fsdp").restore(whole)
    expected = two[0][3]
    assert expected.keys() > {"mix.weight", "mix.weight.exp_avg", "mix.weight.step"}
    for state in (state_of(whole), *(state for _, state, *_ in four)):
        assert_same_state(state, expected)
    by_hand(whole, 1)
    assert not torch.equal(state_of(whole)["mix.weight"], expected["mix.weight"])

    with pytest.raises(CheckpointError, match="by 2 ranks that were each at a place of their own"):
        CheckpointStore(tmp_path / "apart").restore(whole)

    # HSDP 2x2, then 2x2 (bit for bit), FSDP2 on two ranks, and one rank.
    (there, losses, end), *_ = (hsdp for _, _, hsdp, _, _ in four)
    assert losses == pytest.approx([loss for loss, _ in undisturbed[SAVED:]], rel=1e-10)
    assert not torch.equal(there["mix.weight"], end["mix.weight"])
    for _, _, _, again, on_two in four:
        assert_same_state(again[0], there)
        assert again[1] == losses
        assert_same_state(again[2], end)
        if on_two is not None:
            assert_same_state(on_two[0], there)
            assert on_two[1] == pytest.approx(losses, rel=1e-10)
    assert [on_two is not None for *_, on_two in four] == [True, True, False, False]
    on_one = hybrid_resumed(0, 1, f"{tmp_path}/hsdp")
    assert_same_state(on_one[0], there)
    assert on_one[1] == pytest.approx(losses, rel=1e-10)


def assert_same_state(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def dies_in_a_save(rank: int, world_size: int, folder: str) -> None:
    engine, windows, runtime = parts(rank, world_size)
    store = CheckpointStore(folder, runtime=runtime)
    run(engine, windows, 1)
    store.save(engine, loader_state=windows.state_dict())
    run(engine, windows, 2)
    if rank == 1:
        checkpoint_files.write_archive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    store.save(engine, loader_state=windows.state_dict())


def test_a_rank_killed_in_a_save_ends_the_other_and_harms_no_checkpoint(tmp_path: Path) -> None:
    first, second = spawn_ranks(dies_in_a_save, 2, str(tmp_path), timeout_s=TIMEOUT_S, check=False)
    assert second.error is not None
    assert "died with exit code -9" in second.error
    assert first.error is not None
    assert "did not finish" not in first.error, "it must not wait for the dead one"
    store = CheckpointStore(tmp_path)
    assert store.latest() == tmp_path / "step-00000001"
    engine = build_engine(ToyLM(seed=3), total_steps=STEPS)
    assert store.restore(engine) == {"place": 1}
