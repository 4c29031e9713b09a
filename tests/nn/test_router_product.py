"""Tests of the router of 16-bit layers on a GPU: its arithmetic, and the cases that still use the float32 product.

The CPU stands in for a GPU: ``wide_products("cpu")`` gives it torch.mm with a float32 result, of exact products summed
in float32, as a GPU has it.
"""

import copy

import pytest
import torch
from called import Operators
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layers import make_input, make_layer
from pretended import wide_products
from torch.nn import functional as F

from pymoe.nn import Router
from pymoe.nn.router_product import wide_product

pytestmark = pytest.mark.only_on("cpu")
HALVES = (torch.bfloat16, torch.float16)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}  # relative size of a rounding error
TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}  # smallest number


@pytest.fixture(autouse=True)
def wide():
    with wide_products("cpu"):
        yield


def narrow_layer(dtype=torch.bfloat16, **options):
    return make_layer(hidden_size=16, dtype=dtype, **options)


def within(found, exact, bound):
    return bool(((found.double() - exact).abs() <= bound).all())


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(
    dtype=st.sampled_from(HALVES),
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 70), st.integers(1, 9)),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_logits_and_gradients_keep_their_bounds_against_float64(dtype, sizes, scale, seed):
    """pymoe/nn/router_product.py states the bounds; errors of float32 sums and of the last rounding are added here."""
    tokens, hidden, experts = sizes
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, hidden, generator=generator) * scale).to(dtype).requires_grad_()
    weight = torch.randn(experts, hidden, generator=generator).to(dtype).requires_grad_()
    dlogits = torch.randn(tokens, experts, generator=generator) * scale
    logits = wide_product(x, weight)
    found = torch.autograd.grad(logits, [x, weight], dlogits)

    def bound_of(a, b, of_operand, of_result):
        sizes, exact = a.abs() @ b.abs(), a @ b
        per_term = of_operand + 2 * a.shape[1] * UNIT[torch.float32]
        return exact, 1.01 * (per_term * sizes + UNIT[of_result] * exact.abs()) + a.shape[1] * TINY[of_result]

    wide_x, wide_weight, wide_dlogits = x.detach().double(), weight.detach().double(), dlogits.double()
    of_dlogits = UNIT[dtype] if dtype == torch.bfloat16 else 0.0
    assert logits.dtype == torch.float32
    assert within(logits.detach(), *bound_of(wide_x, wide_weight.T, 0.0, torch.float32))
    assert within(found[0], *bound_of(wide_dlogits, wide_weight, of_dlogits, dtype))
    assert within(found[1], *bound_of(wide_dlogits.T, wide_x, of_dlogits, dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_exact_sums_give_the_bits_and_the_choice_of_the_float32_product(dtype):
    """With small integers no order of a sum rounds, including ties among the logits."""
    router = Router(24, 12, 3, dtype=dtype)
    with torch.no_grad():
        router.weight.copy_(torch.randint(-3, 4, (12, 24)))
    x = torch.randint(-3, 4, (50, 24)).to(dtype)
    gate, logits = router(x)
    expected = F.linear(x.float(), router.weight.float())
    assert torch.equal(logits, expected)
    assert torch.equal(gate.experts, torch.sort(expected, stable=True, descending=True).indices[:, :3].int())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_no_operand_is_cast(dtype):
    layer = narrow_layer(dtype)
    x = make_input(5, hidden_size=16, dtype=dtype)
    with Operators() as called:
        layer.router(x)
    assert "aten.mm.dtype" in called.names
    assert "aten._to_copy.default" not in called.names


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_other_dtypes_are_multiplied_in_float32_as_before(x_dtype, weight_dtype):
    router = Router(16, 8, 2, dtype=weight_dtype)
    x = torch.randn(5, 16).to(x_dtype)
    with Operators() as called:
        logits = router.logits(x)
    assert "aten.mm.dtype" not in called.names
    assert torch.equal(logits, F.linear(x.float(), router.weight.float()))


def test_the_cpu_multiplies_in_float32_as_before():
    layer, x = narrow_layer(), make_input(5, hidden_size=16, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pymoe.nn.router_product.DEVICES", {"cuda"})
        assert torch.equal(layer.router.logits(x), F.linear(x.float(), layer.router.weight.float()))


def test_a_row_invariant_router_keeps_its_promise():
    router = Router(16, 8, 2, dtype=torch.bfloat16)
    router.row_invariant = True
    x = torch.randn(7, 16).bfloat16()
    assert torch.equal(router.logits(x)[3:4], router.logits(x[3:4]))


@pytest.mark.parametrize(
    "options",
    [{}, {"aux_loss_coef": 0.1, "z_loss_coef": 0.1}, {"num_shared_experts": 1}, {"score_before_experts": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "gate",
    [{}, {"renormalize": False}, {"score": "sigmoid", "bias_update_rate": 0.01}, {"router_bias": True}],
    ids=str,
)
def test_router_and_gate_in_one_node_are_those_of_two(options, gate):
    """A hook makes the layer call its router: two nodes then. The gradients differ by roundings to bfloat16."""
    layer = narrow_layer(**options, **gate)
    twin = copy.deepcopy(layer)
    twin.router.register_forward_hook(lambda *_: None)
    x = make_input(33, hidden_size=16, dtype=torch.bfloat16)
    direction = torch.randn(33, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for one in (layer, twin):
        y = one(x)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *one.parameters()], direction)])
    assert torch.equal(results[0][0], results[1][0])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
    assert torch.equal(layer.router.counted["load"], twin.router.counted["load"])


def test_gradients_of_the_parameters_alone_and_of_the_tokens_alone():
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    every = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    of_weight = torch.autograd.grad(layer(x).sum(), [layer.router.weight])
    of_tokens = torch.autograd.grad(layer(x).sum(), [x])
    of_frozen = torch.autograd.grad(layer(x.detach()).sum(), [layer.router.weight])
    assert torch.equal(of_tokens[0], every[0])
    assert torch.equal(of_weight[0], every[1])
    assert torch.equal(of_frozen[0], every[1])


def test_what_the_experts_leave_is_added_to_once_however_often_a_graph_runs():
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    y = layer(x)
    first, second = (torch.autograd.grad(y, [x], torch.ones_like(y), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_gradient_that_shared_experts_see_stays_as_they_saw_it():
    """Alone, the experts' gradient of the tokens is added to in place; a hook on what others take may keep it."""
    layer, x = narrow_layer(num_shared_experts=1), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    seen = []

    def watch(module, args):
        args[0].register_hook(lambda grad: seen.append((grad, grad.clone())))

    layer.shared.register_forward_pre_hook(watch)
    layer(x).sum().backward()
    (kept, copied), *others = seen
    assert not others
    assert torch.equal(kept, copied)
    assert not torch.equal(kept, x.grad)


def test_double_backward_is_that_of_the_float32_product():
    """Compare second derivatives of a gradient penalty, computed through two products, with float64."""
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    x = torch.randn(7, 12, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()

    def penalty(product, x, weight):
        loss = torch.tanh(product(x, weight)).sum()
        dx, dweight = torch.autograd.grad(loss, [x, weight], create_graph=True)
        return dx.double().square().sum() + dweight.double().square().sum()

    found = torch.autograd.grad(penalty(wide_product, x, weight), [x, weight])
    leaves = [value.detach().double().requires_grad_() for value in (x, weight)]
    expected = torch.autograd.grad(penalty(F.linear, *leaves), leaves)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))


def test_a_layer_can_be_differentiated_twice():
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer).double()
    leaf = x.detach().double().requires_grad_()
    penalties = []
    for one, tokens in ((layer, x), (twin, leaf)):
        (dx,) = torch.autograd.grad(one(tokens).double().square().sum(), [tokens], create_graph=True)
        penalties.append(torch.autograd.grad(dx.double().square().sum(), [one.router.weight])[0].double())
    torch.testing.assert_close(penalties[0], penalties[1], rtol=0.1, atol=0.1 * float(penalties[1].abs().max()))


def test_autocast_changes_nothing_where_the_layer_is_in_16_bits():
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    outside = torch.autograd.grad(layer(x).sum(), [x, layer.router.weight])
    with torch.autocast("cpu", dtype=torch.float16):  # not the layer's dtype: neither pass may cast the router's
        logits = layer.router.logits(x)
        dx, dweight = torch.autograd.grad(logits.sum(), [x, layer.router.weight])
    assert torch.equal(logits, wide_product(x, layer.router.weight))
    ones = torch.ones(9, 8, dtype=torch.bfloat16)
    assert torch.equal(dx, ones @ layer.router.weight)
    assert torch.equal(dweight, ones.T @ x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    inside = torch.autograd.grad(y.sum(), [x, layer.router.weight])
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_scaled_gradients_that_float16_cannot_hold_reach_the_float16_product_in_float32():
    """Gradients of logits exceed 65504, as a loss scale makes them, or lie below float16's least number."""
    x = torch.full((3, 8), 2.0**-9, dtype=torch.float16, requires_grad=True)
    weight = torch.full((4, 8), 2.0**-9, dtype=torch.float16, requires_grad=True)
    for size in (2.0**20, 2.0**-30):
        dx, dweight = torch.autograd.grad(wide_product(x, weight), [x, weight], torch.full((3, 4), size))
        assert torch.equal(dx, torch.full_like(dx, 4 * size * 2.0**-9))
        assert torch.equal(dweight, torch.full_like(dweight, 3 * size * 2.0**-9))
    large = torch.full((1, 64), 60000.0, dtype=torch.float16)
    assert float(wide_product(large, large)) == pytest.approx(64 * 60000.0**2, rel=1e-6)


def test_a_loss_scale_scales_gradients_and_nothing_else():
    """The loss scales are powers of two, as in torch.amp.GradScaler."""
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)
    plain, scaled = (torch.autograd.grad(scale * layer(x).sum(), [x, *layer.parameters()]) for scale in (1.0, 1024.0))
    for one, large in zip(plain, scaled, strict=True):
        assert torch.equal(1024 * one, large)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_compiles_into_one_graph(dtype):
    torch._dynamo.reset()
    layer, x = narrow_layer(dtype), make_input(9, hidden_size=16, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x), layer(x)
    assert torch.equal(y, expected)
    for found, wanted in zip(
        torch.autograd.grad(y.sum(), [x, layer.router.weight]),
        torch.autograd.grad(expected.sum(), [x, layer.router.weight]),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_transforms_of_torch_func_differentiate_it():
    layer, x = narrow_layer(), make_input(9, hidden_size=16, dtype=torch.bfloat16)

    def loss(weight):
        return torch.func.functional_call(layer, {"router.weight": weight}, (x.detach(),)).float().square().sum()

    weight = layer.router.weight.detach()
    found = torch.func.grad(loss)(weight)
    (expected,) = torch.autograd.grad(loss(layer.router.weight), [layer.router.weight])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_the_gates_narrow_gradients_are_the_others_rounded_once_more():
    logits, grad = torch.randn(20, 11), torch.randn(20, 3)
    experts = torch.topk(logits, 3).indices.int()
    for score in ("softmax", "sigmoid"):
        for renormalize in (True, False):
            options = (grad, logits, experts, score, renormalize, True, 1.5)
            wide = torch.ops.pymoe.gate_topk_backward(*options)
            assert torch.equal(torch.ops.pymoe.gate_topk_backward(*options, True), wide.bfloat16())
    with pytest.raises(ValueError, match="logits must have dtype Float, got Double"):
        torch.ops.pymoe.gate_topk_backward(grad.double(), logits.double(), experts, "softmax", True, True, 1.0, True)
