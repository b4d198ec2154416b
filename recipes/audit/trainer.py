"""``tokennorm audit trainer``: a Hugging Face ``Trainer``, TRL's ``SFTTrainer`` or a subclass, from the outside.

The trainer is used as it is: it is made with a tiny model, its own arguments and a data set, and its ``train()``
runs. The audit's micro-batches are the items of the data set, one per training batch, so that the trainer
accumulates and deals them out to the ranks as the layout says. Each window of a layout is a run of its own, with
the layout's number of accumulation steps; a short last window is a run whose data end early, as at the end of an
epoch.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tokennorm.audit import Layout, Sample, audit_loop, collate, default_layouts, make_samples
from tokennorm.errors import ConfigError
from tokennorm.recipes.audit.chats import build_tokenizer
from tokennorm.recipes.audit.trainer_models import VOCABULARY, tiny_model
from tokennorm.recipes.audit.trainer_report import Evaluation, TrainerReport

__all__ = ["TrainerLoop", "audit_trainer", "find_trainer"]

# Held-out samples: uneven, one very long (10), one without a supervised token (11), and an odd number of them.
_HELD_OUT = (0, 1, 2, 3, 10, 11, 4, 5, 7)
_HELD_OUT_ROWS = 2


def find_trainer(target: str) -> type:
    """The class that ``module:Class`` names.

    Raises:
        ConfigError: there is none, it is no Trainer, or TRL's for another objective.
    """
    module, _, name = target.partition(":")
    if not name:
        raise ConfigError(
            f"{target!r} is no import path",
            fix="give module:Class, such as transformers:Trainer or trl:SFTTrainer",
        )
    from transformers import Trainer

    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"can't import {target!r}: {error}", fix="check its module and its name") from error
    finally:
        sys.path.remove(os.getcwd())
    if not (isinstance(found, type) and issubclass(found, Trainer)):
        raise ConfigError(
            f"{target} is no subclass of transformers.Trainer",
            fix="for another loop, use tokennorm.audit.audit_loop (docs/audit.md)",
        )
    theirs = _trl_base(found)
    if theirs is not None and theirs.__name__ != "SFTTrainer":
        raise ConfigError(
            f"{target} is TRL's {theirs.__name__}",
            why="its objective is no mean over supervised tokens.",
            fix="audit transformers:Trainer, trl:SFTTrainer, or a subclass of one of them",
        )
    return found


def _trl_base(trainer: type) -> type | None:
    """The class of TRL that a trainer is or derives from."""
    return next((base for base in trainer.__mro__ if base.__module__.startswith("trl.")), None)


@dataclass(kw_only=True)
class TrainerLoop:
    """A trainer as the audit's ``build`` and ``step``.

    Attributes:
        trainer: the class.
        model: architecture.
        arguments: of the trainer's configuration, over those of the audit.
        samples: of the audit.
        folder: for what the trainer writes, and for what was evaluated.
    """

    trainer: type
    model: str
    arguments: Mapping[str, Any]
    samples: Sequence[Sample]
    folder: Path
    _layout: Layout | None = field(default=None, init=False)
    _windows_done: int = field(default=0, init=False)

    def build(self, layout: Layout) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new tiny model and its optimizer."""
        from accelerate.state import AcceleratorState, GradientState

        if not gc.get_freeze_count():
            # Trainer and Accelerate collect garbage at every turn; leave out what was imported before.
            gc.freeze()
        # What an earlier layout in this process has configured.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # Accelerate warns where it isn't set.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._layout, self._windows_done = layout, 0
        model = tiny_model(self.model)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, model: nn.Module, optimizer: Any, micro_batches: list[dict[str, Tensor]]) -> dict[str, float]:
        """A run of the trainer over this rank's share of one window; what it logged."""
        assert self._layout is not None
        trainer = self._make(model, optimizer, micro_batches)
        trainer.train()
        logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
        if self._windows_done == 0:
            self._evaluate(trainer, model)
        self._windows_done += 1
        # The DDP that the trainer put around the model goes, with its hooks.
        trainer.accelerator.free_memory()
        del trainer
        gc.collect()
        return {name: logged[name] for name in ("loss", "grad_norm") if name in logged}

    def _make(self, model: nn.Module, optimizer: Any, micro_batches: list[dict[str, Tensor]]) -> Any:
        assert self._layout is not None
        values = {
            "output_dir": str(self.folder / "trainer"),
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "save_strategy": "no",
            "logging_strategy": "steps",
            "logging_steps": 1,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": _HELD_OUT_ROWS,
            "gradient_accumulation_steps": self._layout.accumulation_steps,
            "num_train_epochs": 1,
            "train_sampling_strategy": "sequential",
            "dataloader_pin_memory": False,
            "remove_unused_columns": False,
        }
        options: dict[str, Any] = {}
        # The loader deals items out to the ranks in turn; a rank reads only its own.
        items = [_lists(batch) for batch in micro_batches for _ in range(dist.get_world_size())]
        held_out = [_row(self.samples[number]) for number in _HELD_OUT]
        configuration = _configuration_of(self.trainer)
        if configuration.__module__.startswith("trl."):
            # The data are tokens already; and what TRL switches on by itself would blur the comparison.
            values |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
            values |= {"bf16": False, "gradient_checkpointing": False}
            options["processing_class"] = build_tokenizer()
            from datasets import Dataset

            items, held_out = Dataset.from_list(items), Dataset.from_list(held_out)
        return self.trainer(
            model=model,
            args=configuration(**{**values, **self.arguments}),
            train_dataset=items,
            eval_dataset=held_out,
            data_collator=_collate,
            optimizers=(optimizer, None),
            **options,
        )

    def _evaluate(self, trainer: Any, model: nn.Module) -> None:
        """Note the trainer's evaluation loss next to the right one, on rank 0."""
        assert self._layout is not None
        found = float(trainer.evaluate()["eval_loss"])
        if dist.get_rank() == 0:
            right = self._right_evaluation(model)
            entry = {"layout": self._layout.name, "ranks": self._layout.ranks, "loss": found, "right": right}
            with (self.folder / "evaluations.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    @torch.no_grad()
    def _right_evaluation(self, model: nn.Module) -> float:
        """Sum of token losses over their number: one sample at a time, plain model, float64."""
        plain: Any = tiny_model(self.model)
        plain.load_state_dict(copy.deepcopy(model.state_dict()))
        plain.double().eval()
        total, count = 0.0, 0
        for number in _HELD_OUT:
            batch = collate([self.samples[number]], False)
            logits = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            total += F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum").item()
            count += self.samples[number].supervised_tokens
        return total / count


def _configuration_of(trainer: type) -> Any:
    """The class of a trainer's arguments."""
    if _trl_base(trainer) is not None:
        from trl.trainer.sft_config import SFTConfig

        return SFTConfig
    from transformers import TrainingArguments

    return TrainingArguments


def _lists(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """A micro-batch as an item of a data set."""
    return {key: value.tolist() for key, value in batch.items()}


def _row(sample: Sample) -> dict[str, list[int]]:
    return {"input_ids": list(sample.input_ids), "labels": list(sample.labels)}


def _collate(features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A micro-batch of the audit as it is, or held-out rows, padded."""
    if isinstance(features[0]["input_ids"][0], list):
        return {key: torch.tensor(value) for key, value in features[0].items()}
    rows = [Sample(input_ids=tuple(row["input_ids"]), labels=tuple(row["labels"])) for row in features]
    return collate(rows, False)


def audit_trainer(
    target: str | type,
    *,
    model: str = "llama",
    arguments: Mapping[str, Any] | None = None,
    integration: bool = False,
    ranks: Sequence[int] = (1, 2),
    layouts: Sequence[Layout] | None = None,
    packed: bool = True,
    say: Callable[[str], None] | None = None,
    **options: Any,
) -> TrainerReport:
    """Audit a trainer with a tiny model.

    Args:
        target: the class, or its import path ``module:Class``.
        model: architecture, as :func:`~tokennorm.recipes.audit.trainer_models.tiny_model` knows it.
        arguments: of the trainer's configuration (``{"label_smoothing_factor": 0.1}``).
        integration: make the class exact first (:func:`tokennorm.integrations.hf.token_normalised`).
        ranks: of the default layouts, run those with these numbers of ranks.
        layouts: instead of the default ones.
        packed: of the default layouts, run the packed ones too.
        say: is told what the audit is about to do.
        **options: of :func:`tokennorm.audit.audit_loop`.

    Raises:
        ConfigError: no such class, no such architecture, or arguments that the trainer refuses.
    """
    found = find_trainer(target) if isinstance(target, str) else target
    name = f"{found.__module__.split('.')[0]}:{found.__name__}"
    if integration:
        from tokennorm.integrations.hf import token_normalised

        found = token_normalised(found)
        name += " with the integration"
    given = dict(arguments or {})
    with tempfile.TemporaryDirectory(prefix="tokennorm-audit-trainer-") as folder:
        loop = TrainerLoop(
            trainer=found, model=model, arguments=given, samples=make_samples(VOCABULARY), folder=Path(folder)
        )
        report = audit_loop(
            loop.build,
            loop.step,
            layouts=default_layouts(ranks=ranks, packed=packed) if layouts is None else layouts,
            samples=loop.samples,
            label_smoothing=float(given.get("label_smoothing_factor", 0.0)),
            say=say,
            **options,
        )
        noted = Path(folder) / "evaluations.jsonl"
        lines = noted.read_text().splitlines() if noted.exists() else []
    return TrainerReport(
        trainer=name,
        model=model,
        audit=report,
        evaluations=tuple(Evaluation(**json.loads(line)) for line in lines),
    )
