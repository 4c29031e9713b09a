"""Tests of the gradients of quantized_linear: their bits, their one order, and what surrounds a call in training."""

import subprocess
import sys

import pytest
import torch
from specs import samples_of, with_grad
from specs.comparison import assert_close, assert_same_bits
from specs.quantized_linear import SPECS
from specs.quantized_weight import EVERY_FORMAT, in_format
from torch.utils.checkpoint import checkpoint

import pymoe
from pymoe._common.contracts import QUANTIZED_FLOATING
from pymoe.bench.calls import gradients
from pymoe.bench.operators import OPERATORS, offsets_of

pytestmark = pytest.mark.only_on("cpu")
BACKENDS = pytest.mark.parametrize("backend", [pymoe.ops, pymoe.reference], ids=["native", "reference"])
FORMS = pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
DTYPES = pytest.mark.parametrize("dtype", QUANTIZED_FLOATING, ids=str)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def decoded(weight, dtype):
    """Return the weights in the layout (E, H, N) of the contract."""
    return pymoe.ops.dequantize_weight(weight).to(dtype).transpose(1, 2).contiguous()


def expected_gradient(grad, weight, offsets):
    rows = grad.reshape(-1, grad.shape[-1]) if grad.numel() else grad.new_empty(grad.shape[:-1].numel(), grad.shape[-1])
    offsets = offsets_of([len(rows)]) if offsets is None else offsets
    found = pymoe.ops.grouped_linear(rows, decoded(weight, grad.dtype), offsets)
    return found.view(*grad.shape[:-1], weight.input_features)


def gradient_of_x(operators, x, weight, offsets, grad):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(operators.quantized_linear(leaf, weight, offsets), leaf, grad)[0]


@DTYPES
def test_bits_are_those_of_the_product_with_the_decoded_weights(dtype):
    """For every sample of the specification: each format, sizes around tiles and groups, no rows, strides, NaN."""
    random, count = torch.Generator().manual_seed(1), 0
    for sample in samples_of(SPECS[0], dtype):
        x, weight, offsets, *_ = sample.args
        grad = torch.randn(*x.shape[:-1], weight.output_features, generator=random).to(dtype)
        found = gradient_of_x(pymoe.ops, x, weight, offsets, grad)
        assert_same_bits(found, expected_gradient(grad, weight, offsets), sample.name)
        count += 1
    assert count > 40 * len(EVERY_FORMAT)


@DTYPES
@FORMS
def test_bits_for_weights_that_are_decoded_in_several_parts(form, dtype):
    """(N, H): the widths of parts are multiples of 32 inputs, and 1 MiB holds only some of these."""
    for outputs, inputs in ((4100, 417), (20_000, 70), (300, 5000)):
        weight = in_format(normal(2, outputs, inputs), *form, pymoe.ops)
        for counts in ([1, 6], [40, 0]):
            grad, offsets = normal(sum(counts), outputs, seed=1).to(dtype), offsets_of(counts)
            found = gradient_of_x(pymoe.ops, grad.new_zeros(len(grad), inputs), weight, offsets, grad)
            assert_same_bits(found, expected_gradient(grad, weight, offsets), f"N{outputs} H{inputs} {counts}")


@pytest.mark.thinned(usual=1)
@DTYPES
def test_native_gradients_equal_the_references(dtype):
    """Those of rows and biases, for every fifth finite sample, within the tolerance of grouped_linear.

    Stored weights may be hundreds, so that sums cancel; the tolerance is then one of the largest gradient. Weights with
    special values are left out: whether a sum of them is infinite or NaN depends on its order.
    """
    rtol, atol = OPERATORS["grouped_linear"].tolerances[dtype]
    for sample in list(samples_of(SPECS[0], dtype))[::5]:
        leaves = with_grad(sample)
        if leaves is not None and not sample.name.startswith("stored_special"):
            (_, found), (_, expected) = (
                gradients(pymoe.ops.quantized_linear, leaves),
                gradients(pymoe.reference.quantized_linear, leaves),
            )
            for got, wanted in zip(found, expected, strict=True):
                largest = float(wanted.abs().max()) if wanted.numel() else 0.0
                assert_close(got, wanted, (rtol, max(atol, rtol * largest)), sample.name)


@BACKENDS
@FORMS
def test_gradients_are_finite_differences_of_the_dequantised_product(backend, form):
    weight, offsets = in_format(normal(2, 37, 45), *form), offsets_of([3, 2])
    x, grad, wide = normal(5, 45, seed=1), normal(5, 37, seed=2), pymoe.ops.dequantize_weight(weight).double()

    def total(x):
        return float((pymoe.reference.grouped_linear(x, wide, offsets) * grad).sum())

    found, step = gradient_of_x(backend, x, weight, offsets, grad), 2.0**-10
    for row, column in ((0, 0), (2, 44), (3, 7), (4, 31), (4, 32)):
        moved = torch.zeros(5, 45, dtype=torch.float64)
        moved[row, column] = step
        expected = (total(x + moved) - total(x - moved)) / (2 * step)
        assert float(found[row, column]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@BACKENDS
@FORMS
def test_rows_of_no_expert_get_zeros_and_their_gradients_are_not_read(backend, form):
    weight, offsets = in_format(normal(2, 20, 40), *form), offsets_of([2, 1])
    grad = normal(5, 20, seed=1)
    grad[3:] = torch.nan
    found = gradient_of_x(backend, torch.zeros(5, 40), weight, offsets, grad)
    assert bool((found[3:] == 0).all())
    assert bool(found[:3].isfinite().all())


@FORMS
def test_a_row_does_not_depend_on_the_rows_around_it(form):
    weight, grad = in_format(normal(1, 200, 130), *form), normal(230, 200, seed=1).bfloat16()
    together = gradient_of_x(pymoe.ops, grad.new_zeros(230, 130), weight, None, grad)
    for rows in (1, 2, 5, 9, 60):
        some = gradient_of_x(pymoe.ops, grad.new_zeros(rows, 130), weight, None, grad[11 : 11 + rows])
        assert_same_bits(some, together[11 : 11 + rows], f"{rows} rows")


@FORMS
def test_bits_do_not_depend_on_the_number_of_threads(form):
    """More threads make narrower parts."""
    verify_threads = (1, 2, 5)
    weight, grad = in_format(normal(3, 300, 700), *form), normal(20, 300, seed=1)
    offsets, before, found = offsets_of([9, 0, 11]), torch.get_num_threads(), []
    try:
        for threads in verify_threads:
            torch.set_num_threads(threads)
            found.append(gradient_of_x(pymoe.ops, torch.zeros(20, 700), weight, offsets, grad))
    finally:
        torch.set_num_threads(before)
    for threads, other in zip(verify_threads, found, strict=True):
        assert_same_bits(other, found[0], f"{threads} threads")


def test_subnormal_codes_count_in_threads_that_flush_subnormals():
    codes = torch.arange(128).to(torch.uint8).view(torch.float8_e4m3fn)[:127].repeat(1, 2, 1)
    weight = pymoe.ops.pack_weight(codes, torch.ones(1, 2, 1))
    grad = torch.eye(2)
    expected = gradient_of_x(pymoe.ops, torch.zeros(2, 127), weight, None, grad)
    assert_same_bits(expected, codes[0].float(), "values")
    assert torch.set_flush_denormal(True)
    try:
        assert_same_bits(gradient_of_x(pymoe.ops, torch.zeros(2, 127), weight, None, grad), expected, "flushing")
    finally:
        torch.set_flush_denormal(False)


MEMORY = """
import resource, torch, pymoe
from pymoe._common.types import packed_shape
torch.set_num_threads(2)
packed = torch.ones(packed_shape(4, 2048, 2048, 24), dtype=torch.uint8)  # wide: 201 MB in bfloat16
weight = pymoe.ops.QuantizedWeight(packed, 4, 2048, 2048)
x = torch.zeros(48, 2048, dtype=torch.bfloat16, requires_grad=True)
y = pymoe.ops.quantized_linear(x, weight, torch.arange(0, 49, 2, dtype=torch.int32))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
y.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_weights_are_never_widened_as_a_whole():
    found = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 60_000  # KiB


@BACKENDS
def test_a_second_derivative_is_refused(backend):
    weight, x = backend.quantize_weight(normal(1, 10, 20), 8), normal(3, 20).requires_grad_()
    y = backend.quantized_linear(x, weight, None)
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    assert_same_bits(grad.detach(), gradient_of_x(backend, x, weight, None, 2 * y.detach()), "the first derivative")
    with pytest.raises(NotImplementedError, match="quantized_linear: quantised weights have no second derivative"):
        grad.sum().backward()


@BACKENDS
def test_the_weights_must_not_change_before_the_backward_pass(backend):
    weight, x = backend.quantize_weight(normal(1, 10, 20), 8), normal(3, 20).requires_grad_()
    y = backend.quantized_linear(x, weight, None)
    weight.packed.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def training_call(form, dtype=torch.float32):
    """Return a function of rows (6, 40), and rows."""
    weight, offsets, bias = in_format(normal(2, 70, 40), *form), offsets_of([4, 2]), normal(2, 70, seed=3)

    def function(x):
        return pymoe.ops.quantized_linear(x, weight, offsets, bias.to(x.dtype)).sin()

    return function, normal(6, 40, seed=4).to(dtype)


def gradient(function, x):
    leaf = x.detach().requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


@FORMS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_change_no_bits(form, reentrant):
    function, x = training_call(form)
    found = gradient(lambda x: checkpoint(function, x, use_reentrant=reentrant), x)
    assert_same_bits(found, gradient(function, x), "gradient")


@BACKENDS
def test_autocast_casts_gradients(backend):
    weight, x = backend.quantize_weight(normal(1, 10, 20), 8), normal(3, 20).requires_grad_()
    bias = normal(1, 10, seed=2).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = backend.quantized_linear(x, weight, offsets_of([3]), bias)
    grad = normal(3, 10, seed=1).bfloat16()
    grad_x, grad_bias = torch.autograd.grad(y, (x, bias), grad)
    expected = gradient_of_x(backend, x.bfloat16(), weight, offsets_of([3]), grad)
    assert_same_bits(grad_x, expected.float(), "the gradient of x")
    assert_same_bits(grad_bias, grad.float().sum(0, keepdim=True).bfloat16().float(), "the gradient of the bias")


@pytest.mark.parametrize("dynamic", [False, True])
@FORMS
def test_compiled_gradients_have_the_same_bits(form, dynamic):
    torch.compiler.reset()
    weight, offsets = in_format(normal(2, 70, 40), *form), offsets_of([4, 2])
    x, bias = normal(6, 40).requires_grad_(), normal(2, 70, seed=1).requires_grad_()

    def function(x, bias):
        return pymoe.ops.quantized_linear(x, weight, offsets, bias)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (6, 7):
        grad = normal(rows, 70, seed=2)
        leaf = normal(rows, 40).requires_grad_()
        found, expected = (torch.autograd.grad(f(leaf, bias), (leaf, bias), grad) for f in (compiled, function))
        for got, wanted in zip(found, expected, strict=True):
            assert_same_bits(got, wanted, f"{rows} rows")
    with torch.no_grad():
        assert_same_bits(compiled(x, bias), function(x, bias), "without gradients")


@FORMS
def test_transforms_of_torch_func_give_the_same_gradients(form):
    function, x = training_call(form)
    expected = gradient(function, x)
    assert_same_bits(torch.func.grad(lambda x: function(x).sum())(x), expected, "grad")
    batch = torch.stack([x, 2 * x])
    found = torch.vmap(torch.func.grad(lambda x: function(x).sum()))(batch)
    assert_same_bits(found, torch.stack([expected, gradient(function, 2 * x)]), "vmap of grad")
    for second in (
        torch.func.grad(lambda x: torch.func.grad(lambda x: function(x).sum())(x).sum()),
        torch.func.hessian(function),
    ):
        with pytest.raises(NotImplementedError, match="quantised weights have no"):
            second(x)


@pytest.mark.parametrize("shape", [(40,), (0, 40), (3, 40), (2, 0, 40), (2, 3, 40)])
@BACKENDS
def test_biases_without_offsets_get_gradients(backend, shape):
    weight, bias = backend.quantize_weight(normal(1, 10, 40), 4), normal(1, 10, seed=1).requires_grad_()
    y = backend.quantized_linear(normal(*shape), weight, None, bias)
    grad = normal(*y.shape, seed=2)
    (found,) = torch.autograd.grad(y, bias, grad)
    torch.testing.assert_close(found, grad.reshape(-1, 10).sum(0, keepdim=True))


@pytest.mark.parametrize("offsets", [[0, 3, 2], [1, 2, 3], [0, 1, 2**31 - 1], [0, -2, 3]], ids=str)
def test_raw_calls_refuse_offsets_out_of_order_or_range(offsets):
    weight = pymoe.ops.quantize_weight(normal(2, 10, 20), 8)
    with pytest.raises((IndexError, ValueError), match="quantized_linear: offsets"):
        torch.ops.pymoe.quantized_linear_input_grad(
            normal(3, 10), weight.packed, torch.tensor(offsets, dtype=torch.int32), 8, 20
        )


def test_raw_calls_refuse_bytes_of_another_shape():
    packed, raw = pymoe.ops.quantize_weight(normal(2, 10, 20), 8).packed, torch.ops.pymoe.quantized_linear_input_grad
    for grad, some, bits, inputs in (
        (normal(3, 10), packed, 4, 20),
        (normal(3, 65), packed, 8, 20),
        (normal(3, 10), packed, 8, 33),
        (normal(3, 10), packed[:, :, 1:], 8, 20),
    ):
        with pytest.raises(ValueError, match=r"quantized_linear: packed must"):
            raw(grad, some, offsets_of([1, 2]), bits, inputs)
    for grad, bits, inputs, match in (
        (normal(3, 10), 3, 20, "format must be"),
        (normal(3, 10), 8, -1, "input_features must be"),
        (normal(3, 10).T.contiguous().T, 8, 20, "grad must be contiguous"),
        (normal(3, 10).double(), 8, 20, "grad must have dtype"),
    ):
        with pytest.raises(ValueError, match=f"quantized_linear: {match}"):
            raw(grad, packed, offsets_of([1, 2]), bits, inputs)


@BACKENDS
def test_a_backward_pass_inside_autocast_keeps_the_dtype(backend):
    weight, x = in_format(normal(1, 37, 45), 8, "int"), normal(5, 45, seed=1).requires_grad_()
    y = backend.quantized_linear(x, weight, None)
    expected = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert_same_bits(found, expected, "inside autocast")
