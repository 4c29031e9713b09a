"""Tests of the biases that ``expert_activation`` and ``combine`` add: compared with a product that adds them, gradients
in 16 bits, compiled code, and transforms.
"""

from functools import partial

import pytest
import torch

import pymoe
from pymoe import ops
from pymoe.ops import ClampedSwiglu

KINDS = ["swiglu", "gelu", ClampedSwiglu(0.5, alpha=1.702, up_offset=1.0, interleaved=True)]


def inputs(dtype, seed=0):
    """Return rows, weights and biases of four experts, one of them without rows, and a routing with dropped choices."""
    random = torch.Generator().manual_seed(seed)
    experts = torch.randint(0, 3, (17, 2), generator=random, dtype=torch.int32)
    experts = torch.where(experts == 2, 3, experts)
    routing = ops.build_routing(experts, 4, capacity=10)
    h, y = (torch.randn(34, n, generator=random).to(dtype) for n in (12, 9))
    b_in, b_out = (torch.randn(4, n, generator=random).to(dtype) for n in (12, 9))
    return h, y, torch.rand(17, 2, generator=random), b_in, b_out, routing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=["swiglu", "gelu", "clamped"])
def test_the_gradient_of_a_bias_is_the_sum_of_the_rows_gradients(dtype, kind):
    """It has the bits of the gradient that a product with the bias gives it, for the same gradients of rows."""
    h, y, weights, b_in, b_out, routing = inputs(dtype)
    for values, bias, call in (
        (h, b_in, lambda values, bias: ops.expert_activation(values, kind, bias, routing.offsets)),
        (y, b_out, lambda values, bias: ops.combine(values, routing, weights, bias)),
    ):
        values, bias = values.requires_grad_(), bias.requires_grad_()
        out = call(values, bias)
        grad = torch.rand(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        of_rows, of_bias = torch.autograd.grad(out, [values, bias], grad)
        parts = [of_rows[a:b].double().sum(0) for a, b in zip(routing.offsets[:-1], routing.offsets[1:], strict=True)]
        expected = torch.stack(parts)
        assert not of_bias[2].any()
        assert of_bias[0].any()
        assert (of_bias.double() - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS, ids=["swiglu", "gelu", "clamped"])
def test_the_same_as_a_product_that_adds_the_biases(kind):
    """In float64, biases added later give the results and gradients of biases added in the products, up to rounding."""
    h, _, weights, b_in, b_out, routing = inputs(torch.float64)
    random = torch.Generator().manual_seed(2)
    features = 12 if kind == "gelu" else 6
    w_out = torch.randn(4, 9, features, generator=random, dtype=torch.float64)
    weights = weights.double()
    results = []
    for later in (True, False):
        leaves = [value.detach().clone().requires_grad_() for value in (h, b_in, b_out, w_out, weights)]
        h_, b_in_, b_out_, w_out_, weights_ = leaves
        if later:
            active = ops.expert_activation(h_, kind, b_in_, routing.offsets)
            out = ops.combine(ops.grouped_linear(active, w_out_, routing.offsets), routing, weights_, b_out_)
        else:
            eye = torch.eye(12, dtype=torch.float64).expand(4, 12, 12)
            active = ops.expert_activation(ops.grouped_linear(h_, eye, routing.offsets, b_in_), kind)
            out = ops.combine(ops.grouped_linear(active, w_out_, routing.offsets, b_out_), routing, weights_)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_code_has_the_same_bits():
    h, y, weights, b_in, b_out, routing = inputs(torch.float32)

    def both(h, y, b_in, b_out):
        return ops.expert_activation(h, "swiglu", b_in, routing.offsets), ops.combine(y, routing, weights, b_out)

    results = []
    for function in (both, torch.compile(both, fullgraph=True, backend="aot_eager")):
        leaves = [value.detach().clone().requires_grad_() for value in (h, y, b_in, b_out)]
        outputs = function(*leaves)
        results.append([*outputs, *torch.autograd.grad(sum(value.sum() for value in outputs), leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def losses(name):
    """Return a function of a bias (E, N), by pymoe and by the reference, and a bias."""
    h, y, weights, b_in, b_out, routing = inputs(torch.float64)
    weights = weights.double()

    def loss(module, bias):
        if name == "combine":
            return module.combine(y, routing, weights, bias).pow(3).sum()
        return module.expert_activation(h, "swiglu", bias, routing.offsets).pow(3).sum()

    return (*(partial(loss, module) for module in (ops, pymoe.reference)), b_out if name == "combine" else b_in)


@pytest.mark.parametrize("name", ["expert_activation", "combine"])
def test_second_derivatives_of_a_bias(name):
    native, reference, bias = losses(name)

    def twice(loss):
        return torch.func.grad(lambda value: torch.func.grad(loss)(value).square().sum())(bias)

    torch.testing.assert_close(twice(native), twice(reference))


@pytest.mark.parametrize("name", ["expert_activation", "combine"])
def test_vmap_over_biases(name):
    native, reference, bias = losses(name)
    several = torch.stack([bias, 2 * bias])
    found = torch.func.vmap(torch.func.grad(native))(several)
    torch.testing.assert_close(found, torch.stack([torch.func.grad(reference)(one) for one in several]))
