"""Tests of the documented promises of grouped_linear and expert_activation."""

import sys

import pytest
import torch
from specs.comparison import assert_close, assert_same_bits
from torch.nn import functional as F

import pymoe

BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def problem(counts, outputs=20, inputs=13, past=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts) + past, inputs, generator=generator).to(dtype)
    weight = torch.randn(len(counts), outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(len(counts), outputs, generator=generator).to(dtype)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return x.requires_grad_(), weight.requires_grad_(), offsets, bias.requires_grad_()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_gradient_too_large_for_the_caches_is_the_same(dtype):
    """From 64 MiB on, whole vectors of the gradient are written with streaming stores, and the remainder is not."""
    x, _, offsets, _ = problem([3, 0, 33], inputs=1001, dtype=dtype)
    grad = problem([3, 0, 33], inputs=12001, dtype=dtype)[0].detach()
    large = torch.ops.pymoe.grouped_linear_weight_grad(grad, x.detach(), offsets)
    assert large.nbytes > 64 << 20
    for first, count in ((0, 40), (5003, 40), (11981, 20)):
        some = grad[:, first : first + count].contiguous()
        assert_same_bits(
            large[:, first : first + count], torch.ops.pymoe.grouped_linear_weight_grad(some, x.detach(), offsets)
        )


@BACKENDS
def test_sum_backward_takes_an_expanded_gradient(backend):
    x, weight, offsets, bias = problem([3, 0, 5])
    backend.grouped_linear(x, weight, offsets, bias).sum().backward()
    assert_close(x.grad[:3], weight[0].detach().sum(0).expand(3, -1), (1e-5, 1e-5))
    assert_close(weight.grad[2], x.detach()[3:].sum(0).expand(20, -1), (1e-5, 1e-5))
    assert_same_bits(bias.grad, torch.tensor([3.0, 0.0, 5.0])[:, None].expand(3, 20).contiguous())


@BACKENDS
@DTYPES
def test_rows_past_the_end_are_never_read(backend, dtype):
    x, weight, offsets, bias = problem([2, 4], past=5, dtype=dtype)
    with torch.no_grad():
        x[6:] = float("nan")
    y = backend.grouped_linear(x, weight, offsets, bias)
    assert_same_bits(y.detach()[6:], torch.zeros(5, 20, dtype=dtype))
    grad = torch.ones_like(y)
    grad[6:] = float("nan")
    grads = torch.autograd.grad(y, (x, weight, bias), grad)
    assert all(bool(found.isfinite().all()) for found in (y, *grads))
    assert_same_bits(grads[0][6:], torch.zeros(5, 13, dtype=dtype))


@BACKENDS
def test_experts_without_rows_have_zero_gradients(backend):
    x, weight, offsets, bias = problem([0, 4, 0, 1, 0])
    backend.grouped_linear(x, weight, offsets, bias).square().sum().backward()
    for expert in (0, 2, 4):
        assert_same_bits(weight.grad[expert], torch.zeros(20, 13))
        assert_same_bits(bias.grad[expert], torch.zeros(20))
    assert bool(weight.grad[1].any())
    assert bool(weight.grad[3].any())


@pytest.mark.only_on("cpu", "pretended")  # on a GPU the order of sums may be torch's choice
@DTYPES
@pytest.mark.parametrize("transposed", [False, True], ids=["(E, N, H)", "(E, H, N)"])
@pytest.mark.parametrize("inputs", [13, 450, 2300])
def test_a_row_does_not_depend_on_the_rows_around_it(inputs, transposed, dtype):
    """The kernel depends on the number of an expert's rows and on the layout of its weight; the bits must not."""
    x, weight, _, bias = (one.detach() for one in problem([150], outputs=141, inputs=inputs, dtype=dtype))
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    whole = pymoe.ops.grouped_linear(x, weight, torch.tensor([0, 150], dtype=torch.int32), bias)
    for rows in (*range(1, 18), 23, 29, 56, 57, 63, 64, 99):
        some = torch.tensor([0, rows], dtype=torch.int32)
        assert_same_bits(pymoe.ops.grouped_linear(x[-rows:], weight, some, bias), whole[-rows:])


def test_sums_are_kept_wide_and_rounded_once():
    ones = torch.ones(1, 4096, dtype=torch.bfloat16)  # a sum in bf16 would stop growing at 256
    y = pymoe.ops.grouped_linear(ones, ones[None], torch.tensor([0, 1], dtype=torch.int32))
    assert y.item() == 4096.0
    weight_grad = torch.ops.pymoe.grouped_linear_weight_grad(ones.T, ones.T, torch.tensor([0, 4096]).int())
    assert weight_grad.item() == 4096.0


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_behaves_as_linear(backend, dtype, device):
    x, weight, offsets, bias = problem([5])
    with torch.autocast(device.type, dtype=dtype):
        y = backend.grouped_linear(x, weight, offsets, bias)
        expected = F.linear(x, weight[0], bias[0])
    assert y.dtype == expected.dtype == dtype
    assert_close(y, expected, (2e-2, 2e-2))
    grads = torch.autograd.grad(y.float().sum(), (x, weight, bias))
    assert [found.dtype for found in grads] == [torch.float32] * 3


def test_a_transposed_weight_gives_the_same_but_for_the_order_of_sums():
    x, weight, offsets, bias = problem([5, 9])
    stored = weight.detach().transpose(1, 2).contiguous()  # (E, H, N), as some models keep it
    torch.testing.assert_close(
        pymoe.ops.grouped_linear(x, stored.transpose(1, 2), offsets, bias),
        pymoe.ops.grouped_linear(x, weight, offsets, bias),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.only_on("cpu", "pretended")  # on CUDA only in debug mode: see test_cuda_indices.py
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([-1, 2, 4], ValueError),
        ([1, 2, 4], ValueError),
        ([0, 3, 2], ValueError),
        ([0, -(2**31), 4], ValueError),
        ([0, 2, 5], IndexError),
        ([0, 2**31 - 1, 2**31 - 1], IndexError),
    ],
)
def test_raw_operators_refuse_offsets_that_point_outside(values, error):
    x, grad, weight = torch.ones(4, 3), torch.ones(4, 6), torch.ones(2, 6, 3)
    offsets = torch.tensor(values, dtype=torch.int32)
    for call in (
        lambda: torch.ops.pymoe.grouped_linear(x, weight, offsets, None),
        lambda: torch.ops.pymoe.grouped_linear_weight_grad(grad, x, offsets),
        lambda: torch.ops.pymoe.grouped_linear_bias_grad(grad, offsets),
    ):
        with pytest.raises(error, match="grouped_linear: offsets must"):
            call()


@BACKENDS
def test_relu_passes_nan_and_its_gradient(backend):
    h = torch.tensor([[float("nan"), -1.0, 0.0, 2.0]], requires_grad=True)
    y = backend.expert_activation(h, "relu")
    assert_same_bits(y.detach(), torch.tensor([[float("nan"), 0.0, 0.0, 2.0]]))
    assert_same_bits(torch.autograd.grad(y.sum(), h)[0], torch.tensor([[1.0, 0.0, 0.0, 1.0]]))


def test_gelu_keeps_the_relative_accuracy_of_its_lower_tail():
    h = torch.linspace(-12.0, -2.0, 1001)[None]
    exact = h.double() * 0.5 * torch.special.erfc(h.double() * -(0.5**0.5))
    assert_close(pymoe.ops.expert_activation(h, "gelu").double(), exact, (1e-5, 1e-40))


def test_activation_saves_its_input_alone():
    h = torch.randn(4, 6, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: saved.append(value) or value, lambda value: value):
        pymoe.ops.expert_activation(h, "swiglu")
    assert [value.data_ptr() for value in saved] == [h.data_ptr()]


def transposed_case():
    """Return an (E, in, out) parameter, rows, their offsets, and a direction for y."""
    generator = torch.Generator().manual_seed(3)
    parameter = torch.randn(3, 20, 8, generator=generator).requires_grad_()
    x = torch.randn(30, 20, generator=generator)
    return parameter, x, torch.tensor([0, 4, 4, 29], dtype=torch.int32), torch.randn(30, 8, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_transposed_weight_is_made_where_the_parameter_gets_it(dtype, monkeypatch):
    made = []
    operator = torch.ops.pymoe.grouped_linear_weight_grad.default

    def noting(*args):
        made.append(operator(*args))
        return made[-1]

    monkeypatch.setattr(sys.modules["pymoe.ops.grouped_linear"], "WEIGHT_GRAD", noting)
    parameter, x, offsets, direction = transposed_case()
    parameter = parameter.detach().to(dtype).requires_grad_()
    x, direction = x.to(dtype), direction.to(dtype)
    pymoe.ops.grouped_linear(x, parameter.transpose(1, 2), offsets).backward(direction)
    assert parameter.grad.is_contiguous()
    assert parameter.grad.data_ptr() == made[0].data_ptr(), "autograd copied it"
    weight = parameter.detach().transpose(1, 2).contiguous().requires_grad_()
    pymoe.ops.grouped_linear(x, weight, offsets).backward(direction)
    assert torch.equal(parameter.grad, weight.grad.transpose(1, 2))


def test_second_derivatives_of_a_transposed_weight():
    parameter, x, offsets, direction = (
        value.double() if value.is_floating_point() else value for value in transposed_case()
    )
    results = []
    for leaf, weight_of in (
        (parameter.detach().requires_grad_(), lambda p: p.transpose(1, 2)),
        (parameter.detach().transpose(1, 2).contiguous().requires_grad_(), lambda p: p),
    ):
        rows = x.clone().requires_grad_()
        y = pymoe.ops.grouped_linear(rows, weight_of(leaf), offsets)
        (grad,) = torch.autograd.grad((y * direction).square().sum(), leaf, create_graph=True)
        results.append([grad, *torch.autograd.grad(grad.square().sum(), (leaf, rows))])
    for got, wanted in zip(*results, strict=True):
        expected = wanted.transpose(1, 2) if wanted.dim() == 3 else wanted
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
