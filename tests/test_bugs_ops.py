"""Tests of bugs that were found and fixed in operators. Docstrings describe the bugs."""

import copy

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad

import pymoe


@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
@pytest.mark.parametrize("raw", [False, True])
def test_a_buffer_that_dispatch_fills_is_known_to_have_changed(backend, raw):
    """``dispatch(out=buffer)`` wrote to the buffer without increasing its version, by which autograd detects changes.

    A backward pass through an earlier use of the buffer then used the new contents, so gradients were wrong without an
    error. The same happened when compiled with the eager backend.
    """
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)
    x, buffer, weight = torch.rand(2, 3), torch.ones(4, 3), torch.ones(4, 3, requires_grad=True)
    y = (weight * buffer).sum()

    def fill(buffer):
        if raw:
            torch.ops.pymoe.dispatch_out(x, routing.slot, routing.offsets, buffer)
        else:
            pymoe.ops.dispatch(x, routing, out=buffer)

    torch._dynamo.reset()
    (fill if backend == "none" else torch.compile(fill, fullgraph=True, backend=backend))(buffer)
    assert torch.equal(buffer, pymoe.reference.dispatch(x, routing))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_buffer_made_for_inference_is_filled():
    """A tensor created in inference mode has no version counter."""
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)
    with torch.inference_mode():
        x, buffer = torch.rand(2, 3), torch.ones(4, 3)
        pymoe.ops.dispatch(x, routing, out=buffer)
        assert torch.equal(buffer, pymoe.reference.dispatch(x, routing))


def test_the_reference_of_gelu_does_not_depend_on_the_processor():
    """On machines with AVX-512, torch leaves gelu to oneDNN, which returns NaN for infinity, and infinity for the
    largest float. The reference called torch's gelu, so native operator and specification differed on these machines
    only.
    """
    largest = torch.finfo(torch.float32).max
    h = torch.tensor([[torch.inf, largest, -largest, torch.nan]]).repeat(4, 8)
    expected = torch.tensor([[torch.inf, largest, 0.0, torch.nan]]).repeat(4, 8)
    for expert_activation in (pymoe.ops.expert_activation, pymoe.reference.expert_activation):
        y = expert_activation(h, "gelu")
        assert torch.equal(y.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ["expert_activation", "gate_topk", "router_losses"])
def test_what_vjp_returned_is_called_after_its_transform(name):
    """The tensors returned by vjp are still wrapped at that point: a gradient of a gradient was sought in a graph
    that had none, and raised.
    """
    torch.manual_seed(0)
    load = torch.tensor([1, 2, 3, 0], dtype=torch.int32)
    function = {
        "expert_activation": lambda values: pymoe.ops.expert_activation(values, "swiglu"),
        "gate_topk": lambda values: pymoe.ops.gate_topk(values, 2).weights,
        "router_losses": lambda values: sum(pymoe.ops.router_losses(values, load)),
    }[name]
    values = torch.randn(3, 4, dtype=torch.float64)
    y, pulled = torch.func.vjp(function, values)
    cotangent = torch.randn(y.shape, dtype=y.dtype)
    (found,) = pulled(cotangent)
    leaf = values.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf), leaf, cotangent)
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


@pytest.mark.parametrize(
    "transform",
    [torch.func.grad, torch.func.vmap, torch.func.functionalize, lambda f: torch.func.vmap(torch.func.grad(f))],
    ids=["grad", "vmap", "functionalize", "both"],
)
def test_statistics_that_are_asked_for_inside_a_transform_outlive_it(transform):
    """Statistics that were read inside a transform were computed as part of it: ``vmap`` raised, and ``grad`` left
    wrapped tensors in the layer, which ``copy.deepcopy``, pickle and numpy refuse.
    """
    torch.manual_seed(0)
    layer, x = pymoe.nn.MoE(8, 8, 4, 2), torch.randn(5, 8)
    layer(x)
    expected = layer.stats
    layer(x)
    transform(lambda values: (values * layer.stats.z_loss).sum())(torch.ones(3, 3))
    for one in (layer, copy.deepcopy(layer)):
        for value, wanted in zip(one.stats, expected, strict=True):
            assert value.numpy() == pytest.approx(wanted.numpy())


def tangent_in_a_level(function):
    def tangent_of(x, tangent):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent

    return tangent_of


OPERANDS = {"weight": torch.full((2, 3, 8), 0.1), "offsets": torch.tensor([0, 2, 4], dtype=torch.int32)}
CHOICE = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]), torch.full((4, 2), 0.5)
REFUSING = {
    "grouped_linear": lambda x: pymoe.ops.grouped_linear(x, **OPERANDS),
    "router_z_loss": pymoe.ops.router_z_loss,
    "quantized_linear": lambda x: pymoe.ops.quantized_linear(
        x, pymoe.ops.quantize_weight(OPERANDS["weight"], 8), OPERANDS["offsets"]
    ),
    "apply_experts": lambda x: pymoe.nn.apply_experts(
        x, *CHOICE, torch.full((2, 8, 8), 0.1), torch.full((2, 8, 8), 0.1), activation="relu"
    ),
    "MoE": pymoe.nn.MoE(8, 8, 2, 1).requires_grad_(False),
}


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("when", ["at once", "after a call", "in a later call"])
@pytest.mark.parametrize("name", REFUSING)
def test_tangents_are_not_dropped_in_a_graph(name, when, fullgraph):
    """torch.compile traced operators without what refuses their tangents outside of graphs: derivatives were 0.

    A graph must not take the level of forward mode for the one that it saw first, nor serve calls at another.
    """
    function = REFUSING[name]

    def after_a_call(x, tangent):
        function(x)
        return tangent_in_a_level(function)(x, tangent)

    torch._dynamo.reset()
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0))
    if when == "in a later call":
        graph = torch.compile(lambda x: function(x), backend="eager", fullgraph=fullgraph)
        graph(x)
        run = tangent_in_a_level(graph)
    else:
        whole = tangent_in_a_level(function) if when == "at once" else after_a_call
        run = torch.compile(whole, backend="eager", fullgraph=fullgraph)
    with pytest.raises(Unsupported if fullgraph else NotImplementedError, match="no forward-mode derivative"):
        run(x, x)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_tangents_of_the_reference_are_not_those_of_its_steps(fullgraph):
    """A graph differentiated the steps in which the reference computes exp, which has integers in between."""
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, expected = torch.func.jvp(pymoe.reference.router_z_loss, (x,), (x,))
    graph = torch.compile(
        lambda x: torch.func.jvp(pymoe.reference.router_z_loss, (x,), (x,))[1], backend="eager", fullgraph=fullgraph
    )
    torch._dynamo.reset()
    if fullgraph:
        with pytest.raises(Unsupported, match=r"a graph of torch.compile has no forward-mode derivative"):
            graph(x)
    else:
        assert torch.equal(graph(x), expected)


@pytest.mark.parametrize("way", ["jvp", "vmap", "graph"])
def test_tangents_that_a_buffer_of_dispatch_cannot_take_are_refused_where_they_cannot_be_seen(way):
    """A look at the tangent of a tensor inside vmap raised an error of torch's; a graph dropped the tangents."""
    routing = pymoe.ops.build_routing(torch.tensor([[0, 1], [1, 0]]), 2)

    def fill(x):
        return pymoe.ops.dispatch(x, routing, out=torch.empty(4, 3))

    torch._dynamo.reset()
    x = torch.ones(1, 2, 3)
    run = {
        "jvp": lambda x: torch.func.jvp(fill, (x[0],), (x[0],)),
        "vmap": lambda x: tangent_in_a_level(torch.vmap(fill))(x, x),
        "graph": lambda x: torch.compile(tangent_in_a_level(fill), backend="eager")(x[0], x[0]),
    }[way]
    with torch.no_grad(), pytest.raises(ValueError, match="dispatch: out= has no tangent"):
        run(x)


def test_a_step_of_a_pipe_refuses_tangents_inside_vmap():
    """A look at the tangent of a tensor inside vmap raised an error of torch's."""
    pipe = pymoe.Pipe(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), balance=[1, 1], chunks=1)
    x = torch.ones(1, 2, 3)
    with pytest.raises(NotImplementedError, match=r"Pipe\.step: forward-mode differentiation"):
        tangent_in_a_level(torch.vmap(lambda x: pipe.step(x, loss_fn=torch.sum, reduction="sum")))(x, x)
