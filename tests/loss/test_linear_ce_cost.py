"""What the operator costs: matrix products, memory and host synchronisations, counted rather than timed."""

from __future__ import annotations

import pytest
import torch

from tests.loss.reference import IGNORE, relative_error
from tests.operator_cost import OperatorCost
from tokennorm.errors import LabelError, LossUsageError
from tokennorm.loss import label_checks, linear_cross_entropy, raise_pending_label_errors
from tokennorm.testing.no_sync import RefuseHostSync

N, D, V, CHUNK = 48, 16, 301, 8


def inputs(supervised: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, generator=generator, requires_grad=True)
    labels = torch.randint(0, V, (N,), generator=generator)
    count = round(N * supervised)
    labels[torch.randperm(N, generator=generator)[count:]] = IGNORE
    return hidden, weight, labels, count


@pytest.mark.parametrize(("supervised", "products"), [(1.0, 3), (0.5, 3), (0.0, 0)])
def test_three_products_of_the_supervised_rows(supervised: float, products: int) -> None:
    hidden, weight, labels, count = inputs(supervised)
    with OperatorCost() as counter:
        # The engine's path: per-token losses, their sum, a provisional divisor.
        (linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK).sum() / 64).backward()
    assert counter.multiply_adds == products * count * D * V


def test_fewer_products_where_less_is_asked_for() -> None:
    hidden, weight, labels, _ = inputs()
    for frozen_hidden, frozen_weight, products in ((False, True, 2), (True, False, 2), (True, True, 1)):
        with OperatorCost() as counter:
            h, w = (
                hidden.detach().requires_grad_(not frozen_hidden),
                weight.detach().requires_grad_(not frozen_weight),
            )
            loss = linear_cross_entropy(h, w, labels, chunk_size=CHUNK).sum()
            if loss.requires_grad:
                loss.backward()
        assert counter.multiply_adds == products * N * D * V
    with OperatorCost() as counter, torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK)
    assert counter.multiply_adds == N * D * V


def test_a_varied_upstream_costs_one_more_pass() -> None:
    hidden, weight, labels, _ = inputs()
    with OperatorCost() as counter:
        linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK).backward(torch.rand(N))
    assert counter.multiply_adds == 6 * N * D * V


@pytest.mark.parametrize("uniform", [True, False])
def test_one_chunk_of_logits_lives_at_a_time(uniform: bool) -> None:
    hidden, weight, labels, _ = inputs()
    with OperatorCost() as counter:
        loss = linear_cross_entropy(hidden, weight, labels, chunk_size=CHUNK, z_loss=0.1, stats=("entropy",))[0]
        loss.backward(torch.ones(()).expand(N) if uniform else torch.rand(N))
    assert counter.largest == max(CHUNK * V, V * D)
    with OperatorCost() as counter:
        torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum").backward()
    assert counter.largest >= N * V


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch):
    """Treat the CPU as a device on which reading a value would stall."""
    monkeypatch.setattr(label_checks, "defers", lambda device: True)
    yield
    label_checks._pending.clear()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("supervised", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_no_host_sync_when_the_host_knows_the_count(supervised: float, reduction: str) -> None:
    hidden, weight, labels, count = inputs(supervised)
    weights = torch.rand(N)
    with RefuseHostSync():
        loss, stats = linear_cross_entropy(
            hidden,
            weight,
            labels,
            num_supervised=count,
            token_weights=weights,
            stats=("entropy", "is_top1"),
            reduction=reduction,
            chunk_size=CHUNK,
        )
        (loss.sum() / 8).backward()
    assert stats["entropy"].shape == (N,)
    raise_pending_label_errors()
    # Without the count there is exactly the documented one, and the mode sees it.
    with pytest.raises(Exception, match="nonzero"), RefuseHostSync():
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.usefixtures("accelerator")
def test_a_bad_label_is_raised_at_the_next_sync() -> None:
    hidden, weight, labels, count = inputs(0.5)
    rows = (labels != IGNORE).nonzero().squeeze(1)
    labels[rows[3]] = V + 5
    with RefuseHostSync():
        linear_cross_entropy(hidden, weight, labels, num_supervised=count).sum().backward()
    # A good call in between does not hide it, and it is raised once.
    linear_cross_entropy(hidden, weight, labels.clamp(max=V - 1), num_supervised=count)
    with pytest.raises(LabelError, match=rf"label {V + 5} at row {int(rows[3])} "):
        raise_pending_label_errors(torch.device("cpu"))
    raise_pending_label_errors()


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("off_by", [-2, 3])
def test_a_wrong_host_count_is_raised_at_the_next_sync(off_by: int) -> None:
    hidden, weight, labels, count = inputs(0.5)
    loss = linear_cross_entropy(hidden, weight, labels, num_supervised=count + off_by)
    if off_by > 0:
        # Rows that aren't there count nothing meanwhile.
        assert relative_error(loss, linear_cross_entropy(hidden, weight, labels, num_supervised=count)) == 0
    with pytest.raises(LossUsageError, match="num_supervised"):
        raise_pending_label_errors()
