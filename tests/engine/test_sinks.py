"""Metrics reach the services that were asked for; one that breaks is switched off, a missing one is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig, MixtralForCausalLM

from tests.engine.toy import ToyWindows, build_engine
from tokennorm.engine import LoopConfig, RunFolder, Runtime, evaluate, train
from tokennorm.engine.records import metrics_to_sinks
from tokennorm.engine.sinks import GuardedSinks, open_sinks, scalars
from tokennorm.engine.throughput import StepCost, known_peak_tflops
from tokennorm.errors import ConfigError, DistributedError, MissingDependencyError
from tokennorm.testing import spawn_ranks


class Writer:
    """What SummaryWriter is called with."""

    made: Writer

    def __init__(self, **options: Any) -> None:
        Writer.made, self.options, self.values, self.closed = self, options, [], 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.append((name, value, step))

    def close(self) -> None:
        self.closed += 1


class Service(ModuleType):
    """trackio or wandb."""

    def __init__(self, name: str, fails_at: int | None = None) -> None:
        super().__init__(name)
        self.options: list[dict[str, Any]] = []
        self.values: list[tuple[int, dict[str, float]]] = []
        self.finished, self.fails_at = 0, fails_at

    def init(self, **options: Any) -> None:
        self.options.append(options)

    def log(self, values: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ConnectionError("no route")
        self.values.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> dict[str, Service]:
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    made = {"wandb": Service("wandb"), "trackio": Service("trackio", fails_at=2)}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_a_training_feeds_its_sinks_and_goes_on_without_one_that_breaks(
    tmp_path: Path, services: dict[str, Service], capsys: pytest.CaptureFixture[str]
) -> None:
    engine, run = build_engine(), RunFolder(tmp_path / "run")
    run.describe({"lr": 0.1})
    names = ("tensorboard", "trackio", "wandb")
    train(
        engine,
        ToyWindows(),
        total_steps=4,
        config=LoopConfig(sinks=names, project="p"),
        evaluate=lambda: evaluate(engine.model, engine.objective, ToyWindows().windows[0]),
        run=run,
    )
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4, 4]
    assert [(step, values) for step, values in services["wandb"].values] == [
        (record["step"], pytest.approx(scalars(record))) for record in records
    ]
    losses = [(value, step) for name, value, step in Writer.made.values if name == "loss"]
    assert losses == [(record["loss"], record["step"]) for record in records if "loss" in record]
    assert [step for step, _ in services["trackio"].values] == [0, 1]
    said = capsys.readouterr().err
    assert said.count("warning: no more metrics go to trackio after step 2: ConnectionError: no route") == 1
    assert (Writer.made.closed, services["wandb"].finished, services["trackio"].finished) == (1, 1, 0)
    assert Writer.made.options == {"log_dir": str(tmp_path / "run" / "tensorboard"), "purge_step": 1}
    assert services["wandb"].options[0]["config"] == {"lr": 0.1}
    # A run that goes on in its folder is the same run there.
    open_sinks(["wandb", "trackio"], folder=tmp_path / "run", project="p").close()
    assert services["wandb"].options[0] == services["wandb"].options[1]
    assert services["trackio"].options[0] == services["trackio"].options[1]


def cannot_start(**_: Any) -> None:
    raise PermissionError("not logged in")


def test_a_sink_that_cannot_start_ends_a_new_run_and_not_one_that_goes_on(
    tmp_path: Path, services: dict[str, Service]
) -> None:
    services["wandb"].init = cannot_start  # type: ignore[method-assign]
    said: list[str] = []
    with pytest.raises(ConfigError, match="wandb could not be started: PermissionError: not logged in"):
        open_sinks(["trackio", "wandb"], folder=tmp_path, say=said.append)
    assert (services["trackio"].finished, said) == (1, [])
    sinks = open_sinks(["trackio", "wandb"], folder=tmp_path, say=said.append, first_step=7)
    assert said == [
        "warning: no metrics go to wandb, which could not be started: PermissionError: not logged in "
        "(metrics.jsonl has all of them)"
    ]
    sinks.log({"step": 8, "loss": 1.0})
    assert services["trackio"].values == [(8, {"loss": 1.0})]


def starts_without_login(rank: int, world_size: int, folder: str) -> str:
    wandb = Service("wandb")
    wandb.init = cannot_start  # type: ignore[method-assign]
    sys.modules["wandb"] = wandb
    run = RunFolder(folder, runtime=Runtime(rank=rank, local_rank=rank, world_size=world_size))
    with (
        pytest.raises((ConfigError, DistributedError), match="wandb could not be started") as caught,
        metrics_to_sinks(run, LoopConfig(sinks=("wandb",)), 0),
    ):
        pass
    return type(caught.value).__name__


def test_all_ranks_hear_of_a_sink_that_cannot_start(tmp_path: Path) -> None:
    found = [one.value for one in spawn_ranks(starts_without_login, 2, str(tmp_path / "run"), timeout_s=200)]
    assert found == ["ConfigError", "DistributedError"]


def test_a_sink_that_fails_to_close_is_no_error_and_an_interrupt_is_not_swallowed() -> None:
    class Bad:
        def log(self, record: Any) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            raise OSError("disk")

    said: list[str] = []
    sinks = GuardedSinks({"bad": Bad()}, said.append)
    with pytest.raises(KeyboardInterrupt):
        sinks.log({"step": 1})
    sinks.close()
    assert said == ["warning: closing bad failed: OSError: disk"]


def test_numbers_only_and_finite() -> None:
    record = {"step": 3, "loss": float("nan"), "lr": 1, "skipped": "empty window", "x": None, "refused": [1, 2]}
    assert scalars(record) == {"lr": 1.0, "refused": 2.0}


def test_a_missing_package_is_named_with_its_command_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"'wandb' is not installed(.|\n)*pip install wandb"):
        LoopConfig(sinks=("wandb",))
    with pytest.raises(ConfigError, match=r"loop\.sinks holds 'mlflow'"):
        LoopConfig(sinks=("mlflow",))  # type: ignore[arg-type]


class TinyLM(torch.nn.Module):
    """Sizes that can be counted by hand: a body of 3 x 3, an embedding and a head of 5 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 2, "hidden_size": 3})()
        self.embedding = torch.nn.Embedding(5, 3)
        self.body = torch.nn.Linear(3, 3, bias=False)
        self.head = torch.nn.Linear(3, 5, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def test_mfu_is_the_counted_work_over_the_peak() -> None:
    model = TinyLM()
    # Two documents of 4 and 2 tokens in one row, then a row of 6: a mean length of 4.
    window = [
        {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]]), "total_tokens": 6},
        {"position_ids": torch.arange(6)[None], "total_tokens": 6},
    ]
    numbers = {"total_tokens": 12, "effective_tokens": 5, "seconds": 2.0}
    cost = StepCost(model, torch.device("cpu"), peak_tflops=1e-9, ranks=2)
    work = (6 * 9 + 12 * 2 * 3 * 4) * 12 + 6 * 15 * 5
    assert cost.measure(window, **numbers)["mfu"] == pytest.approx(work / 2.0 / 2e3)
    model.body.requires_grad_(False)
    frozen = StepCost(model, torch.device("cpu"), peak_tflops=1e-9, ranks=2).measure(window, **numbers)
    assert frozen["mfu"] == pytest.approx((work - 2 * 9 * 12) / 2.0 / 2e3)
    # Counted by somebody else: this rank's 12 of all ranks' 24 tokens took 700.
    own = StepCost(
        model, torch.device("cpu"), peak_tflops=1e-9, ranks=2, work=lambda batches: 350.0 * len(batches)
    )
    assert own.measure(window, **{**numbers, "total_tokens": 24})["mfu"] == pytest.approx(1400 / 2.0 / 2e3)
    assert "mfu" not in own.measure([{"total_tokens": 0}], **numbers)
    unknown = StepCost(model, torch.device("cpu")).measure(window, **numbers)
    assert "mfu" not in unknown
    assert 2**20 < unknown["memory_bytes"] < 2**40


def test_mfu_of_experts_counts_those_that_a_token_is_sent_to() -> None:
    config = MixtralConfig(
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
    )
    model = MixtralForCausalLM(config)
    # Plain products only: others are hidden from the counter.
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    ids = torch.randint(96, (1, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    window = [{"position_ids": torch.arange(64)[None], "total_tokens": 64}]
    numbers = {"total_tokens": 64, "effective_tokens": 64, "seconds": 1.0}
    cost = StepCost(model, torch.device("cpu"), peak_tflops=1.0)
    assert cost.measure(window, **numbers)["mfu"] * 1e12 == pytest.approx(counter.get_total_flops(), rel=0.05)
    vars(config)["num_experts_per_tok"] = None
    assert "mfu" not in StepCost(model, torch.device("cpu"), peak_tflops=1.0).measure(window, **numbers)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("A card of tomorrow", None),
    ],
)
def test_the_peak_of_known_cards(name: str, peak: float | None) -> None:
    assert known_peak_tflops(name) == peak
