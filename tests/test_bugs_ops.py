"""Tests of bugs that were found and fixed in operators. Docstrings describe the bugs."""

import copy

import pytest
import torch

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
