"""Under torch.func and forward-mode AD an operator works or raises: no derivative is dropped without a word."""

import pytest
import torch
from specs import all_specs
from specs.comparison import assert_close, assert_same_bits
from torch.autograd import forward_ad

import pymoe
from pymoe.bench.calls import generator, leaves, map_tensors, outputs_of
from pymoe.nn import MoE

pytestmark = pytest.mark.only_on("cpu")
SPECS = {spec.name: spec for spec in all_specs() if spec.gradient_samples is not None}
names = pytest.mark.parametrize("name", SPECS)
both = pytest.mark.parametrize("side", ["native", "reference"])
REFUSALS = (NotImplementedError, RuntimeError)


def function_and_inputs(name, side):
    """A function of the differentiable tensors of a call alone, to its differentiable outputs, and those tensors."""
    spec = SPECS[name]
    sample = next(iter(spec.gradient_samples(generator())))
    inputs = tuple(value.detach() for value in leaves(sample))
    operator = getattr(spec, side)

    def function(*values):
        replacement = iter(values)
        args, kwargs = map_tensors(
            (sample.args, sample.kwargs), lambda value: next(replacement) if value.requires_grad else value
        )
        return tuple(output for output in outputs_of(operator(*args, **kwargs)) if output.is_floating_point())

    return function, inputs


def tangents_of(inputs):
    random = torch.Generator().manual_seed(1)
    return tuple(torch.rand(value.shape, generator=random, dtype=value.dtype) for value in inputs)


def expected_tangents(function, inputs, tangents):
    """By two backward passes."""
    return torch.autograd.functional.jvp(lambda *values: function(*values), inputs, tangents)[1]


@both
@names
@pytest.mark.parametrize("with_grad", [False, True])
def test_forward_mode(name, side, with_grad):
    function, inputs = function_and_inputs(name, side)
    tangents = tangents_of(inputs)
    with forward_ad.dual_level(), torch.set_grad_enabled(with_grad):
        dual = [forward_ad.make_dual(value, tangent) for value, tangent in zip(inputs, tangents, strict=True)]
        try:
            found = [forward_ad.unpack_dual(output).tangent for output in function(*dual)]
        except REFUSALS:
            assert side == "native", "the references have forward-mode derivatives"
            return
    expected = expected_tangents(reference_of(name), inputs, tangents)
    for got, wanted in zip(found, expected, strict=True):
        assert got is not None, "the tangent was dropped"
        assert_close(got, wanted, (1e-12, 1e-12))


def reference_of(name):
    return function_and_inputs(name, "reference")[0]


@both
@names
def test_jvp_of_torch_func(name, side):
    function, inputs = function_and_inputs(name, side)
    tangents = tangents_of(inputs)
    try:
        _, found = torch.func.jvp(function, inputs, tangents)
    except REFUSALS:
        assert side == "native"
        return
    for got, wanted in zip(found, expected_tangents(reference_of(name), inputs, tangents), strict=True):
        assert_close(got, wanted, (1e-12, 1e-12))


@both
@names
def test_vmap(name, side):
    function, inputs = function_and_inputs(name, side)
    stacked = tuple(torch.stack((value, value * 0.5)) for value in inputs)
    try:
        found = torch.func.vmap(function)(*stacked)
    except REFUSALS:
        assert (name not in ("gather_batch", "split_batch")) if side == "native" else (name == "gate_topk")
        return
    for number in range(2):
        alone = function(*(value[number] for value in stacked))
        for got, wanted in zip(found, alone, strict=True):
            assert_close(got[number], wanted, (1e-12, 1e-12))


@both
@names
def test_grad_of_torch_func(name, side):
    function, inputs = function_and_inputs(name, side)

    def loss(*values):
        return sum((output**2).sum() for output in function(*values))

    found = torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
    asking = [value.clone().requires_grad_() for value in inputs]
    for got, wanted in zip(found, torch.autograd.grad(loss(*asking), asking), strict=True):
        assert_close(got, wanted, (1e-12, 1e-12))


def test_gather_batch_has_every_derivative():
    function, inputs = function_and_inputs("gather_batch", "native")
    tangents = tangents_of(inputs)
    (found,) = torch.func.jvp(function, inputs, tangents)[1]
    assert_same_bits(found, torch.cat(tangents))
    (batch,) = torch.func.vmap(function)(*(torch.stack((value, value + 1)) for value in inputs))
    assert_same_bits(batch, torch.stack((torch.cat(inputs), torch.cat(inputs) + 1)))


def test_dispatch_into_a_buffer_refuses_tangents():
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)
    x, out = torch.ones(2, 3), torch.empty(4, 3)
    with torch.no_grad(), forward_ad.dual_level():
        for arguments in ((forward_ad.make_dual(x, x), out), (x, forward_ad.make_dual(out, torch.ones(4, 3)))):
            with pytest.raises(ValueError, match="dispatch: out= has no tangent"):
                pymoe.ops.dispatch(arguments[0], routing, out=arguments[1])


@pytest.mark.parametrize("options", [{}, {"bias_update_rate": 0.1}, {"aux_loss_coef": 0.1}], ids=str)
def test_gradients_of_a_layer_by_torch_func(options):
    layer = MoE(6, 8, 4, 2, dtype=torch.float64, **options)
    x = torch.rand(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer(x).square().sum().backward()
    stats = layer.stats
    found = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (2 * x - x,)).square().sum())(
        {name: value.detach() for name, value in layer.named_parameters()}
    )
    for name, value in layer.named_parameters():
        assert_close(found[name], value.grad, (1e-12, 1e-12), name)
    for before, after in zip(stats, layer.stats, strict=True):
        assert_same_bits(after, before, "the statistics step aside")


def test_a_layer_is_exported_for_any_number_of_tokens():
    layer = MoE(6, 8, 4, 2)
    program = torch.export.export(layer, (torch.randn(5, 6),), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    x = torch.randn(11, 6)
    assert_same_bits(program.module()(x), layer(x))
