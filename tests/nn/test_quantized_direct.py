"""A layer with quantised experts makes one native call if nothing is differentiated, with the same bits as its
parts.
"""

import copy

import pytest
import torch
from called import Operators
from moe_layers import OPTIONS, make_input, make_layer, one_by_one, quantize_layer
from specs.comparison import assert_same_bits
from specs.quantized_weight import EVERY_FORMAT
from torch import nn

from pymoe.nn import QuantizedLinear

pytestmark = pytest.mark.only_on("cpu")
CALL = "pymoe.apply_chosen_quantized_experts.default"


def quantized(bits=8, format="int", dtype=torch.float32, **options):
    layer = make_layer(**options, dtype=dtype).eval()
    quantize_layer(layer, bits, format)
    return layer


def native_calls(layer, x):
    with torch.no_grad(), Operators() as called:
        layer(x)
    return [name for name in called.names if name.startswith("pymoe.")]


@pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_has_the_bits_and_the_statistics_of_the_parts(options, dtype, form):
    layer = quantized(*form, dtype, **options)
    for shape in ((0,), (1,), (21,), (3, 5), ()):
        x = make_input(*shape, dtype=dtype)
        with torch.no_grad():
            with one_by_one():
                expected, stats = layer(x), layer.stats
            layer.last.zero_()
            assert_same_bits(layer(x), expected)
            assert all(torch.equal(a, b) for a, b in zip(layer.stats, stats, strict=True))


@pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
def test_it_is_one_native_call(form):
    layer, x = quantized(*form, bias=True), make_input(5, dtype=torch.float32)
    assert native_calls(layer, x) == [CALL]
    with one_by_one():
        assert native_calls(layer, x) == ["pymoe.gate_topk.default", "pymoe.apply_quantized_experts.default"]


def hook_of_a_weight(layer):
    layer.experts.w_in.register_forward_hook(lambda module, args, output: 2 * output)


def hook_of_the_experts(layer):
    layer.experts.register_forward_hook(lambda module, args, output: 2 * output)


def another_class_of_weight(layer):
    layer.experts.w_out.__class__ = type("Own", (QuantizedLinear,), {})


def packed_bytes_with_gaps(layer):
    layer.experts.w_in.packed = layer.experts.w_in.packed.repeat_interleave(2, dim=2)[:, :, ::2]


def reference_of_a_weight(layer):
    layer.experts.w_out.backend = "reference"


CHANGES = (
    hook_of_a_weight,
    hook_of_the_experts,
    another_class_of_weight,
    packed_bytes_with_gaps,
    reference_of_a_weight,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_stands_between_the_parts_is_called(change):
    layer, x = quantized(bias=True), make_input(7, dtype=torch.float32)
    change(layer)
    assert CALL not in native_calls(layer, x)
    with torch.no_grad(), one_by_one():
        expected = layer(x)
    with torch.no_grad():
        assert_same_bits(layer(x), expected)


def test_the_two_weights_may_have_different_formats():
    for first, second in (("w_in", "w_out"), ("w_out", "w_in")):
        layer, x = quantized(4, "mxfp", bias=True), make_input(7, dtype=torch.float32)
        other = quantized(8, bias=True)
        setattr(layer.experts, first, getattr(other.experts, first))
        assert native_calls(layer, x) == [CALL]
        with torch.no_grad():
            with one_by_one():
                expected = layer(x)
            assert_same_bits(layer(x), expected, f"y with 8 bits in {first} and MXFP4 in {second}")


def test_weights_of_other_sizes_are_refused_as_before():
    layer, other = quantized(), quantized(num_experts=6)
    layer.experts = other.experts
    with torch.no_grad(), one_by_one(), pytest.raises(Exception) as expected:
        layer(make_input(5, dtype=torch.float32))
    with torch.no_grad(), pytest.raises(expected.type) as found:
        layer(make_input(5, dtype=torch.float32))
    assert str(found.value) == str(expected.value)


def test_gradients_take_the_parts():
    layer, x = quantized(), make_input(5, dtype=torch.float32)
    layer(x.detach()).sum().backward()
    assert layer.router.weight.grad is not None
    assert layer(x.requires_grad_()).requires_grad
    with torch.no_grad():
        expected = layer(x)
    assert_same_bits(layer(x.detach()).detach(), expected)
    assert_same_bits(copy.deepcopy(layer).requires_grad_(False)(x.detach()), expected)


def test_autocast_takes_the_parts():
    layer, x = quantized(bias=True), make_input(5, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CALL not in native_calls(layer, x)


def test_biases_that_are_no_buffers_are_used():
    layer, x = quantized(bias=True), make_input(5, dtype=torch.float32)
    with torch.no_grad():
        before = layer(x)
        bias = layer.experts.b_out
        del layer.experts.b_out
        layer.experts.b_out = nn.Parameter(bias + 1, requires_grad=False)
        after = layer(x)
    torch.testing.assert_close(after, before + 1)  # weights of a token add up to 1


@pytest.mark.parametrize(("name", "value"), [("bits", 8), ("format", "x"), ("format", ["mxfp"])])
def test_a_format_that_somebody_has_set_is_refused_with_a_sentence(name, value):
    """With such a value, the path that makes one native call raised a KeyError."""
    layer, x = quantized(4, "mxfp"), make_input(5, dtype=torch.float32)
    setattr(layer.experts.w_in, name, value)
    with torch.no_grad(), pytest.raises(ValueError, match="expected a quantised weight of format"):
        layer(x)
