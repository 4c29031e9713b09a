"""With gradients, a layer or apply_experts is one autograd node, with the same bits as separate operators."""

import copy
import threading

import pytest
import torch
from called import Operators, functions_of
from limits import LONG
from moe_layers import OPTIONS, assert_same, gradients, make_input, make_layer, one_by_one, run
from specs.comparison import assert_same_bits
from specs.expert_activation import ACTIVATIONS
from torch.utils.checkpoint import checkpoint

from pymoe._common.types import FLOATING
from pymoe.nn import apply_experts, recorded, set_aux_loss_scale
from pymoe.reference.expert_activation import is_gated

pytestmark = pytest.mark.only_on("cpu")
HIDDEN, FFN, EXPERTS = 10, 6, 5
CALL = "pymoe.apply_chosen_experts_recorded.default"


def nodes_of(y):
    """Return the names of pymoe's nodes behind a result."""
    found, waiting, seen = [], [y.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).__name__.removesuffix("Backward")
        if getattr(node, "_forward_cls", type).__module__.startswith("pymoe."):
            found.append(name)
        waiting += [after for after, _ in node.next_functions]
    return sorted(found)


def both(make, *shape, dtype):
    """Return the results of a fresh layer as one node and by operators: output, gradients, statistics and counts."""
    results = []
    for single in (True, False):
        layer, x = make(), make_input(*shape, dtype=dtype)
        with pytest.MonkeyPatch.context() if single else one_by_one():
            y, found = run(layer, x)
        results.append((y, found, layer.stats, layer.router.counted["load"].clone()))
    return results


def assert_same_results(found, expected):
    (y, grads, stats, counted), (y_expected, grads_expected, stats_expected, counted_expected) = found, expected
    assert_same_bits(y, y_expected)
    assert grads.keys() == grads_expected.keys()
    for name, grad in grads_expected.items():
        assert (grad is None) == (grads[name] is None), name
        if grad is not None:
            assert_same_bits(grads[name], grad)
            assert grads[name].stride() == grad.stride(), name
    assert all(torch.equal(a, b) for a, b in zip(stats, stats_expected, strict=True))
    assert torch.equal(counted, counted_expected)


@pytest.mark.thinned(usual=60)
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_has_the_bits_of_its_operators(options, dtype):
    for shape in ((0,), (1,), (21,), (3, 5), ()):
        assert_same_results(*both(lambda: make_layer(**options, dtype=dtype), *shape, dtype=dtype))


@pytest.mark.parametrize(
    "frozen", ["x", "router", "experts", "w_in", "w_out", "b_in", "b_out", "all but b_in", "all but x"]
)
@pytest.mark.parametrize("options", ["everything", "bias"])
def test_what_requires_no_gradient_gets_none(frozen, options):
    def make():
        layer = make_layer(**OPTIONS[options])
        parameters = dict(layer.named_parameters())
        if frozen.startswith("all but"):
            layer.requires_grad_(False)
            if frozen.endswith("b_in"):
                layer.experts.b_in.requires_grad_()
        for name, parameter in parameters.items():
            if frozen in name.split("."):
                parameter.requires_grad_(False)
        return layer

    results = []
    for single in (True, False):
        layer, x = make(), make_input(9)
        x.requires_grad_(frozen not in ("x", "all but b_in"))
        with pytest.MonkeyPatch.context() if single else one_by_one():
            y, found = run(layer, x)
        results.append((y, found, layer.stats, layer.router.counted["load"].clone()))
    assert_same_results(*results)


def test_experts_without_tokens_get_zeros():
    def make():
        layer = make_layer(bias=True, dtype=torch.float32)
        with torch.no_grad():
            layer.router.weight[3:] = -100 * layer.router.weight[:1].sign()
        return layer

    found, expected = both(make, 2, dtype=torch.float32)
    assert_same_results(found, expected)
    idle = found[2].load == 0
    assert idle.sum() >= 3
    assert not found[1]["experts.w_in"][idle].any()


def test_strided_tokens_and_an_expanded_gradient_have_the_same_bits():
    layer = make_layer(bias=True, num_shared_experts=1)
    for strided in (
        lambda x: x.t().contiguous().t(),
        lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
        lambda x: x.expand(3, 5, 12),
    ):
        results = []
        for single in (True, False):
            x = make_input(5)
            with pytest.MonkeyPatch.context() if single else one_by_one():
                y = layer(strided(x))
            y.sum().backward()  # its gradient is one expanded number
            results.append((y.detach(), gradients(layer, x)))
        assert_same_bits(results[0][0], results[1][0])
        assert_same(results[0][1], results[1][1])


def test_it_is_one_node_and_one_native_call():
    layer, x = make_layer(), make_input(3)
    with Operators() as called:
        y = layer(x)
    assert [name for name in called.names if name.startswith("pymoe.")] == [CALL]
    assert nodes_of(y) == ["_ChosenExperts"]
    with one_by_one():
        assert nodes_of(layer(x)) == [
            "Combine",
            "ExpertActivation",
            "GateTopk",
            "GroupedLinear",
            "GroupedLinear",
            "SpreadRows",
        ]
    balanced = make_layer(bias_update_rate=0.01, aux_loss_coef=0.1)
    assert nodes_of(balanced(x)) == ["_ChosenExperts", "_CountAndInject"]


def test_it_runs_few_functions_of_python():
    """A forward with gradients ran 133 functions from 31 files."""
    layer, x = make_layer(), make_input(1)
    names = [name for module, name in functions_of(lambda: layer(x)) if module.startswith("pymoe.")]
    assert len(names) <= 42, f"{len(names)} functions: {names}"


@pytest.mark.parametrize("scale", [0.5, torch.tensor(3.0)], ids=["number", "tensor"])
def test_injected_losses_are_scaled_alike(scale):
    def make():
        layer = make_layer(aux_loss_coef=0.5, z_loss_coef=0.3)
        set_aux_loss_scale(layer, scale)
        return layer

    assert_same_results(*both(make, 7, dtype=torch.float64))


def test_autocast_casts_as_the_operators_do():
    results = []
    for single in (True, False):
        layer, x = make_layer(bias=True, dtype=torch.float32), make_input(5, dtype=torch.float32)
        with pytest.MonkeyPatch.context() if single else one_by_one(), torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        assert ("_Experts" in nodes_of(y)) == single
        y.float().square().sum().backward()
        results.append((y.detach(), gradients(layer, x)))
    assert_same_bits(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


def test_gradients_can_be_differentiated_again():
    """A gradient penalty, whose own gradients flow through all that the node keeps, has the same values."""
    results = []
    for single in (True, False):
        layer, x = make_layer(bias=True, capacity_factor=0.8, aux_loss_coef=0.1), make_input(6)
        with pytest.MonkeyPatch.context() if single else one_by_one():
            y = layer(x)
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        penalty = sum(grad.square().sum() for grad in first)
        results.append((first, torch.autograd.grad(penalty, leaves)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "activation": "gelu"}, {"score": "sigmoid", "capacity_factor": 0.7}], ids=str
)
def test_gradcheck_and_gradgradcheck(options):
    layer, x = make_layer(hidden_size=4, ffn_size=3, num_experts=3, **options), make_input(4, hidden_size=4)

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(dict(layer.named_parameters()), parameters, strict=True)), x)

    leaves = [x, *(parameter.detach().requires_grad_() for parameter in layer.parameters())]
    assert nodes_of(call(*leaves)) == ["_ChosenExperts"]
    assert torch.autograd.gradcheck(call, leaves)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_graph_that_is_kept_runs_twice_and_one_that_is_not_raises():
    layer, x = make_layer(bias_update_rate=0.01), make_input(5)
    y = layer(x)
    first = torch.autograd.grad(y.sum(), [x, layer.experts.w_in], retain_graph=True)
    second = torch.autograd.grad(y.sum(), [x, layer.experts.w_in])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(layer.router.counted["load"], 2 * layer.stats.load.long())
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), x)


def test_a_load_counts_where_the_gradient_of_the_router_is_asked_for():
    layer, x = make_layer(bias_update_rate=0.01), make_input(5)
    torch.autograd.grad(layer(x).sum(), layer.experts.w_out)
    assert not layer.router.counted["load"].any()
    torch.autograd.grad(layer(x).sum(), layer.router.weight)
    assert torch.equal(layer.router.counted["load"], layer.stats.load.long())


@pytest.mark.parametrize("name", ["experts.w_in", "experts.w_out", "router.weight"])
def test_a_parameter_that_changed_before_the_backward_pass_is_noticed(name):
    layer, x = make_layer(), make_input(5)
    y = layer(x)
    with torch.no_grad():
        layer.get_parameter(name).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_output_and_biases_may_change_as_before():
    layer, x = make_layer(bias=True), make_input(5)
    y = layer(x)
    with torch.no_grad():
        layer.experts.b_in.mul_(2)
    y.mul_(2).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_the_same_bits(reentrant):
    layer, x = make_layer(**OPTIONS["everything"]), make_input(9)
    expected = run(layer, x)
    counted = layer.router.counted["load"].clone()
    layer.router.counted.zero_()
    found = run(layer, x, lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    assert_same_bits(found[0], expected[0])
    assert_same(found[1], expected[1])
    assert torch.equal(layer.router.counted["load"], counted)


@pytest.mark.parametrize("part", ["router", "experts"])
@pytest.mark.parametrize("hooked_first", [True, False])
def test_a_hook_may_come_or_go_before_a_checkpoint_is_recomputed(hooked_first, part):
    """A checkpoint compares what the nodes of both runs save, and the hook has the operators run one by one."""
    layer, x = make_layer(), make_input(9)
    expected = run(layer, x)
    hook = layer.get_submodule(part).register_forward_hook(lambda *_: None) if hooked_first else None
    y = checkpoint(layer, x, use_reentrant=False)
    if hook is None:
        layer.get_submodule(part).register_forward_hook(lambda *_: None)
    else:
        hook.remove()
    found = run(layer, x, lambda _: y)
    assert_same(found[1], expected[1])


def test_saved_tensors_pass_through_hooks():
    layer, x = make_layer(bias=True), make_input(9)
    expected = run(layer, x)
    packed = []

    def pack(value):
        packed.append(value.numel())
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = layer(x)
    assert len(packed) >= 12
    found = run(layer, x, lambda _: y)
    assert_same_bits(found[0], expected[0])
    assert_same(found[1], expected[1])


def test_copies_of_a_layer_and_threads_do_not_meet():
    layer, x = make_layer(), make_input(4)
    expected = run(layer, x)
    found = run(copy.deepcopy(layer), x)
    assert_same_bits(found[0], expected[0])
    assert_same(found[1], expected[1])


def test_a_kept_graph_runs_backward_in_two_threads(monkeypatch):
    """The node stored which operators the current pass runs. A plain pass in one thread overwrote this for a pass with
    ``create_graph=True`` in another thread, which then recorded no graph.
    """
    layer, x = make_layer(), make_input(5)
    y = layer(x).sum()
    expected = torch.autograd.grad(torch.autograd.grad(y, x, create_graph=True)[0].square().sum(), x)
    inside, go = threading.Event(), threading.Event()
    start, found = recorded._Node.start, []

    def suspended(ctx):
        started = start(ctx)
        if torch.is_grad_enabled():
            inside.set()
            assert go.wait(LONG)
        return started

    monkeypatch.setattr(recorded._Node, "start", staticmethod(suspended))
    y = layer(x).sum()
    thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y, x, create_graph=True)))
    thread.start()
    assert inside.wait(LONG)
    torch.autograd.grad(y, x, retain_graph=True)
    go.set()
    thread.join(LONG)
    monkeypatch.undo()
    assert_same_bits(torch.autograd.grad(found[0].square().sum(), x)[0], expected[0])


def arguments(tokens, choices, dtype, kind, transposed, bias):
    """Return arguments of apply_experts; all except the choice require gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5).to(dtype).requires_grad_()

    inner = FFN * (2 if is_gated(kind) else 1)
    shapes = ((EXPERTS, inner, HIDDEN), (EXPERTS, HIDDEN, FFN))
    leaves = {
        name: random(*(shape[::2] + shape[1:2] if transposed else shape))
        for name, shape in zip(("w_in", "w_out"), shapes, strict=True)
    }
    leaves |= {"x": random(tokens, HIDDEN), "weights": random(tokens, choices)}
    if bias:
        leaves |= {"b_in": random(EXPERTS, inner), "b_out": random(EXPERTS, HIDDEN)}
    experts = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :choices]
    return leaves, {"experts": experts, "activation": kind}


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("kind", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_apply_experts_has_the_bits_of_its_operators(kind, dtype):
    for tokens in (0, 1, 23):
        for choices, transposed, bias, capacity, foreign in (
            (2, False, True, None, 0),
            (EXPERTS, True, False, 2, 0),
            (1, True, True, None, 2),
            (3, False, False, 0, 0),
        ):
            results = []
            for single in (True, False):
                leaves, others = arguments(tokens, choices, dtype, kind, transposed, bias)
                named = {
                    name: value.transpose(1, 2) if transposed and name[:2] == "w_" else value
                    for name, value in leaves.items()
                }
                others["experts"] = others["experts"] + foreign
                with pytest.MonkeyPatch.context() if single else one_by_one():
                    y = apply_experts(**named, **others, capacity=capacity, foreign_experts=foreign > 0)
                assert ("_Experts" in nodes_of(y)) == single
                y.backward(torch.linspace(-1, 2, y.numel()).to(dtype).reshape(y.shape))
                results.append([y.detach(), *(leaf.grad for leaf in leaves.values())])
            for found, expected in zip(*results, strict=True):
                assert_same_bits(found, expected)
                assert found.stride() == expected.stride()
