"""Whatever a model does to deferred logits gives what it gives with real ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokennorm.errors import PatchError
from tokennorm.kit.deferred_logits import DeferredLogits, HeadCall

B, S, D, V = 2, 5, 8, 13


class Setup:
    """A head in float64, its input, and the same logits twice: real and deferred."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(D, V).double()
        self.hidden = torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
        self.materialised: list[str] = []
        self.source = HeadCall(
            self.head, self.head, self.hidden, V, torch.float64, on_materialise=self.materialised.append
        )
        self.deferred = self.source.logits()
        self.real = self.head(self.hidden)


def _softcap(logits):
    return 3.0 * torch.tanh(logits / 3.0)


def _granite_in_place(logits):
    logits /= 0.25
    return logits


def _in_place_softcap(logits):
    logits = logits.clone()
    logits.div_(5).tanh_()
    return logits * 5


RECORDED = {
    "multiply": lambda it: it * 0.5,
    "multiply from the left": lambda it: 0.5 * it,
    "torch.mul": lambda it: torch.mul(it, 3),
    "divide": lambda it: it / 8.0,
    "a 0-d tensor": lambda it: it * torch.tensor(0.3, dtype=torch.float64),
    "a 0-d tensor from the left": lambda it: torch.tensor(0.3, dtype=torch.float64) * it,
    "softcap": _softcap,
    "softcap, nn.functional": lambda it: F.tanh(it / 30.0) * 30.0,
    "negative softcap": lambda it: -2.0 * torch.tanh(it * 0.7),
    "scale after softcap": lambda it: _softcap(it) * 0.1,
    "in-place divide": _granite_in_place,
    "in-place softcap": _in_place_softcap,
    "cast": lambda it: it.to(torch.float64).double().type(torch.float64),
    "to like another": lambda it: it.to(torch.zeros(1, dtype=torch.float64)),
    "shift": lambda it: it[..., :-1, :].contiguous(),
    "slice of the sequence": lambda it: it[:, 1:-1],
    "last position": lambda it: it[:, -1],
    "vocabulary": lambda it: it[..., :7],
    "vocabulary and rows": lambda it: it[:, 1:, 2:9] * 2,
    "vocabulary twice": lambda it: it[..., 2:][..., 1:5],
    "rows by mask": lambda it: it[torch.tensor([[True, False, True, True, False]] * B)],
    "rows by index": lambda it: it[:, torch.tensor([3, 1])],
    "new axis": lambda it: it[:, None],
    "flat": lambda it: it.view(-1, V),
    "flat, shape as a tuple": lambda it: it.reshape((B * S, -1)),
    "flatten": lambda it: it.flatten(0, 1),
    "everything": lambda it: _softcap((it.view(-1, V) / 4)[2:-1, 1:10].contiguous().float()) * 1.5,
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_operations_give_what_real_logits_give(name):
    setup = Setup()
    got, want = RECORDED[name](setup.deferred), RECORDED[name](setup.real)
    assert isinstance(got, DeferredLogits)
    assert not setup.materialised
    assert (got.shape, got.dtype, got.device, got.dim(), got.size(-1), got.numel(), len(got)) == (
        *(want.shape, want.dtype, want.device, want.dim(), want.size(-1), want.numel(), len(want)),
    )
    upstream = torch.randn(want.shape, dtype=want.dtype)
    real = got.materialise("test")
    torch.testing.assert_close(real, want, atol=1e-6 if want.dtype == torch.float32 else 1e-12, rtol=1e-6)
    _same_gradients(setup, (real * upstream).sum(), (want * upstream).sum())


def _in_place_mask(logits):
    logits[..., 3:5] = -1e4
    return logits


def _view_of_masked(logits):
    logits[:, 0] = 0.0
    return logits.view(-1, V)


def _learnt_scale(logits):
    return logits * nn.Parameter(torch.tensor(0.4, dtype=torch.float64))


def _chunked_in_place(logits):
    with torch.no_grad():
        logits[:, 1:3] = _softcap(logits[:, 1:3])
    return logits


REAL = {
    "logsumexp": lambda it: it.logsumexp(dim=-1),
    "softmax": lambda it: torch.softmax(it, dim=-1),
    "two tanh": lambda it: torch.tanh(torch.tanh(it)),
    "add": lambda it: it + 1.0,
    "add a tensor": lambda it: torch.ones(V, dtype=torch.float64) + it,
    "itself": lambda it: it * it,
    "masked vocabulary": _in_place_mask,
    "masked rows, then a view": _view_of_masked,
    "a learnt scale": _learnt_scale,
    "scale per token": lambda it: it * torch.arange(1.0, S + 1, dtype=torch.float64)[:, None],
    "times 0": lambda it: it * 0.0,
    "strided vocabulary": lambda it: it[..., ::2],
    "one logit": lambda it: it[..., 3],
    "vocabulary by index": lambda it: it[..., [1, 2]],
    "view that splits the vocabulary": lambda it: it.view(B, S * V),
    "transpose": lambda it: it.transpose(0, 1),
    "stack": lambda it: torch.stack([it, it]),
    "integers": lambda it: it.argmax(dim=-1),
    "softcap of part, without gradients": _chunked_in_place,
    "gradient function": lambda it: it.requires_grad and it.grad_fn is not None,
}


@pytest.mark.parametrize("name", REAL)
def test_other_operations_make_the_logits_real(name):
    setup = Setup()
    got, want = REAL[name](setup.deferred), REAL[name](setup.real)
    assert setup.materialised
    if isinstance(got, DeferredLogits):
        got = got.materialise("test")
    if not isinstance(want, Tensor):
        assert got == want
        return
    torch.testing.assert_close(got, want)
    if want.requires_grad and want.detach().any():
        _same_gradients(setup, got.sin().sum(), want.sin().sum())


def test_comparison_notices_a_dropped_operation():
    """The planted mistake: a recording that forgets the scale."""
    setup = Setup()
    forgotten, want = setup.deferred.contiguous(), setup.real * 0.5
    with pytest.raises(AssertionError):
        torch.testing.assert_close(forgotten.materialise("test"), want)


def test_head_runs_once_however_often_logits_are_needed():
    setup = Setup()
    scaled = setup.deferred * 2
    setup.deferred.exp()
    scaled.exp()
    setup.deferred.view(-1, V).sum()
    assert len(setup.materialised) == 1


def test_write_through_one_view_and_read_through_another_is_refused():
    setup = Setup()
    flat = setup.deferred.view(-1, V)
    flat.mul_(2)
    with pytest.raises(PatchError, match="in place"):
        _ = setup.deferred * 1.0


def test_copy_is_not_touched_by_a_write_to_the_original():
    setup = Setup()
    copied, real_copy = setup.deferred.clone(), setup.real.clone()
    setup.deferred[:, 0] = 0.0
    torch.testing.assert_close(copied.materialise("test"), real_copy)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, upstream):
        return upstream * 2


def test_gradient_of_a_custom_autograd_function_raises_instead_of_vanishing():
    setup = Setup()
    got = _Fused.apply(setup.deferred).exp()
    torch.testing.assert_close(got, (setup.real * 2).exp())
    with pytest.raises(PatchError, match="never computed"):
        got.sum().backward()


def test_what_would_have_no_gradient_is_refused():
    setup = Setup()
    with pytest.raises(PatchError, match="memory"):
        setup.deferred.data_ptr()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(PatchError, match="below the layer"):
        torch.exp(setup.deferred)
    with pytest.raises(PatchError, match="out="):
        torch.exp(setup.real.detach(), out=setup.deferred)


def test_real_logits_have_a_graph_even_if_first_needed_without_gradients():
    setup = Setup()
    with torch.no_grad():
        setup.deferred.argmax()
    assert setup.deferred.materialise("test").requires_grad


def test_repr_computes_nothing():
    setup = Setup()
    assert "DeferredLogits" in repr(setup.deferred)
    assert not setup.materialised


def _same_gradients(setup: Setup, got: Tensor, want: Tensor) -> None:
    inputs = [setup.hidden, *setup.head.parameters()]
    mine = torch.autograd.grad(got, inputs, retain_graph=True)
    theirs = torch.autograd.grad(want, inputs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
        assert other.abs().max() > 1e-6
