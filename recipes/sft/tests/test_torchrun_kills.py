"""A recipe's run under torchrun whose ranks are killed one after the other ends as the undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = str(Path(__file__).resolve().parents[3])

# The command line itself, with a place at which one rank dies: each place once, in this order over all restarts.
SCRIPT = f"""
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, {ROOT!r})
from tokennorm import cli
from tokennorm.engine import CausalLMObjective, Engine, checkpoint_files

# Where, on which rank, and with how many finished steps; a window has two micro-batches of each rank.
KILLS = [("window", 1, 3), ("save", 0, 4), ("evaluation", 1, 5), ("save", 1, 6)]
rank, marks = int(os.environ["RANK"]), Path(os.environ["MARKS"])
engines, calls = [], 0


def here(place):
    step = engines[0].step if engines else -1
    for number, kill in enumerate(KILLS):
        mark = marks / str(number)
        if kill == (place, rank, step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


plain_init, plain_call = Engine.__init__, CausalLMObjective.__call__
plain_commit, plain_archive = checkpoint_files.commit, checkpoint_files.write_archive


def init(self, **options):
    plain_init(self, **options)
    engines.append(self)


def call(self, model, batch):
    global calls
    calls += model.training
    if not model.training:
        here("evaluation")
    elif calls % 2 == 0:
        here("window")
    return plain_call(self, model, batch)


def commit(*arguments):
    here("save")
    return plain_commit(*arguments)


def archive(*arguments):
    # Rank 0 dies before the manifest, when all else is there; the others before their own part.
    if rank != 0:
        here("save")
    return plain_archive(*arguments)


if os.environ.get("KILL"):
    Engine.__init__, CausalLMObjective.__call__ = init, call
    checkpoint_files.commit, checkpoint_files.write_archive = commit, archive
sys.exit(cli.main(sys.argv[1:]))
"""


def torchrun(folder: Path, name: str, *, kill: bool) -> tuple[str, str]:
    script, marks = folder / "killed.py", folder / f"{name}-marks"
    script.write_text(SCRIPT)
    marks.mkdir()
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "4"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(script), "train", "sft"]
    options = {
        "model.path": folder / "model",
        "model.dtype": "float64",
        "lora.rank": 4,
        "lora.dropout": 0.2,
        "lora.export": "adapter",
        "data.path": folder / "chats.jsonl",
        "data.eval_fraction": 0.2,
        "data.max_length": 128,
        "data.micro_batches_per_window": 4,
        "train.epochs": 4,
        "train.max_steps": 7,
        "loop.save_every": 2,
        "loop.eval_every": 5,
        "run.dir": folder / name,
    }
    for option, value in options.items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MARKS": str(marks), "KILL": "1" if kill else ""}
    done = subprocess.run(
        [sys.executable, *command, "--run.resume"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def curve(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "lr", "effective_tokens", "eval_loss")
    return [{name: line[name] for name in names if name in line} for line in lines]


@pytest.mark.timeout(900)
def test_ranks_that_are_killed_in_window_evaluation_and_saves_change_nothing(tiny_folder: Path) -> None:
    whole, _ = torchrun(tiny_folder, "undisturbed", kill=False)
    killed, errors = torchrun(tiny_folder, "restarted", kill=True)
    assert sorted(path.name for path in (tiny_folder / "restarted-marks").iterdir()) == ["0", "1", "2", "3"]
    assert "no checkpoint yet" in whole
    assert killed.count("resumed from ") == 4
    # In the window after step 3, the save of step 4, the evaluation of step 5, and the save of step 6.
    resumed = [line.rpartition("step-")[2] for line in killed.splitlines() if "resumed from " in line]
    assert [int(step) for step in resumed] == [2, 2, 4, 4]
    assert errors.count("exitcode: -9") == 4
    states = [
        load_file(tiny_folder / name / "export" / "adapter_model.safetensors")
        for name in ("undisturbed", "restarted")
    ]
    assert states[0].keys() == states[1].keys()
    for name, weight in states[0].items():
        assert (weight == states[1][name]).all(), name
    assert curve(tiny_folder / "restarted") == curve(tiny_folder / "undisturbed")
