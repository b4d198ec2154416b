"""Survey of every causal language model that transformers can build: patched against unpatched.

``make survey`` writes ``benchmarks/results/architectures.md``. Each class is built from its default configuration
made small, in a process of its own, in float32 and in float64.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.architecture_check import Verdict, compare
from benchmarks.architecture_report import OUTCOMES, Row, report
from benchmarks.shrunk_models import build, shrunk_config

RESULTS = Path(__file__).parent / "results" / "architectures.md"


def classes() -> list[str]:
    """Every class once: causal LMs first, then vision-language models."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return list(dict.fromkeys(name for mapping in mappings for name in mapping.values()))


def survey_one(name: str) -> Row:
    """Build one class and compare it in both dtypes, or in float32 alone where float64 fails unpatched."""
    model_class = getattr(transformers, name)
    verdicts: dict[torch.dtype, Verdict] = {}
    notes = []
    for dtype in (torch.float32, torch.float64):
        try:
            model = build(shrunk_config(model_class.config_class()), model_class, dtype)
            verdicts[dtype] = compare(model)
        except Exception as error:
            reason = _reason(error)
            if dtype == torch.float32:
                return Row(name=name, outcome="not built", detail=reason)
            notes.append(f"float32 only: {reason}")
    outcome = max((verdict.outcome for verdict in verdicts.values()), key=OUTCOMES.index)
    details = [verdict.detail for verdict in verdicts.values() if verdict.outcome == outcome and verdict.detail]
    return Row(name=name, outcome=outcome, detail="; ".join(details[:1] + notes), verdicts=verdicts)


def _reason(error: Exception) -> str:
    """The error and the file of the family's code it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__} in {Path(frame.filename).name}: {text}"[:240]


def _child(connection: Connection, name: str) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    connection.send(survey_one(name))


def run_in_process(name: str, limit_s: float) -> Row:
    """:func:`survey_one` with a time limit; a class that crashes takes nothing else along."""
    # A fork: importing torch and transformers anew for each class would take longer than the survey.
    context: Any = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, name))
    process.start()
    send.close()
    detail = f"no answer within {limit_s:.0f} s"
    try:
        if receive.poll(limit_s):
            return receive.recv()
    except EOFError:
        process.join()
        detail = f"the process ended with status {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return Row(name=name, outcome="not built", detail=detail)


def main() -> int:
    """Run the survey; 1 if any class is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("classes", nargs="*", help="only these (prints, writes nothing)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="time limit of one class, in seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # What most families import, before the first fork.
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

    rows = []
    for name in options.classes or classes():
        row = run_in_process(name, options.limit_s)
        rows.append(row)
        print(f"{name:46} {row.outcome:12} {row.detail[:160]}", flush=True)
    counts = Counter(row.outcome for row in rows)
    print(", ".join(f"{outcome}: {counts[outcome]}" for outcome in OUTCOMES))
    if not options.classes:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(report(rows, "python -m benchmarks.architectures"), encoding="utf-8")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
