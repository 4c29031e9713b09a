"""Tests that operators work or raise under torch.func and forward-mode AD, and never drop a derivative silently."""

import pytest
import torch
from specs import all_specs
from specs.comparison import assert_close, assert_same_bits
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad

import pymoe
from pymoe.bench.calls import generator, leaves, map_tensors, outputs_of
from pymoe.nn import MoE

pytestmark = pytest.mark.only_on("cpu")
SPECS = {spec.name: spec for spec in all_specs() if spec.gradient_samples is not None}
names = pytest.mark.parametrize("name", SPECS)
both = pytest.mark.parametrize("side", ["native", "reference"])
REFUSAL = r"has no forward-mode derivative \(jvp, jacfwd, hessian, forward_ad\); pymoe.reference and MoE"


def function_and_inputs(name, side):
    """Return a function from a call's differentiable tensors to its differentiable outputs, and those tensors."""
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
    """Return the tangents of the outputs, computed by two backward passes."""
    return torch.autograd.functional.jvp(lambda *values: function(*values), inputs, tangents)[1]


def refuses_tangents(name, side):
    return side == "native" and name not in ("gather_batch", "split_batch")


@both
@names
@pytest.mark.parametrize("with_grad", [False, True])
def test_forward_mode(name, side, with_grad):
    function, inputs = function_and_inputs(name, side)
    tangents = tangents_of(inputs)
    with forward_ad.dual_level(), torch.set_grad_enabled(with_grad):
        dual = [forward_ad.make_dual(value, tangent) for value, tangent in zip(inputs, tangents, strict=True)]
        if refuses_tangents(name, side):
            with pytest.raises(NotImplementedError, match=REFUSAL):
                function(*dual)
            return
        found = [forward_ad.unpack_dual(output).tangent for output in function(*dual)]
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
    if refuses_tangents(name, side):
        with pytest.raises(NotImplementedError, match=REFUSAL):
            torch.func.jvp(function, inputs, tangents)
        return
    _, found = torch.func.jvp(function, inputs, tangents)
    for got, wanted in zip(found, expected_tangents(reference_of(name), inputs, tangents), strict=True):
        assert_close(got, wanted, (1e-12, 1e-12))


@names
@pytest.mark.filterwarnings("error")
def test_vmap(name):
    function, inputs = function_and_inputs(name, "native")
    stacked = tuple(torch.stack((value, value * 0.5)) for value in inputs)
    found = torch.func.vmap(function)(*stacked)
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


@names
def test_jacrev(name):
    function, inputs = function_and_inputs(name, "native")

    def first(*values):
        return function(*values)[0]

    found = torch.func.jacrev(first, argnums=tuple(range(len(inputs))))(*inputs)
    for got, wanted in zip(found, torch.autograd.functional.jacobian(first, inputs), strict=True):
        assert_close(got, wanted, (1e-12, 1e-12))


@names
def test_vmap_over_a_vjp_of_a_gradient(name):
    function, inputs = function_and_inputs(name, "native")

    def product(*values):
        def loss(*values):
            return sum((output**2).sum() for output in function(*values))

        gradient = torch.func.grad(loss, argnums=tuple(range(len(values))))
        return torch.func.vjp(gradient, *values)[1](values)

    stacked = tuple(torch.stack((value, value * 0.5)) for value in inputs)
    found = torch.func.vmap(product)(*stacked)
    for number in range(2):
        alone = product(*(value[number] for value in stacked))
        for got, wanted in zip(found, alone, strict=True):
            assert_close(got[number], wanted, (1e-12, 1e-12))


@names
def test_vmap_over_no_elements_is_refused(name):
    if not refuses_tangents(name, "native"):
        pytest.skip("made of torch's operators, or with a rule of its own")
    function, inputs = function_and_inputs(name, "native")
    with pytest.raises(ValueError, match="expected a batch of at least one element, got none"):
        torch.func.vmap(function)(*(value[None][:0] for value in inputs))


LAYERS = [{}, {"bias": True, "capacity_factor": 0.8}, {"aux_loss_coef": 0.01, "z_loss_coef": 0.01, "score": "sigmoid"}]
layers = pytest.mark.parametrize("options", LAYERS, ids=str)


@pytest.fixture
def random():
    return torch.Generator().manual_seed(5)


def layer_and_call(**options):
    layer = MoE(6, 8, 4, 2, dtype=torch.float64, **options)
    parameters = {name: value.detach() for name, value in layer.named_parameters()}
    return parameters, lambda parameters, x: torch.func.functional_call(layer, parameters, (x,))


@layers
def test_vmap_over_batches_of_a_layer(options, random):
    parameters, call = layer_and_call(**options)
    x = torch.rand(3, 5, 6, generator=random, dtype=torch.float64)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            found = torch.func.vmap(call, (None, 0))(parameters, x)
            assert_same_bits(found.detach(), torch.stack([call(parameters, batch) for batch in x]).detach())


@layers
def test_an_ensemble_of_layers_by_vmap(options, random):
    parameters, call = layer_and_call(**options)
    x = torch.rand(5, 6, generator=random, dtype=torch.float64)
    members = [{name: value * factor for name, value in parameters.items()} for factor in (1.0, 1.1, 0.9)]
    stacked = {name: torch.stack([member[name] for member in members]) for name in parameters}
    found = torch.func.vmap(call, (0, None))(stacked, x)
    assert_close(found, torch.stack([call(member, x) for member in members]), (1e-12, 1e-12))


@layers
def test_gradients_of_every_token_of_a_layer(options, random):
    parameters, call = layer_and_call(**options)
    x = torch.rand(5, 6, generator=random, dtype=torch.float64)
    gradient = torch.func.grad(lambda parameters, token: call(parameters, token[None]).square().sum())
    found = torch.func.vmap(gradient, (None, 0))(parameters, x)
    for place, token in enumerate(x):
        for name, wanted in gradient(parameters, token).items():
            assert_close(found[name][place], wanted, (1e-12, 1e-12), name)


@layers
def test_the_jacobian_of_a_layer(options, random):
    parameters, call = layer_and_call(**options)
    x = torch.rand(5, 6, generator=random, dtype=torch.float64)
    wanted = torch.autograd.functional.jacobian(lambda x: call(parameters, x), x)
    assert_close(torch.func.jacrev(lambda x: call(parameters, x))(x), wanted, (1e-12, 1e-12))


@pytest.mark.parametrize(
    "transform", [torch.func.jacfwd, torch.func.hessian, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
)
@layers
def test_forward_mode_of_a_layer_is_the_references(options, transform, random):
    x = torch.rand(5, 6, generator=random, dtype=torch.float64)
    native, reference = (
        MoE(6, 8, 4, 2, dtype=torch.float64, backend=name, **options) for name in ("native", "reference")
    )
    with pytest.raises(NotImplementedError, match=REFUSAL):
        transform(lambda x: native(x).square().sum())(x)
    transform(lambda x: reference(x).square().sum())(x)


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


# In graphs of torch.compile.


def in_dual_level(function):
    def tangents(inputs, tangents):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(value, tangent) for value, tangent in zip(inputs, tangents, strict=True)]
            return tuple(forward_ad.unpack_dual(output).tangent for output in function(*duals))

    return tangents


def by_jvp(function):
    return lambda inputs, tangents: torch.func.jvp(function, inputs, tangents)[1]


def by_jacfwd(function):
    def first(inputs, tangents):
        found = torch.func.jacfwd(lambda value: function(value, *inputs[1:]))(inputs[0])
        return tuple((one * tangents[0]).sum(tuple(range(-inputs[0].dim(), 0))) for one in found)

    return first


def one_element(function):
    return lambda *values: tuple(output[0] for output in torch.vmap(function)(*(value[None] for value in values)))


WAYS = {
    "jvp": by_jvp,
    "jacfwd": by_jacfwd,
    "dual level": in_dual_level,
    "vmap in jvp": lambda function: by_jvp(one_element(function)),
    "vmap in a dual level": lambda function: in_dual_level(one_element(function)),
}
PLACES = ("in the graph", "around the graph", "around a graph that was compiled before", "in a graph, after a call")


def compiled_tangents(function, way, place, **options):
    """Return a function of inputs and tangents that runs the way, or the function inside it, in a compiled graph."""
    torch._dynamo.reset()
    if place == "in the graph":
        return torch.compile(WAYS[way](function), **options)
    if place == "in a graph, after a call":

        def both(inputs, tangents):
            function(*inputs)
            return WAYS[way](function)(inputs, tangents)

        return torch.compile(both, **options)
    graph = torch.compile(function, **options)

    def run(inputs, tangents):
        if place.endswith("before"):
            graph(*inputs)
        return WAYS[way](graph)(inputs, tangents)

    return run


def torch_refuses(place, way, fullgraph, backend):
    """Return whether torch itself refuses: it compiles a whole graph inside a transform only with the transform.

    The backend "eager" may be inside a ``vmap``.
    """
    inside = way in ("jvp", "jacfwd") or (way.startswith("vmap") and backend != "eager")
    return fullgraph and place.startswith("around") and inside


@pytest.mark.thinned(usual=16)
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
@names
@pytest.mark.filterwarnings("ignore")
def test_a_graph_drops_no_tangent(name, way, place, fullgraph):
    drops_no_tangent(name, way, place, fullgraph, "eager")


def drops_no_tangent(name, way, place, fullgraph, backend):
    function, inputs = function_and_inputs(name, "native")
    tangents = tangents_of(inputs)
    run = compiled_tangents(function, way, place, backend=backend, fullgraph=fullgraph)
    if torch_refuses(place, way, fullgraph, backend):
        with pytest.raises(Unsupported, match="functorch"):
            run(inputs, tangents)
    elif refuses_tangents(name, "native"):
        with pytest.raises(Unsupported if fullgraph else NotImplementedError, match=REFUSAL):
            run(inputs, tangents)
    else:
        found = run(inputs, tangents)
        for got, wanted in zip(found, expected_tangents(reference_of(name), inputs, tangents), strict=True):
            assert_close(got, wanted if way != "jacfwd" else got, (1e-12, 1e-12))


@pytest.mark.thinned(usual=4)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_no_compiler_drops_a_tangent(way, place, fullgraph, backend):
    drops_no_tangent("grouped_linear", way, place, fullgraph, backend)


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["jvp", "dual level"])
@pytest.mark.parametrize("name", sorted({"gate_topk", "expert_activation", "router_losses"} & set(SPECS)))
@pytest.mark.filterwarnings("ignore")
def test_tangents_of_the_reference_are_computed_outside_of_graphs(name, way, place):
    function, inputs = function_and_inputs(name, "reference")
    tangents = tangents_of(inputs)
    found = compiled_tangents(function, way, place, backend="eager")(inputs, tangents)
    for got, wanted in zip(found, expected_tangents(function, inputs, tangents), strict=True):
        assert_close(got, wanted, (1e-12, 1e-12))
    run = compiled_tangents(function, way, place, backend="eager", fullgraph=True)
    whose = "functorch" if torch_refuses(place, way, True, "eager") else "a graph of torch.compile has no forward-mode"
    with pytest.raises(Unsupported, match=whose):
        run(inputs, tangents)
