"""A run that is killed again and again (SIGKILL) ends with the undisturbed run's weights, bit for bit.

``python -m benchmarks.kills`` kills a tiny run at ten chosen places, resumes it each time and compares weights,
optimizer and logged numbers at the end; ``--only 2 7`` takes some of them. The table goes to
``benchmarks/results/kills.md`` with ``--write``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.engine.toy import ToyLM, ToyWindows, build_engine
from tokennorm.engine import (
    CheckpointStore,
    LoopConfig,
    RunFolder,
    checkpoint,
    checkpoint_files,
    evaluate,
    resume_run,
    seed_everything,
    train,
)

RESULT = Path(__file__).parent / "results" / "kills.md"
STEPS = 32

# (where, optimizer steps finished by then, how many times that place is passed in the step before the kill)
KILLS: tuple[tuple[str, int, int], ...] = (
    ("in a window, first micro-batch", 1, 0),
    ("in a save, hidden folder just made", 4, 0),
    ("in a save, halfway through the tensors", 6, 8),
    ("in a window, last micro-batch", 9, 3),
    ("in a save, tensors and states written, no manifest", 12, 0),
    ("in a save, manifest written, not renamed", 16, 1),
    ("in an evaluation", 20, 1),
    ("in a window, second micro-batch", 21, 1),
    ("in a save, renamed, old ones not deleted", 26, 0),
    ("in a window, third micro-batch", 29, 2),
)


def plant(where: str, step: int, passes: int, engine: Any) -> None:
    """Let this process die at a place, without a chance to do anything more."""
    left = passes

    def wrap(function: Callable[..., Any], hit: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def dying(*args: Any, **options: Any) -> Any:
            nonlocal left
            if engine.step == step and hit(*args):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return dying

    if "window" in where:
        engine.objective = wrap(engine.objective, lambda model, _: model.training)
    elif "evaluation" in where:
        engine.objective = wrap(engine.objective, lambda model, _: not model.training)
    elif "just made" in where:
        checkpoint.save_tensors = wrap(checkpoint.save_tensors)
    elif "halfway" in where:
        torch.save = wrap(torch.save)
    elif "no manifest" in where:
        checkpoint_files.commit = wrap(checkpoint_files.commit)
    elif "not renamed" in where:
        Path.rename = wrap(Path.rename)  # type: ignore[method-assign]
    else:
        checkpoint_files.prune = wrap(checkpoint_files.prune)


def attempt(folder: Path, kill: tuple[str, int, int] | None) -> None:
    """Start or resume the run in ``folder`` and write ``end.json`` when it comes to its end."""
    torch.set_num_threads(1)
    seed_everything(0)
    engine = build_engine(ToyLM(dtype=torch.float32, dropout=0.2, seed=1), total_steps=STEPS)
    windows = ToyWindows(repeat=STEPS // 4)
    run = RunFolder(folder, resume=True)
    store = CheckpointStore(run.checkpoints, identity={"steps": STEPS})
    resume_run(engine, windows, store, run)
    if kill is not None:
        plant(*kill, engine)
    train(
        engine,
        windows,
        total_steps=STEPS,
        config=LoopConfig(save_every=2, eval_every=5, keep_best=True),
        evaluate=lambda: evaluate(engine.model, engine.objective, ToyWindows().windows[0]),
        run=run,
        checkpoints=store,
    )
    tensors = [*engine.model.state_dict().values()]
    tensors += [value for state in engine.optimizer.state.values() for value in state.values()]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [[line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss")] for line in lines]
    (folder / "end.json").write_text(json.dumps({"state": digest.hexdigest(), "numbers": numbers}))


def in_child(folder: Path, kill: tuple[str, int, int] | None) -> int:
    """Run :func:`attempt` in a process of its own and return its wait status."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt(folder, kill)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitpid(child, 0)[1]


def step_of(folder: Path) -> str:
    """Return the name of the newest complete checkpoint."""
    latest = CheckpointStore(folder / "checkpoints").latest()
    return "none yet" if latest is None else latest.name


def compare(kills: tuple[tuple[str, int, int], ...]) -> tuple[list[str], bool]:
    """Run undisturbed and killed; return the table's rows and whether both ends are the same."""
    with tempfile.TemporaryDirectory() as root:
        whole, cut = Path(root) / "whole", Path(root) / "cut"
        if in_child(whole, None):
            raise SystemExit("the undisturbed run failed")
        rows = []
        for kill in kills:
            status = in_child(cut, kill)
            if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
                raise SystemExit(f"not killed {kill[0]}: wait status {status}")
            rows.append(f"| {kill[0]} | {kill[1]} | {step_of(cut)} |")
        if in_child(cut, None):
            raise SystemExit("the killed run could not be resumed")
        ends = [json.loads((folder / "end.json").read_text()) for folder in (whole, cut)]
        return rows, ends[0] == ends[1]


def main() -> None:
    """Run and print; exit with 1 when the ends differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the kills, from 0")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    kills = KILLS if options.only is None else tuple(KILLS[number] for number in options.only)
    rows, same = compare(kills)
    verdict = (
        f"{len(rows)} kills; weights, optimizer state and every logged loss, gradient norm and held-out loss are "
        f"{'the same, bit for bit' if same else 'NOT the same'}."
    )
    table = ["| killed | steps finished | resumed from |", "|---|---|---|", *rows]
    print("\n".join([*table, "", verdict]))
    if options.write:
        head = (
            f"# Ten SIGKILLs\n\n`python -m benchmarks.kills --write`: a tiny model with dropout, {STEPS} steps.\n"
        )
        RESULT.write_text("\n".join([head, *table, "", verdict]) + "\n")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
