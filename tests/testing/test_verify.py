"""The checks of operators can fail: a small operator in Python passes them, and each planted fault is found."""

import pytest
import torch
from specs import ErrorInput, OpSpec, samples_of, verify, with_grad
from specs.comparison import assert_same_bits
from specs.samples import layouts, special_values, sprinkled

from pymoe.bench.calls import Sample, same_layout_copy
from pymoe.bench.operators import uniform


def halve(x, keep):
    """Return (x / 2, which rows were kept), with zeros in rows from ``keep`` on."""
    if keep > x.shape[0]:
        raise ValueError(f"halve: keep must be at most T, got {keep}")
    kept = torch.arange(x.shape[0]) < keep
    return torch.where(kept[:, None], x * 0.5, 0.0), kept.int()


def samples(dtype, generator):
    x = uniform(4, 3, dtype=dtype, generator=generator)
    yield Sample("ordinary", (x, 3))
    yield Sample("special", (special_values(dtype).view(7, 2), 7))
    yield Sample("sprinkled", (sprinkled(x, generator), 3))
    for name, view in layouts(x):
        yield Sample(name, (view, 4))


def errors():
    yield ErrorInput(Sample("keep", (torch.zeros(2, 2), 3)), ValueError, "at most T, got 3")


def spec_of(native):
    return OpSpec(
        name="halve",
        native=native,
        reference=halve,
        samples=samples,
        exact=(False, True),
        tolerances={torch.float32: (1e-6, 0.0), torch.float64: (1e-12, 0.0)},
        error_inputs=errors,
        gradient_samples=lambda generator: iter(
            [Sample("g", (uniform(3, 2, dtype=torch.float64, generator=generator).requires_grad_(), 2))]
        ),
    )


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, grad):
        return grad * 0.5000001


class WrongSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x.detach()


def off_by_little(x, keep):
    out, kept = halve(x, keep)
    return out * (1 + 1e-4), kept


def drops_last_row(x, keep):
    return halve(x, max(keep - 1, 0))


def writes_its_argument(x, keep):
    out = halve(x, keep)
    x[0, 0] = 7
    return out


def loses_nan(x, keep):
    out, kept = halve(x, keep)
    return out.nan_to_num(), kept


def reads_the_storage(x, keep):
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return halve(flat.view(x.shape), keep)


def verify_all(spec):
    for sample in samples_of(spec, torch.float32):
        verify.outputs_equal(spec, torch.float32, sample)


def test_a_right_operator_passes():
    spec = spec_of(halve)
    verify_all(spec)
    for sample in samples_of(spec, torch.float32):
        verify.deterministic(spec, sample)
        if with_grad(sample):
            verify.gradients_equal(spec, torch.float32, with_grad(sample))
    for sample in spec.gradient_samples(torch.Generator()):
        verify.gradcheck(spec, sample)
    for error_input in errors():
        assert "got 3" in verify.error_raised(spec, halve, error_input)


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        (off_by_little, "halve: output 0: .* elements are off"),
        (drops_last_row, "halve: output"),
        (writes_its_argument, "an argument after the call"),
        (loses_nan, "only one of them is that special value"),
        (reads_the_storage, "halve: output 0"),
        (lambda x, keep: halve(x, keep)[:1], "1 outputs, the reference has 2"),
        (lambda x, keep: (halve(x, keep)[0], halve(x, keep)[1].long()), "dtype is torch.int64"),
    ],
)
def test_a_wrong_output_is_found(fault, report):
    with pytest.raises(AssertionError, match=report):
        verify_all(spec_of(fault))


def test_a_wrong_gradient_is_found():
    spec = spec_of(lambda x, keep: (WrongGradient.apply(x), halve(x, keep)[1]))
    sample = with_grad(next(samples_of(spec, torch.float64)))
    with pytest.raises(AssertionError, match="halve: gradient 0"):
        verify.gradients_equal(spec, torch.float64, sample)


def test_a_wrong_second_gradient_is_found():
    spec = spec_of(lambda x, keep: (WrongSecondGradient.apply(x),))
    with pytest.raises(Exception, match=r"Jacobian mismatch|not require"):
        verify.gradcheck(spec, next(spec.gradient_samples(torch.Generator().manual_seed(0))))


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (TypeError("halve: keep must be at most T, got 3"), "raised TypeError, expected ValueError"),
        (ValueError("halve: keep is bad"), "is not in the message"),
        (ValueError("keep must be at most T, got 3"), "does not begin with the operator"),
        (ValueError("halve: must be at most T, got 3"), "no argument is named"),
        (None, "raised nothing"),
    ],
)
def test_a_wrong_error_is_found(error, report):
    def native(x, keep):
        if error is not None:
            raise error

    with pytest.raises(AssertionError, match=report):
        verify.error_raised(spec_of(native), native, next(errors()))


def test_results_that_change_are_found():
    calls = iter(range(100))

    def by_threads(x, keep):
        return x * 0.5 + 1e-7 * (torch.get_num_threads() == 4), keep

    def by_call(x, keep):
        return x * 0.5 + 1e-7 * (next(calls) == 4), keep

    for fault in (by_threads, by_call):
        with pytest.raises(AssertionError, match="halve: output 0 on"):
            verify.deterministic(spec_of(fault), next(samples_of(spec_of(fault), torch.float32)))


@pytest.mark.parametrize("shape", [(3, 4), (2, 0), (2, 2, 2)], ids=str)
def test_a_copy_keeps_the_layout(shape):
    value = uniform(*shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    for name, view in layouts(value):
        copy = same_layout_copy(view)
        assert_same_bits(copy, view, name)
        assert copy.numel() == 0 or copy.stride() == view.stride()
        assert copy.numel() == 0 or copy.data_ptr() != view.data_ptr()
