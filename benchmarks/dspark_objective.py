"""Time and memory of the fused DSpark objective, forward and backward, beside the full-logits ways.

    python -m benchmarks.dspark_objective                                   # the table
    python -m benchmarks.dspark_objective --peer-python PEER/bin/python     # with NeMo Automodel in it
    python -m benchmarks.dspark_objective --write                           # and benchmarks/results/...

PEER is an environment of its own with this repository's torch and ``pip install --no-deps nemo-automodel==0.7.0``
(its loss also imports transformers). Everything is then timed by that interpreter, so all rows share one torch.

All ways start from the same tensors: the drafter's hidden states and Markov latents, confidence logits, the
target's hidden states, a frozen head. All end with the gradients of hidden states, latents, W2 and confidence.
Times are CPU seconds of the whole process (all threads), one run of each variant per round in turn, the medians
over the rounds; ratios are taken round by round, so that a machine whose speed drifts doesn't show in them. Memory
is the peak resident size of a process of its own, above one that only holds the inputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokennorm.draft import (
    DSparkForwardOutput,
    SlotPlan,
    compute_dspark_loss,
    dspark_objective,
    plan_slots,
    teacher_positions,
)
from tokennorm.draft.fused_chunks import Teacher, slots_per_chunk

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "dspark_objective.md"
OURS, BARE, FULL = "tokennorm, fused", "its bare matrix products", "tokennorm, compute_dspark_loss on full logits"
PEER = "NeMo Automodel 0.7, compute_dspark_loss on full logits"
PEER_MODULE = "nemo_automodel.components.speculative.dspark"
WEIGHTS: dict[str, Any] = {
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of one micro-batch; shapes as in ``dspark_objective``."""

    hidden: Tensor
    latents: Tensor
    confidence: Tensor
    markov: Tensor
    head: Tensor
    teacher_hidden: Tensor
    positions: Tensor
    labels: Tensor
    eval_mask: Tensor
    keep: Tensor

    def leaves(self) -> tuple[Tensor, ...]:
        return self.hidden, self.latents, self.confidence, self.markov

    def plan(self) -> SlotPlan:
        return plan_slots(
            target_ids=self.labels,
            eval_mask=self.eval_mask,
            teacher_positions=self.positions,
            sequence_length=self.teacher_hidden.shape[1],
            vocabulary=self.head.shape[0],
            block_keep_mask=self.keep,
        )


def make_inputs(args: argparse.Namespace) -> Inputs:
    """All slots whose label lies inside the sequence are supervised: nothing for us to leave out."""
    generator = torch.Generator().manual_seed(0)
    A, K, S, V, D, r = args.anchors, args.slots, args.length, args.vocabulary, args.width, args.rank

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(scale)

    anchors = torch.randperm(S - 1, generator=generator)[:A].sort().values.unsqueeze(0)
    positions = teacher_positions(anchors, K)
    return Inputs(
        hidden=normal(1, A, K, D).requires_grad_(),
        latents=normal(1, A, K, r).requires_grad_(),
        confidence=normal(1, A, K).requires_grad_(),
        markov=normal(V, r, scale=0.05).requires_grad_(),
        head=normal(V, D, scale=0.05),
        teacher_hidden=normal(1, S, D),
        positions=positions,
        labels=torch.randint(0, V, positions.shape, generator=generator),
        eval_mask=positions + 1 < S,
        keep=torch.ones(1, A, dtype=torch.bool),
    )


def fused(inputs: Inputs) -> None:
    """The plan is part of it."""
    sums = dspark_objective(
        plan=inputs.plan(),
        hidden=inputs.hidden,
        head=inputs.head,
        latents=inputs.latents,
        markov_weight=inputs.markov,
        confidence=inputs.confidence,
        teacher_hidden=inputs.teacher_hidden,
        **WEIGHTS,
    )
    (sums.loss_sum / sums.denominator.float()).backward()


def products(inputs: Inputs) -> list[tuple[str, int]]:
    """What the fused objective has to multiply: (product, multiply-adds)."""
    plan, (V, D), r = inputs.plan(), inputs.head.shape, inputs.markov.shape[1]
    n, u = plan.num_supervised, plan.num_teacher_rows
    return [
        (f"teacher logits [{u}, {D}] x [{D}, {V}]", u * D * V),
        (f"draft logits [{n}, {D}] x [{D}, {V}]", n * D * V),
        (f"Markov bias [{n}, {r}] x [{r}, {V}]", n * r * V),
        (f"gradient of hidden [{n}, {V}] x [{V}, {D}]", n * D * V),
        (f"gradient of latents [{n}, {V}] x [{V}, {r}]", n * r * V),
        (f"gradient of W2 [{V}, {n}] x [{n}, {r}]", n * r * V),
    ]


def bare_products(inputs: Inputs) -> None:
    """The products of :func:`products` alone, in the same chunks."""
    plan, head, markov = inputs.plan(), inputs.head, inputs.markov.detach()
    hidden, latents = inputs.hidden.detach().flatten(0, 2), inputs.latents.detach().flatten(0, 2)
    teacher = inputs.teacher_hidden.flatten(0, 1)
    size = slots_per_chunk(plan, Teacher(teacher, head), head.device)
    logits, rows = torch.empty(size, head.shape[0]), torch.empty(size, head.shape[0])
    grad_markov = torch.empty_like(markov)
    grad_hidden, grad_latents = torch.empty_like(hidden), torch.empty_like(latents)
    for chunk in plan.chunks(size):
        slots = plan.slots[chunk.slots]
        states = teacher.index_select(0, plan.teacher_rows[chunk.rows])
        torch.mm(states, head.t(), out=rows[: states.shape[0]])
        h, e = hidden.index_select(0, slots), latents.index_select(0, slots)
        out = torch.mm(h, head.t(), out=logits[: h.shape[0]]).addmm_(e, markov.t())
        torch.mm(out, head, out=grad_hidden[chunk.slots])
        torch.mm(out, markov, out=grad_latents[chunk.slots])
        if chunk.slots.start == 0:
            torch.mm(out.t(), e, out=grad_markov)
        else:
            grad_markov.addmm_(out.t(), e)


def full_logits(inputs: Inputs) -> dict[str, Any]:
    """The fields of a forward output, with both ``[B, A, K, V]`` tensors of logits."""
    aligned = inputs.teacher_hidden[0][inputs.positions.clamp(max=inputs.teacher_hidden.shape[1] - 1)]
    with torch.no_grad():
        teacher = aligned @ inputs.head.t()
    return {
        "draft_logits": inputs.hidden @ inputs.head.t() + inputs.latents @ inputs.markov.t(),
        "target_ids": inputs.labels,
        "eval_mask": inputs.eval_mask,
        "block_keep_mask": inputs.keep,
        "confidence_pred": inputs.confidence,
        "aligned_target_logits": teacher,
    }


def ours_full(inputs: Inputs) -> None:
    """Our drop-in on the full logits."""
    loss = compute_dspark_loss(outputs=DSparkForwardOutput(**full_logits(inputs)), **WEIGHTS)
    assert isinstance(loss, Tensor)
    loss.backward()


def peer(inputs: Inputs) -> None:
    """The same call of NeMo Automodel."""
    output = importlib.import_module(f"{PEER_MODULE}.common").DSparkForwardOutput(**full_logits(inputs))
    importlib.import_module(f"{PEER_MODULE}.loss").compute_dspark_loss(outputs=output, **WEIGHTS).backward()


def peer_problem() -> str | None:
    """Why the peer can't be imported here; None when it can."""
    try:
        importlib.import_module(f"{PEER_MODULE}.loss")
    except ImportError as error:
        return str(error)
    return None


def variants() -> dict[str, Callable[[Inputs], None]]:
    """Name -> what is measured."""
    named = {BARE: bare_products, OURS: fused, FULL: ours_full}
    return named if peer_problem() else {**named, PEER: peer}


def time_variants(args: argparse.Namespace) -> dict[str, list[float]]:
    """CPU seconds of every variant, interleaved, after one round that isn't counted."""
    inputs, named = make_inputs(args), variants()
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for round_number in range(args.rounds + 1):
        for name, run in named.items():
            for leaf in inputs.leaves():
                leaf.grad = None
            start = time.process_time()
            run(inputs)
            if round_number:
                seconds[name].append(time.process_time() - start)
        print(f"\r  round {round_number}/{args.rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return seconds


def peak_memory(args: argparse.Namespace, name: str) -> float:
    """Peak resident MB of this process, which makes the inputs and runs one variant ("-": none)."""
    if name == "-":
        # The libraries' own start-up belongs to the inputs-only process as well.
        tiny = argparse.Namespace(**{**vars(args), "anchors": 2, "length": 8, "vocabulary": 64})
        for run in variants().values():
            run(make_inputs(tiny))
    inputs = make_inputs(args)
    if name != "-":
        variants()[name](inputs)
    # Not getrusage: a child started by vfork inherits its parent's peak there.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def work(args: argparse.Namespace, task: str) -> Any:
    """Run ``task`` in a process of its own, of the chosen interpreter."""
    command = [args.peer_python or sys.executable, "-m", "benchmarks.dspark_objective", "--task", task]
    for option in ("length", "anchors", "slots", "vocabulary", "width", "rank", "rounds"):
        command += [f"--{option}", str(getattr(args, option))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    if task.startswith("memory:"):
        # glibc would keep freed blocks below its moving threshold, and the peak would show its habits, not ours.
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def run_task(args: argparse.Namespace) -> Any:
    """Child process of :func:`work`."""
    if args.task == "time":
        inputs = make_inputs(args)
        return {
            "seconds": time_variants(args),
            "products": products(inputs),
            "peer_problem": peer_problem(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    return peak_memory(args, args.task.removeprefix("memory:"))


def table(args: argparse.Namespace) -> list[str]:
    """Measure and lay out."""
    timed = work(args, "time")
    seconds: dict[str, list[float]] = timed["seconds"]
    floor = work(args, "memory:-")
    memory = {name: work(args, f"memory:{name}") - floor for name in seconds}
    lines = [
        f"B 1, S {args.length}, A {args.anchors}, K {args.slots}, V {args.vocabulary}, D {args.width}, rank "
        f"{args.rank}, float32, frozen head, {args.rounds} rounds, {timed['threads']} threads, "
        f"torch {timed['torch'].split('+')[0]}.",
        "",
        "| | CPU s | times the fused | peak memory above inputs, MB |",
        "|---|---|---|---|",
    ]
    for name, values in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(values, seconds[OURS], strict=True))
        lines.append(f"| {name} | {statistics.median(values):.2f} | {ratio:.2f} | {memory[name]:.0f} |")
    lines += ["", "Bare matrix products, G multiply-adds:", ""]
    lines += [f"- {name}: {count / 1e9:.1f}" for name, count in timed["products"]]
    lines += [f"- in all: {sum(count for _, count in timed['products']) / 1e9:.1f}", ""]
    to_bare = statistics.median(a / b for a, b in zip(seconds[OURS], seconds[BARE], strict=True))
    lines.append(
        f"The fused objective takes {to_bare:.2f} times its bare products and {memory[OURS] / memory[FULL]:.2f} "
        "of the memory of the full-logits way."
    )
    if timed["peer_problem"]:
        lines.append(f"NeMo Automodel was not measured; it can't be imported here: {timed['peer_problem']}.")
    return [*lines, ""]


def main() -> None:
    """Print the table; with ``--write`` keep it under benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="S")
    parser.add_argument("--anchors", type=int, default=256, help="A")
    parser.add_argument("--slots", type=int, default=7, help="K")
    parser.add_argument("--vocabulary", type=int, default=49152, help="V")
    parser.add_argument("--width", type=int, default=576, help="D")
    parser.add_argument("--rank", type=int, default=128, help="r of the Markov head")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-python", help="interpreter of an environment with nemo-automodel 0.7.0")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        print(json.dumps(run_task(args)))
        return
    text = "\n".join(table(args))
    print(text)
    if args.write:
        where = (
            f"`python -m benchmarks.dspark_objective --peer-python ... --write` on {platform.machine()}, Python "
            f"{platform.python_version()}.\n"
        )
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(f"# The DSpark objective from hidden states, forward and backward\n\n{where}\n{text}")


if __name__ == "__main__":
    main()
