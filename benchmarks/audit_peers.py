"""Is the gradient of the usual trainers that of the token-normalised objective? Stock, and with the integration.

    python -m benchmarks.audit_peers [--only WORD]

audits Hugging Face's Trainer, TRL's SFTTrainer, a plain loop of Accelerate and Lightning, each on a dense model
and on a mixture of experts with a router loss, and writes benchmarks/results/audit_peers.md and audit_peers.json.
It exits with 1 if anything is not right with the integration. ``make audit-peers`` runs it in an environment of
its own, with the versions of benchmarks/audit_peers_requirements.txt.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.audit_peers_cases import CASES, all_layouts, audit
from benchmarks.audit_peers_table import RIGHT, Row, rows_of, summary, table

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "transformers", "trl", "accelerate", "lightning")
MODELS = {"llama": "Dense model", "mixtral": "Mixture of experts with a router loss"}
EXPLANATION = f"""\
Every number is measured. Each loop trains tiny models (transformers' own classes, one layer, 29 tokens, float32,
clipped to a norm of 1) on the audit's samples, in one process and in two (gloo); the gradient that the optimizer
reads is held against the reference. How: [docs/audit.md](../../docs/audit.md).

- *one process*: one micro-batch, three uneven ones, four with a very long sample.
- *short last window*: an epoch that ends inside a window, 3+2 micro-batches in one process and 3+1 in two.
- *uneven ranks*: two ranks with different numbers of tokens, one micro-batch or three.
- *empty micro-batch or rank*: one without a supervised token.
- *exact*: in how many of the layouts. *error*: largest relative L2 error of the whole gradient.
- *factor*: the scalar that best maps the reference to the gradient, smallest to largest.
- *token weights*: how much a token counted relative to its due, smallest to largest; "-" where they can't be
  solved.
- *diagnosis*: what explains all situations of a loop together; "-" where the gradient is exact.
- *logged loss*, *evaluation loss*: largest relative error; right is the mean per supervised token (for the logged
  loss, with the router loss or without, whichever is nearer), up to {RIGHT:.0e}.

What is stock: Trainer and SFTTrainer as they come, on batches that were tokenised before (SFTTrainer in float32
and without gradient checkpointing, which are not its defaults). Accelerate: `accumulate`,
`backward(outputs.loss)`, the logged loss averaged over micro-batches and ranks, evaluated with
`gather_for_metrics(loss.repeat(rows))`. Lightning: `training_step` returns `outputs.loss` and logs it with
`on_epoch=True, sync_dist=True`; `validation_step` logs it with `sync_dist=True`. The loss that a mixture of
experts returns has its router loss in it, in evaluation too, while the right evaluation loss has not. The audit's
reference weighs the router loss of a micro-batch by its supervised tokens; their plain mean, which some may want,
is named `auxiliary_loss_unweighted`.
"""


def main() -> int:
    """Run the cases and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name holds this; nothing is written")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # imports what every rank would
    started = time.monotonic()
    rows: list[Row] = []
    for case in (case for case in CASES if options.only in case.name):
        began = time.monotonic()
        found = rows_of(case, audit(case, all_layouts()))
        rows += found
        for row in found:
            print(row.model, " | ".join(row.cells()), flush=True)
        print(f"{case.name}: {time.monotonic() - began:.0f} s", flush=True)
    if not options.only:
        _write(rows, time.monotonic() - started)
    wrong = [row for row in rows if row.integration and not row.right]
    return 1 if wrong else 0


def _write(rows: list[Row], seconds: float) -> None:
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    exact = [row for row in rows if row.integration]
    lines = [
        "# Trainers audited, stock and with the integration",
        "",
        f"`python -m benchmarks.audit_peers`, {', '.join(f'{k} {v}' for k, v in versions.items())}, "
        f"Python {platform.python_version()}, CPU, {seconds / 60:.0f} minutes. With the integration, gradient, "
        f"logged loss and evaluation loss are right in {sum(row.right for row in exact)} of {len(exact)} rows.",
        "",
        *summary(rows),
        "",
        EXPLANATION,
    ]
    for model, title in MODELS.items():
        for integration in (False, True):
            lines += [f"## {title} ({model}), {'with the integration' if integration else 'stock'}", ""]
            lines += [*table([r for r in rows if r.model == model and r.integration is integration]), ""]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "audit_peers.md").write_text("\n".join(lines), encoding="utf-8")
    content = {
        "versions": versions,
        "seconds": round(seconds),
        "rows": [_plain(dataclasses.asdict(r)) for r in rows],
    }
    (RESULTS / "audit_peers.json").write_text(
        json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def _plain(value: Any) -> Any:
    """A number that is not finite is null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
