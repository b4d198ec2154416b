"""The code in docs/dspark.md runs as it stands there and does what it says; its picture of the mask is right."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.draft.targets import VOCAB, tiny_target
from tokennorm.data import Sample, collate_padded
from tokennorm.draft import dspark_objective
from tokennorm.draft.masks import block_attention_mask

DOCS = Path(__file__).parents[2] / "docs" / "dspark.md"
SETUP, STEP, FULL_LOGITS, DECODE, EXPORT = range(5)


def _examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)


def _run(names: dict[str, Any], *numbers: int) -> None:
    for number in numbers:
        exec(compile(_examples()[number], f"{DOCS.name} example {number}", "exec"), names)


def _window(*lengths: int) -> list[Any]:
    """Micro-batches of one document each, the first third of it a prompt."""
    batches = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(number))
        supervised = torch.arange(length) >= length // 3
        batches.append(collate_padded([Sample(input_ids=ids, supervised=supervised, source="")], pad_token_id=0))
    return batches


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return {
        "target": tiny_target("llama"),
        # Very uneven: the second micro-batch has room for one block.
        "windows": [_window(30, 5)],
        "device": "cpu",
        "rank": 0,
        "world_size": 1,
        "seed": 0,
        "make_optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        "prompt_ids": [1, 5, 7, 9],
        "stop_ids": [2],
    }


def _double(names: dict[str, Any]) -> None:
    names["drafter"].double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in names["drafter"].parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _ratios(names: dict[str, Any], drafter: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(loss, sum of weights)`` of each micro-batch, from all logits with the page's own call."""
    pairs = []
    (window,) = names["windows"]
    for number, batch in enumerate(window):
        blocks, documents = names["blocks_of"](batch, 0, number)
        states = names["capture"](input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        output = drafter(
            blocks=blocks, features=states.features, position_ids=batch["position_ids"], documents=documents
        )
        here = {
            **names,
            "blocks": blocks,
            "output": output,
            "target_logits": names["target"](batch["input_ids"]).logits,
        }
        _run(here, FULL_LOGITS)
        pairs.append((here["loss"], here["terms"]["confidence_diag_den"]))
    return pairs


def test_the_training_step_is_exact_over_its_window(names: dict[str, Any]) -> None:
    _run(names, SETUP)
    _double(names)
    before = copy.deepcopy(names["drafter"])
    _run(names, STEP)
    pairs = _ratios(names, before)
    weights = torch.stack([weight for _, weight in pairs])
    assert weights[0] > 4 * weights[1] > 0
    exact = sum(loss * weight for loss, weight in pairs) / weights.sum()
    mean_of_ratios = sum(loss for loss, _ in pairs) / len(pairs)
    trained = [p for p in before.parameters() if p.requires_grad]
    right = torch.autograd.grad(exact, trained, retain_graph=True)
    wrong = torch.autograd.grad(mean_of_ratios, trained)
    assert names["stats"].mean_loss == pytest.approx(float(exact.detach()), rel=1e-12)
    after = [p for p in names["drafter"].parameters() if p.requires_grad]
    step = torch.cat([(a - b).flatten() for a, b in zip(trained, after, strict=True)]).detach()
    right, wrong = (torch.cat([g.flatten() for g in each]) for each in (right, wrong))
    assert (step - right).norm() < 1e-10 * right.norm()
    assert (step - wrong).norm() > 1e-2 * right.norm()


def test_full_logits_give_the_objective_s_numbers(names: dict[str, Any]) -> None:
    _run(names, SETUP)
    _double(names)
    (batch, _), drafter = names["windows"][0], names["drafter"]
    blocks, documents = names["blocks_of"](batch, 0, 0)
    states = names["capture"](input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    output = drafter(
        blocks=blocks, features=states.features, position_ids=batch["position_ids"], documents=documents
    )
    sums = dspark_objective(
        plan=blocks.plan(drafter.vocabulary),
        **output.objective_arguments(),
        teacher_hidden=states.last_hidden,
        teacher_head=names["head"],
        **names["alphas"],
    )
    logits = names["target"](batch["input_ids"]).logits
    names |= {"blocks": blocks, "output": output, "target_logits": logits}
    _run(names, FULL_LOGITS)
    expected = float(sums.loss_sum.detach() / sums.denominator)
    assert float(names["loss"].detach()) == pytest.approx(expected, rel=1e-12)


def test_decoding_and_export(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    _run(names, SETUP)
    _double(names)
    _run(names, DECODE)
    assert names["answer"].rounds
    names["drafter"].float()
    _run(names, EXPORT)
    printed = capsys.readouterr().out
    assert "tokens per round" in printed
    assert "vLLM: can load it" in printed
    for name, value in names["again"].state_dict().items():
        torch.testing.assert_close(value, names["drafter"].state_dict()[name], rtol=1e-2, atol=1e-2)


def test_the_drawn_attention_mask_is_the_one_used() -> None:
    rows = re.findall(r"^block at (\d)((?: +[x.])+)$", DOCS.read_text(), flags=re.MULTILINE)
    anchors = torch.tensor([[int(anchor) for anchor, _ in rows]])
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    mask = block_attention_mask(anchors, 3, 8, documents)[0, 0]
    assert len(rows) == 2
    for number, (_, marks) in enumerate(rows):
        drawn = torch.tensor([mark == "x" for mark in marks.split()])
        assert torch.equal(mask[3 * number : 3 * number + 3], drawn.expand(3, -1))
