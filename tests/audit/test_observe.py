"""What is seen of a loop: every gradient at the moment when an optimizer reads it, and before clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from tokennorm.audit.observe import Observer, as_logged, changed_keys, torch_optimizers
from tokennorm.errors import AuditError


class Wrapped:
    """As some trainers wrap an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def two_layers():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return model, [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]


def test_gradients_are_those_that_the_optimizer_reads():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer = Observer(model, optimizer)
    before = model.weight.detach().clone()
    with observer.window() as record:
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None
        model.weight.grad.mul_(3)  # whatever the loop does before the step is seen
        optimizer.step()
        optimizer.zero_grad()
    (step,) = record.steps
    assert step["weight"] is not None
    assert step["weight"].tolist() == [[3.0, 3.0]]
    assert torch.equal(record.parameters["weight"], before)
    optimizer.step()  # outside of a window nothing is recorded
    assert len(record.steps) == 1


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_has_run_when_the_gradients_are_read(by_name):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.full((1, 2), 3.0)).sum()
        loss.backward()
        return loss

    with Observer(model, optimizer).window() as record:
        model(torch.ones(1, 2)).sum().backward()
        loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
    assert loss is not None
    (step,) = record.steps
    assert step["weight"] is not None
    assert step["weight"].tolist() == [[3.0, 3.0]]


def test_optimizers_of_disjoint_parameters_share_a_step():
    model, optimizers = two_layers()
    observer = Observer(model, [Wrapped(optimizers[0]), optimizers[1]])
    with observer.window() as record:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert len(record.steps) == 2
    assert all(set(step) == {"0.weight", "0.bias", "1.weight", "1.bias"} for step in record.steps)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(AuditError, match="expects an optimizer"):
        torch_optimizers(nn.Linear(1, 1))


def spelled_out(parameters) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, norm)


def imported_by_name(parameters) -> None:
    clip_grads_with_norm_(parameters, 0.5, torch.nn.utils.get_total_norm([p.grad for p in parameters]))


@pytest.mark.parametrize(
    "clip",
    [lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5), spelled_out, imported_by_name],
    ids=["clip_grad_norm_", "clip_grads_with_norm_", "imported by name"],
)
def test_gradients_before_clipping(clip):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Observer(model, optimizer).window() as record:
        model(torch.full((1, 2), 2.0)).sum().backward()
        clip(list(model.parameters()))
        optimizer.step()
    (seen,) = record.clips
    assert seen.max_norm == 0.5
    assert seen.total_norm == pytest.approx(3.0)  # 2, 2, and 1 for the bias
    assert seen.gradients_before["weight"] is not None
    assert seen.gradients_before["weight"].tolist() == [[2.0, 2.0]]
    assert record.steps[0]["weight"] is not None
    assert record.steps[0]["weight"].tolist()[0] == pytest.approx([1 / 3, 1 / 3], rel=1e-5)
    # The note-taker is gone again.
    assert nn.utils.clip_grad._clip_grads_with_norm_.__module__ == "torch.nn.utils.clip_grad"
    assert clip_grads_with_norm_.__module__ == "torch.nn.utils.clip_grad"


def test_what_a_step_logged():
    assert as_logged(None) == {}
    assert as_logged(torch.tensor(2.5, requires_grad=True)) == {"loss": 2.5}
    assert as_logged({"loss": 1, "tokens": torch.tensor(7), "lr": 3, "grad_norm": None}) == {
        "loss": 1.0,
        "tokens": 7.0,
    }
    assert as_logged(torch.ones(3)) == {}


def test_changes_of_the_data_are_seen():
    kept = [{"a": torch.ones(2), "b": torch.ones(2), "c": 1}]
    assert changed_keys(kept, [{"a": torch.ones(2), "b": torch.ones(2), "c": 1}]) == ()
    assert changed_keys(kept, [{"a": torch.zeros(2), "c": 1}]) == ("a", "b")
