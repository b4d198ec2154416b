"""Loops that don't get through: a clear report, within the time limit, and no process left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.audit import loop_pieces as pieces
from tests.audit import mistaken_loops as mistaken
from tests.audit.loop_pieces import build, counted
from tests.audit.loops import Loop
from tokennorm.audit import assert_token_normalised
from tokennorm.errors import AuditError, ConfigError


def remember(folder: Path) -> None:
    """Every process of the audit that runs the loop leaves its number, and that of its launcher."""
    for pid in (os.getpid(), os.getppid()):
        (folder / str(pid)).touch()


def alive(folder: Path) -> list[int]:
    """Which of the remembered processes still run."""
    seen = [int(path.name) for path in folder.iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]
    assert seen
    running = []
    for pid in seen:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            running.append(pid)
    return running


def hanging(model, optimizer, batches, *, folder: Path) -> None:
    """The last rank leaves out a collective that the others wait in."""
    remember(folder)
    counted(model, optimizer, batches)
    if dist.get_world_size() > 1:
        if dist.get_rank() == 0:
            subprocess_of_the_loop = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / str(subprocess_of_the_loop.pid)).touch()
        if dist.get_rank() < dist.get_world_size() - 1:
            dist.barrier()
        else:
            while True:
                time.sleep(1)


def crashing(model, optimizer, batches, *, folder: Path) -> None:
    remember(folder)
    if dist.get_rank() == 1 and len(batches) == 2:
        raise ValueError("rank one has had enough")
    counted(model, optimizer, batches)


def dying(model, optimizer, batches, *, folder: Path) -> None:
    remember(folder)
    if dist.get_rank() == 1 and len(batches) == 1:
        print("going down")
        os._exit(7)
    counted(model, optimizer, batches)


def test_a_loop_that_hangs(audit, tmp_path):
    started = time.monotonic()
    report = audit(Loop(name="", step=partial(hanging, folder=tmp_path)), ranks=(1, 2), timeout_s=3)
    assert time.monotonic() - started < 25
    assert alive(tmp_path) == []
    assert not report.exact
    assert report.diagnosis is not None
    assert report.diagnosis.name == "loop_failed"
    first, *others = [layout for layout in report.layouts if layout.ranks == 2]
    assert first.failure == "hung"
    assert "rank 0 waits in barrier" in first.failure_text
    assert "test_failures.py" in first.failure_text
    assert {layout.failure for layout in others} == {"not run"}
    # What a single rank did is still there, and right.
    assert all(layout.exact for layout in report.layouts if layout.ranks == 1)
    assert "no progress for 3 s" in str(report)


def test_a_loop_that_raises_on_one_rank(audit, tmp_path):
    report = audit(Loop(name="", step=partial(crashing, folder=tmp_path)), ranks=(2,))
    assert alive(tmp_path) == []
    failed = [layout for layout in report.layouts if layout.failure]
    assert {layout.micro_batches for layout in failed} == {"2"}
    assert {layout.failure for layout in failed} == {"raised"}
    assert all("rank 1 raised" in layout.failure_text for layout in failed)
    assert all("rank one has had enough" in layout.failure_text for layout in failed)
    # The audit goes on after a crash: layouts after the first failure are measured.
    assert report.layouts[-1].exact
    assert not report.exact


def test_a_rank_that_dies_without_a_word(audit, tmp_path):
    report = audit(Loop(name="", step=partial(dying, folder=tmp_path)), ranks=(2,))
    assert alive(tmp_path) == []
    failed = [layout for layout in report.layouts if layout.failure]
    assert [layout.micro_batches for layout in failed] == ["1", "3+1"]
    for layout in failed:
        assert layout.failure == "died"
        assert "rank 1 died with exit code 7" in layout.failure_text
        assert "going down" in layout.failure_text


def no_gradients(model, optimizer, batches) -> None:
    optimizer.zero_grad()
    with torch.no_grad():
        pieces.token_losses(model, batches[0])
    optimizer.step()


def no_step(model, optimizer, batches) -> None:
    pieces.token_losses(model, batches[0]).sum().backward()


def nan_gradients(model, optimizer, batches) -> None:
    counted(model, optimizer, batches, lambda b: pieces.token_losses(model, b).sum() * float("nan"))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (no_gradients, "parameters_without_gradient"),
        (no_step, "optimizer_never_stepped"),
        (nan_gradients, "not_finite"),
    ],
)
def test_gradients_that_are_none_or_nan(audit, step, name):
    report = audit(Loop(name="", step=step), ranks=(1,))
    assert report.diagnosis is not None
    assert report.diagnosis.name == name
    assert not any(layout.exact for layout in report.layouts)


def spoiling(model, optimizer, batches) -> None:
    counted(model, optimizer, batches)
    for batch in batches:
        batch["labels"].fill_(3)


def test_a_loop_that_changes_its_data(audit):
    """The reference has the originals, so the verdict stays right; the report mentions it."""
    report = audit(Loop(name="", step=spoiling), ranks=(1,))
    assert report.exact
    assert any("changed its micro-batches (labels)" in note for note in report.notes)


def joining_itself(port: int):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    return build()


def listening(port: int):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    return build()


def test_a_loop_with_a_fixed_port(audit):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        # Joining a group at that address is answered by the one that is there.
        report = audit(Loop(name="", step=counted, build=partial(joining_itself, port)), ranks=(2,))
        assert report.exact, str(report)
        # A server of the loop's own can't be helped: the report says why.
        with pytest.raises(AuditError, match="fixed port"):
            audit(Loop(name="", step=counted, build=partial(listening, port)), ranks=(1,))


def build_badly():
    return torch.nn.Linear(2, 2)


def test_arguments_that_cannot_work(audit):
    with pytest.raises(AuditError, match="return \\(model, optimizer\\)"):
        audit(Loop(name="", step=counted, build=build_badly))
    with pytest.raises(ConfigError, match="timeout_s"):
        audit(Loop(name="", step=counted), timeout_s=0)
    with pytest.raises(ConfigError, match="no default layout"):
        audit(Loop(name="", step=counted), ranks=(5,))


def test_the_helper_for_tests(tmp_path):
    options = {"ranks": (1,), "packed": False, "start_method": "fork"}
    assert assert_token_normalised(build, counted, **options).exact
    with pytest.raises(AssertionError, match="mean_of_micro_batch_means"):
        assert_token_normalised(build, mistaken.all_means, **options)
