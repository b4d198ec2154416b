"""linear_cross_entropy against a float64 reference: every option, dtype and kind of upstream gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.loss.reference import IGNORE, naive_losses, relative_error
from tokennorm.errors import LabelError, LossUsageError
from tokennorm.loss import LogitTransform, default_chunk_size, linear_cross_entropy

N, D, V = 41, 16, 97
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"scale": 2.0, "softcap": 1.5},
    "smoothing": {"label_smoothing": 0.2},
    "z_loss": {"z_loss": 0.02},
    "weights": {"token_weights": True},
    "everything": {
        "bias": True,
        "scale": 1.7,
        "softcap": 3.0,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "token_weights": True,
    },
}
UPSTREAMS = ("uniform", "varied", "mostly_zero")


class Case:
    """Inputs in one dtype, the operator's keywords and the reference's, and an upstream gradient."""

    def __init__(
        self, name: str, dtype: torch.dtype, upstream: str, *, supervised: float = 0.6, seed: int = 0
    ) -> None:
        options = dict(OPTIONS[name])
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden, self.weight = normal(N, D), normal(V, D)
        self.labels = torch.randint(0, V, (N,), generator=generator)
        self.labels[torch.rand(N, generator=generator) >= supervised] = IGNORE
        self.bias = normal(V) if options.pop("bias", False) else None
        weights = torch.rand(N, generator=generator) * 3 if options.pop("token_weights", False) else None
        self.reference_options = {**options, "token_weights": weights}
        transform = LogitTransform(scale=options.pop("scale", 1.0), softcap=options.pop("softcap", None))
        self.options = {**options, "transform": transform, "token_weights": weights}
        upstream_values = torch.randn(N, generator=generator, dtype=torch.float64)
        if upstream == "mostly_zero":
            upstream_values[torch.rand(N, generator=generator) < 0.7] = 0.0
        self.upstream = (
            torch.tensor(0.37, dtype=torch.float64).expand(N) if upstream == "uniform" else upstream_values
        )

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        tensors = [t for t in (self.hidden, self.weight, self.bias) if t is not None]
        return [t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors]

    def operator(self, **extra: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Losses and the gradients of hidden, weight and bias."""
        leaves = self.leaves()
        bias = leaves[2] if self.bias is not None else None
        out = linear_cross_entropy(leaves[0], leaves[1], self.labels, bias=bias, **{**self.options, **extra})
        loss = out[0] if isinstance(out, tuple) else out
        # expand of a scalar keeps stride 0 through .to(): the uniform upstream stays recognisable.
        loss.backward(
            self.upstream[0].to(loss.dtype).expand(N)
            if self.upstream.stride(0) == 0
            else self.upstream.to(loss.dtype)
        )
        return loss.detach(), [leaf.grad for leaf in leaves]

    def reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = self.leaves(dtype)
        bias = leaves[2] if self.bias is not None else None
        loss = naive_losses(leaves[0], leaves[1], self.labels, bias=bias, **self.reference_options)
        loss.backward(self.upstream.to(loss.dtype))
        return loss.detach(), [leaf.grad for leaf in leaves]


def errors(
    got: tuple[torch.Tensor, list[torch.Tensor]], want: tuple[torch.Tensor, list[torch.Tensor]]
) -> list[float]:
    return [relative_error(a, b) for a, b in zip([got[0], *got[1]], [want[0], *want[1]], strict=True)]


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_float64_matches_the_definition(name: str, upstream: str, chunk_size: int) -> None:
    case = Case(name, torch.float64, upstream)
    got = case.operator(chunk_size=chunk_size)
    assert got[0].dtype == torch.float64
    assert max(errors(got, case.reference(torch.float64))) < 1e-13


@pytest.mark.parametrize("upstream", UPSTREAMS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "floor"), [(torch.float32, 2e-7), (torch.bfloat16, 2e-3), (torch.float16, 3e-4)], ids=str
)
def test_lower_precision_is_no_worse_than_naive(
    name: str, upstream: str, dtype: torch.dtype, floor: float
) -> None:
    case = Case(name, dtype, upstream)
    truth = case.reference(torch.float64)
    ours, naive = errors(case.operator(chunk_size=7), truth), errors(case.reference(dtype), truth)
    for own, plain in zip(ours, naive, strict=True):
        assert own <= 1.5 * plain + floor


@pytest.mark.parametrize("fault", ["no_scale", "unweighted", "unit_upstream"])
def test_the_comparison_catches_a_planted_mistake(fault: str) -> None:
    case = Case("everything", torch.float64, "varied")
    if fault == "no_scale":
        case.options["transform"] = LogitTransform(softcap=3.0)
    elif fault == "unweighted":
        case.options["token_weights"] = None
    truth = case.reference(torch.float64)
    if fault == "unit_upstream":
        case.upstream = torch.ones(()).double().expand(N)
    assert max(errors(case.operator(), truth)) > 1e-2


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("uniform", [True, False])
def test_gradcheck(name: str, uniform: bool) -> None:
    case = Case(name, torch.float64, "varied", supervised=0.3)
    leaves = case.leaves()

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        bias = tensors[2] if len(tensors) == 3 else None
        out = linear_cross_entropy(tensors[0], tensors[1], case.labels, bias=bias, chunk_size=5, **case.options)
        loss = out[0] if isinstance(out, tuple) else out
        return loss.sum() if uniform else loss

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_torch_agrees(fraction: float) -> None:
    case = Case("plain", torch.float64, "uniform", supervised=fraction)
    want = F.linear_cross_entropy(case.hidden, case.weight, case.labels, reduction="sum")
    got = linear_cross_entropy(case.hidden, case.weight, case.labels, reduction="sum")
    assert torch.allclose(got, want, rtol=1e-14)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_sum_is_the_sum(name: str) -> None:
    case = Case(name, torch.float64, "uniform")
    per_token, gradients = case.operator()
    leaves = case.leaves()
    bias = leaves[2] if case.bias is not None else None
    out = linear_cross_entropy(leaves[0], leaves[1], case.labels, bias=bias, reduction="sum", **case.options)
    total = out[0] if isinstance(out, tuple) else out
    (total * 0.37).backward()
    assert total.dim() == 0
    assert total.item() == pytest.approx(per_token.sum().item(), rel=1e-14)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert relative_error(leaf.grad, gradient) < 1e-14


@pytest.mark.parametrize("upstream", ["uniform", "varied"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_nan_in_an_unsupervised_row_changes_nothing(name: str, upstream: str) -> None:
    case = Case(name, torch.float64, upstream)
    loss, gradients = case.operator()
    ignored = case.labels == IGNORE
    assert ignored.any()
    case.hidden[ignored] = float("nan")
    if case.options["token_weights"] is not None:
        case.options["token_weights"][ignored] = float("nan")
    case.upstream = case.upstream.clone() if upstream == "varied" else case.upstream
    if upstream == "varied":
        case.upstream[ignored] = float("nan")
    poisoned_loss, poisoned = case.operator()
    assert torch.equal(loss, poisoned_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, poisoned, strict=True))
    assert (loss[ignored] == 0).all()
    assert (gradients[0][ignored] == 0).all()


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_supervised(rows: int, reduction: str) -> None:
    hidden, weight = torch.randn(rows, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((rows,), IGNORE), reduction=reduction)
    loss.sum().backward()
    # Gradients exist (DDP waits for them) and are zero.
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not loss.any()
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_zero_weight_rows_are_not_projected() -> None:
    case = Case("weights", torch.float64, "uniform")
    zero = torch.zeros(N, dtype=torch.bool)
    zero[::3] = True
    case.options["token_weights"][zero] = 0.0
    case.hidden[zero] = float("nan")
    loss, gradients = case.operator()
    assert loss.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not loss[zero].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_stats_are_those_of_the_rows(dtype: torch.dtype, softcap: float | None) -> None:
    case = Case("plain", dtype, "uniform")
    transform = LogitTransform(scale=0.7, softcap=softcap)
    # Make the label the largest logit in some rows.
    logits = transform(case.hidden.double() @ case.weight.double().t())
    hit = (torch.arange(N) % 4 == 0) & (case.labels != IGNORE)
    case.labels[hit] = logits.argmax(dim=1)[hit]
    loss, stats = linear_cross_entropy(
        case.hidden,
        case.weight,
        case.labels,
        transform=transform,
        stats=("entropy", "log_prob", "is_top1"),
        chunk_size=7,
    )
    log_q = logits.log_softmax(dim=1)
    kept = case.labels != IGNORE
    rows = kept.nonzero().squeeze(1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    entropy = -(log_q.exp() * log_q).sum(dim=1)
    assert torch.allclose(stats["entropy"][rows].double(), entropy[rows], atol=tolerance)
    assert torch.allclose(stats["log_prob"][rows].double(), log_q[rows, case.labels[rows]], atol=tolerance)
    assert torch.equal(stats["log_prob"][rows], -loss[rows])
    assert hit.any()
    assert stats["is_top1"].dtype == torch.bool
    if dtype != torch.bfloat16:
        assert torch.equal(stats["is_top1"], kept & (logits.argmax(dim=1) == case.labels))
    assert not any(stat.requires_grad for stat in stats.values())
    assert not stats["entropy"][~kept].any()


def test_z_loss_comes_as_a_pair() -> None:
    case = Case("z_loss", torch.float64, "uniform")
    loss, z = linear_cross_entropy(case.hidden, case.weight, case.labels, z_loss=0.02)
    plain = linear_cross_entropy(case.hidden, case.weight, case.labels)
    kept = case.labels != IGNORE
    lse = (case.hidden @ case.weight.t()).logsumexp(dim=1)
    assert torch.allclose(z[kept], 0.02 * lse[kept] ** 2, rtol=1e-13)
    assert torch.allclose(loss, plain + z, rtol=1e-13)
    assert not z[~kept].any()
    assert not z.requires_grad


def test_a_frozen_head_costs_no_gradient_and_a_frozen_backbone_none_either() -> None:
    case = Case("plain", torch.float64, "uniform")
    full = case.operator()[1]
    for frozen in (0, 1):
        leaves = case.leaves()
        leaves[frozen].requires_grad_(False)
        linear_cross_entropy(leaves[0], leaves[1], case.labels).backward(case.upstream)
        assert leaves[frozen].grad is None
        assert torch.equal(leaves[1 - frozen].grad, full[1 - frozen])


@pytest.mark.parametrize("upstream", ["uniform", "varied"])
def test_retain_graph_gives_the_same_gradient_twice(upstream: str) -> None:
    case = Case("everything", torch.float64, upstream)
    want = case.operator()[1]
    leaves = case.leaves()
    loss, _ = linear_cross_entropy(leaves[0], leaves[1], case.labels, bias=leaves[2], **case.options)
    loss.backward(case.upstream, retain_graph=True)
    loss.backward(case.upstream, retain_graph=True)
    loss.backward(case.upstream)
    for leaf, gradient in zip(leaves, want, strict=True):
        assert relative_error(leaf.grad, 3 * gradient) < 1e-14
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward(case.upstream)


def test_create_graph_raises() -> None:
    case = Case("plain", torch.float64, "uniform")
    leaves = case.leaves()
    loss = linear_cross_entropy(leaves[0], leaves[1], case.labels).sum()
    with pytest.raises(LossUsageError, match="create_graph"):
        torch.autograd.grad(loss, leaves, create_graph=True)


def test_no_gradient_is_computed_when_gradients_are_off() -> None:
    case = Case("everything", torch.float64, "uniform")
    leaves = case.leaves()
    with torch.no_grad():
        loss, _ = linear_cross_entropy(leaves[0], leaves[1], case.labels, bias=leaves[2], **case.options)
    assert not loss.requires_grad
    assert torch.equal(loss, case.operator()[0])


def test_inputs_are_left_as_they_were() -> None:
    case = Case("everything", torch.float64, "varied")
    before = [tensor.clone() for tensor in (case.hidden, case.weight, case.bias, case.labels)]
    case.operator()
    assert all(
        torch.equal(a, b) for a, b in zip(before, (case.hidden, case.weight, case.bias, case.labels), strict=True)
    )


def test_autocast_runs_in_its_dtype_and_accumulates_in_float32() -> None:
    case = Case("plain", torch.float32, "uniform")
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = case.operator(chunk_size=5)
    assert loss.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    want = case.reference(torch.float64)
    found = errors((loss, gradients), want)
    # bfloat16 was used (an error of its size), and nothing worse.
    assert 1e-4 < max(found) < 2e-2


def test_float16_gradient_survives_a_tiny_upstream() -> None:
    # 1e-5 times a probability of 1e-3 is zero in float16; held in float32 until scaled up again, it isn't.
    case = Case("plain", torch.float16, "uniform")
    leaves = case.leaves()
    loss = linear_cross_entropy(leaves[0], leaves[1], case.labels).sum()
    ((loss * 1e-5) * 1e5).backward()
    want = case.leaves(torch.float64)
    naive_losses(want[0], want[1], case.labels).sum().backward()
    assert relative_error(leaves[1].grad, want[1].grad) < 1e-3


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_a_large_vocabulary_costs_few_rows_no_accuracy(rows: int) -> None:
    """Some CPU kernels add up the products of the last few rows one after the other, and lose two digits."""
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, D, generator=generator) for n in (rows, 50_000))
    # All products of one sign: the sum is large from the beginning, and what is added small.
    weight += 3.0
    labels = torch.randint(0, 50_000, (rows,), generator=generator)
    got, want = (hidden.to(dtype, copy=True).requires_grad_() for dtype in (torch.float32, torch.float64))
    linear_cross_entropy(got, weight, labels, reduction="sum").backward()
    F.cross_entropy(want @ weight.double().t(), labels, reduction="sum").backward()
    assert relative_error(got.grad, want.grad) < 1e-5


def test_large_logits_stay_finite() -> None:
    hidden = torch.full((3, 4), 300.0, requires_grad=True)
    weight = torch.eye(4)[[0, 1, 2, 3, 0]].mul(300.0).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.tensor([0, 1, 4]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize(("label", "row"), [(V, 7), (-1, 0), (10**9, N - 1)])
def test_a_label_out_of_range_names_the_row(label: int, row: int) -> None:
    case = Case("plain", torch.float32, "uniform", supervised=1.0)
    case.labels[row] = label
    with pytest.raises(LabelError, match=rf"label {label} at row {row} is outside the vocabulary of {V}"):
        case.operator()


@pytest.mark.parametrize("wrong", [-1, 1, N])
def test_a_wrong_host_count_is_refused(wrong: int) -> None:
    case = Case("plain", torch.float32, "uniform", supervised=0.5)
    count = int((case.labels != IGNORE).sum())
    case.operator(num_supervised=count)
    with pytest.raises(LossUsageError, match="num_supervised"):
        case.operator(num_supervised=min(N, count + wrong))


def test_the_host_count_changes_nothing() -> None:
    for name, upstream in itertools.product(("plain", "everything"), ("uniform", "varied")):
        case = Case(name, torch.float64, upstream)
        want = case.operator(chunk_size=4)
        got = case.operator(chunk_size=4, num_supervised=int((case.labels != IGNORE).sum()))
        assert torch.equal(got[0], want[0])
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.randn(2, 3, D)}, r"\[N, D\]"),
        ({"weight": torch.randn(V, D + 1)}, r"\[N, D\]"),
        ({"labels": torch.zeros(N, dtype=torch.int32)}, "int64"),
        ({"labels": torch.zeros(N + 1, dtype=torch.int64)}, "int64"),
        ({"bias": torch.zeros(V + 1)}, "bias"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"z_loss": -0.1}, "z_loss"),
        ({"z_loss": float("nan")}, "z_loss"),
        ({"stats": ("perplexity",)}, "perplexity"),
        ({"reduction": "mean"}, "not the mean over the window"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"token_weights": torch.ones(N, requires_grad=True)}, "token_weights"),
        ({"hidden": torch.zeros(N, D, dtype=torch.int64)}, "floating-point"),
    ],
)
def test_arguments_that_cannot_be_right(change: dict, message: str) -> None:
    case = Case("plain", torch.float32, "uniform")
    arguments = {"hidden": case.hidden, "weight": case.weight, "labels": case.labels, **change}
    with pytest.raises(LossUsageError, match=message):
        linear_cross_entropy(**arguments)


def test_default_chunks_fit_the_budget_evenly() -> None:
    cpu = torch.device("cpu")
    size = default_chunk_size(2048, 49152, cpu)
    assert size * 49152 * 4 <= 96 * 2**20
    # No short chunk at the end: the products have the same shape.
    assert 2048 % size == 0
    assert default_chunk_size(10, 100, cpu) == 10
    assert default_chunk_size(0, 100, cpu) == 1
    assert default_chunk_size(5, 10**9, cpu) == 1
