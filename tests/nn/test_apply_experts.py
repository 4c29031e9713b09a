"""apply_experts: one native call gives the same bits as the separate operators, which run when gradients are needed."""

import sys

import pytest
import torch
from specs.comparison import assert_close, assert_same_bits
from specs.expert_activation import ACTIVATIONS
from torch.autograd import forward_ad

from pymoe import ops
from pymoe._common.types import FLOATING, cast_operands, is_gated
from pymoe.nn import apply_experts
from pymoe.ops.grouped_linear import leaves_bias

HIDDEN, FFN, EXPERTS = 10, 6, 5


def arguments(tokens=7, choices=3, dtype=torch.float32, kind="swiglu", transposed=False, bias=True, seed=0):
    """Return the positional and keyword arguments of a call."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5).to(dtype)

    def weight(outputs, inputs):
        return random(EXPERTS, inputs, outputs).transpose(1, 2) if transposed else random(EXPERTS, outputs, inputs)

    inner = FFN * (2 if is_gated(kind) else 1)
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :choices].int()
    keywords = {"activation": kind}
    if bias:
        keywords.update(b_in=random(EXPERTS, inner), b_out=random(EXPERTS, HIDDEN))
    weights = torch.rand(tokens, choices, generator=generator, dtype=torch.float64 if dtype.itemsize == 8 else None)
    return [random(tokens, HIDDEN), experts, weights, weight(inner, HIDDEN), weight(HIDDEN, FFN)], keywords


def separately(x, experts, weights, w_in, w_out, *, activation, b_in=None, b_out=None, capacity=None, foreign=False):
    routing = ops.build_routing(experts, EXPERTS, capacity=capacity, foreign_experts=foreign)
    offsets = routing.offsets
    if leaves_bias(cast_operands(x)[0]):  # a GPU where torch makes the products and other operators add the biases
        rows = ops.grouped_linear(ops.dispatch(x, routing), w_in, offsets)
        biases = () if b_in is None else (b_in.to(rows.dtype), offsets)
        rows = ops.expert_activation(rows, activation, *biases)
        rows = ops.grouped_linear(rows, w_out, offsets)
        return ops.combine(rows, routing, weights, None if b_out is None else b_out.to(rows.dtype))
    rows = ops.grouped_linear(ops.dispatch(x, routing), w_in, offsets, b_in)
    rows = ops.grouped_linear(ops.expert_activation(rows, activation), w_out, offsets, b_out)
    return ops.combine(rows, routing, weights)


@pytest.fixture
def fused_calls(monkeypatch):
    """Count the native calls that do the whole computation."""
    count = [0]
    operator = torch.ops.pymoe.apply_experts.default

    def counted(*args):
        count[0] += 1
        return operator(*args)

    monkeypatch.setattr(sys.modules["pymoe.nn.apply_experts"], "APPLY_EXPERTS", counted)
    return count


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_one_call_returns_the_bits_of_the_separate_operators(kind, dtype, fused_calls):
    made = 0
    for tokens in (0, 1, 2, 33):
        for options in ({}, {"transposed": True, "bias": False}, {"choices": 1}, {"choices": EXPERTS}):
            for capacity in (None, 0, 2):
                args, keywords = arguments(tokens, dtype=dtype, kind=kind, **options)
                found = apply_experts(*args, capacity=capacity, **keywords)
                assert_same_bits(found, separately(*args, capacity=capacity, **keywords))
                made += 1
    assert fused_calls[0] == made


@pytest.mark.parametrize("capacity", [None, 3000])
@pytest.mark.parametrize(("hidden", "ffn"), [(128, 128), (64, 128), (192, 64)], ids=str)
def test_large_results_in_memory_that_was_used_before_have_the_same_bits(hidden, ffn, capacity, device):
    """From 4 MiB on, a result reuses the memory of its input's input if it fits there, as in some of the cases."""
    random = torch.Generator().manual_seed(0)
    x, choice = torch.randn(4096, hidden, generator=random), torch.rand(4096, EXPERTS, generator=random)
    experts, weights = choice.argsort(dim=1)[:, :4].int(), torch.rand(4096, 4, generator=random)
    w_in = torch.randn(EXPERTS, 2 * ffn, hidden, generator=random)
    w_out = torch.randn(EXPERTS, hidden, ffn, generator=random)
    args = [one.to(device) for one in (x, experts, weights, w_in, w_out)]
    found = apply_experts(*args, activation="swiglu", capacity=capacity)
    assert_same_bits(found, separately(*args, activation="swiglu", capacity=capacity))
    assert_same_bits(args[0].cpu(), x.cpu())


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_foreign_experts_add_nothing(index):
    args, keywords = arguments(20)
    experts = args[1].to(index)
    elsewhere = torch.rand(experts.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    beyond = torch.where(elsewhere, experts + EXPERTS, experts)
    alone = args[2] * ~elsewhere
    found = apply_experts(args[0], beyond, *args[2:], foreign_experts=True, **keywords)
    assert_same_bits(found, separately(args[0], beyond, *args[2:], foreign=True, **keywords))
    assert_close(found, apply_experts(args[0], experts, alone, *args[3:], **keywords), (1e-6, 1e-6))
    recorded = apply_experts(args[0].requires_grad_(), beyond, *args[2:], foreign_experts=True, **keywords)
    assert_same_bits(recorded.detach(), found)


@pytest.mark.only_on("cpu")  # on CUDA, only in debug mode
@pytest.mark.parametrize("requires_grad", [False, True])
def test_other_indices_outside_raise(requires_grad):
    (x, experts, *rest), keywords = arguments()
    x.requires_grad_(requires_grad)
    with pytest.raises(IndexError, match="experts must lie in"):
        apply_experts(x, experts + 1, *rest, **keywords)
    with pytest.raises(IndexError, match="experts must lie in"):
        apply_experts(x, experts - 1, *rest, foreign_experts=True, **keywords)


def test_weights_may_have_any_floating_dtype_and_tensors_any_strides():
    (x, experts, weights, *networks), keywords = arguments()
    narrow = weights.bfloat16()
    expected = apply_experts(x, experts, narrow.float(), *networks, **keywords)
    assert_same_bits(apply_experts(x, experts, narrow, *networks, **keywords), expected)
    strided = [value.T.contiguous().T for value in (x, experts, narrow)]
    assert_same_bits(apply_experts(*strided, *networks, **keywords), expected)


def test_autocast_casts_as_the_separate_operators_do(device):
    args, keywords = arguments()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found, expected = apply_experts(*args, **keywords), separately(*args, **keywords)
    assert found.dtype == torch.bfloat16
    assert_same_bits(found, expected)


def test_a_function_may_stand_between_the_products():
    args, keywords = arguments(kind="relu")
    found = apply_experts(*args, **keywords | {"activation": torch.relu})
    assert_same_bits(found, apply_experts(*args, **keywords))
    leaves = [value.requires_grad_() for value in args if value.is_floating_point()]
    grads = torch.autograd.grad(apply_experts(*args, **keywords | {"activation": torch.relu}).sum(), leaves)
    assert all(bool(grad.any()) for grad in grads)


@pytest.mark.parametrize("asking", ["x", "weights", "w_in", "w_out", "b_in", "b_out"])
def test_what_requires_grad_gets_its_gradient(asking, fused_calls):
    args, keywords = arguments(dtype=torch.float64)
    named = dict(zip(("x", "experts", "weights", "w_in", "w_out"), args, strict=True)) | keywords
    named[asking].requires_grad_()
    (found,) = torch.autograd.grad(apply_experts(**named).square().sum(), named[asking])
    (expected,) = torch.autograd.grad(separately(**named).square().sum(), named[asking])
    assert_same_bits(found, expected)
    assert fused_calls[0] == 0
    with torch.no_grad():
        apply_experts(**named)
    assert fused_calls[0] == 1


@pytest.mark.only_on("cpu")
def test_transforms_and_tangents_are_not_lost():
    args, keywords = arguments(dtype=torch.float64)

    def loss(x):
        return apply_experts(x, *args[1:], **keywords).square().sum()

    x = args[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert_close(torch.func.grad(loss)(args[0]), expected, (1e-12, 1e-12))
    with forward_ad.dual_level(), pytest.raises((NotImplementedError, RuntimeError)):
        loss(forward_ad.make_dual(args[0], args[0]))


@pytest.mark.only_on("cpu", "cuda")
def test_compiles_into_one_call():
    args, keywords = arguments(9)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *args: apply_experts(*args, **keywords), fullgraph=True, backend=backend)
    assert_same_bits(compiled(*args), apply_experts(*args, **keywords))
    called = [node.target for graph in graphs for node in graph.graph.nodes if "pymoe" in str(node.target)]
    assert called == [torch.ops.pymoe.apply_experts.default]
    torch._dynamo.reset()


ERRORS = [
    ({"x": torch.zeros(7)}, ValueError, "x must have shape (T, H)"),
    ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
    ({"x": torch.zeros(7, HIDDEN).double()}, TypeError, "w_in must have dtype float64, got torch.float32"),
    ({"experts": torch.zeros(7, 3)}, TypeError, "experts must have dtype int32 or int64"),
    ({"experts": torch.zeros(6, 3).int()}, ValueError, "experts must have size 7 (T of x)"),
    ({"experts": torch.full((7, 3), EXPERTS)}, IndexError, "experts must lie in [0, E) (E = 5), got 5"),
    ({"weights": torch.zeros(7, 2)}, ValueError, "weights must have the shape of experts ((7, 3)), got (7, 2)"),
    ({"weights": torch.zeros(7, 3).double()}, TypeError, "weights must not have dtype float64"),
    ({"weights": torch.zeros(7, 3).int()}, TypeError, "weights must have dtype float32"),
    ({"w_in": torch.zeros(EXPERTS, 2 * FFN, 9)}, ValueError, "w_in must have size 10 (H of x)"),
    ({"w_in": torch.zeros(EXPERTS, FFN, HIDDEN), "b_in": None}, ValueError, "(E, 2F, H) with the F of w_out (6)"),
    ({"w_in": torch.zeros(0, 2, HIDDEN), "w_out": torch.zeros(0, HIDDEN, 1)}, ValueError, "with E >= 1"),
    ({"w_out": torch.zeros(4, HIDDEN, FFN)}, ValueError, "w_out must have size 5 (E of w_in)"),
    ({"w_out": torch.zeros(HIDDEN, FFN)}, ValueError, "w_out must have shape (E, O, F)"),
    ({"b_in": torch.zeros(EXPERTS, FFN)}, ValueError, "b_in must have shape (5, 12), got (5, 6)"),
    ({"b_out": torch.zeros(EXPERTS, HIDDEN).half()}, TypeError, "b_out must have dtype float32"),
    ({"activation": "tanh"}, ValueError, "activation must be one of 'swiglu'"),
    ({"activation": None}, TypeError, "activation must be a string or a ClampedSwiglu, got NoneType"),
    ({"capacity": -1}, ValueError, "capacity must be None or at least 0"),
    ({"foreign_experts": 1}, TypeError, "foreign_experts must be a bool, got int"),
]


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors_name_the_argument_and_the_rule(wrong, error, message):
    args, keywords = arguments(kind="swiglu")
    named = dict(zip(("x", "experts", "weights", "w_in", "w_out"), args, strict=True)) | keywords | wrong
    with pytest.raises(error) as raised:
        apply_experts(**named)
    assert message in str(raised.value)


def decisions(args, keywords):
    """Return whether the quick test accepts a call's arguments, and whether the named checks accept them."""
    module = sys.modules["pymoe.nn.apply_experts"]
    options = {"b_in": None, "b_out": None, "activation": "swiglu", "capacity": None, "foreign_experts": False}
    named = dict(zip(("x", "experts", "weights", "w_in", "w_out"), args, strict=True)) | options | keywords
    try:
        module._check(**named)
    except (TypeError, ValueError):
        return module._fits(**named), False
    return module._fits(**named), True


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("kind", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_quick_test_accepts_usual_calls(kind, dtype):
    for options in ({}, {"tokens": 0}, {"transposed": True, "bias": False}):
        quick, named = decisions(*arguments(dtype=dtype, kind=kind, **options))
        assert named
        assert quick == isinstance(kind, str)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(("wrong", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_the_quick_test_accepts_nothing_that_the_named_checks_refuse(wrong, error, message):
    args, keywords = arguments()
    first = dict(zip(("x", "experts", "weights", "w_in", "w_out"), args, strict=True))
    args = [wrong.get(name, value) for name, value in first.items()]
    others = {name: value for name, value in wrong.items() if name not in first}
    fits = error is IndexError  # the indices have not been checked yet
    assert decisions(args, keywords | others) == (fits, fits)
