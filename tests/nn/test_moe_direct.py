"""Tests of the direct forward: native calls without the layer's parts, unless a part must be called; same bits.

test_one_node.py has further tests of forwards with gradients.
"""

import copy
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from called import Operators, functions_of
from moe_layers import OPTIONS, make_input, make_layer
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.utils import parametrize

from pymoe.nn import MoE, Router

pytestmark = pytest.mark.only_on("cpu")


@pytest.fixture
def ways(monkeypatch):
    """Return a list that records for every forward whether it was direct; ``ways.blocked`` makes all forwards
    indirect.
    """
    module = sys.modules["pymoe.nn.moe"]
    forward_directly = module.forward_directly
    taken = Ways()

    def noting(layer, x):
        y = None if taken.blocked else forward_directly(layer, x)
        taken.append(y is not None)
        return y

    monkeypatch.setattr(module, "forward_directly", noting)
    return taken


class Ways(list):
    blocked = False

    @contextmanager
    def block(self):
        self.blocked = True
        yield
        self.blocked = False


def assert_same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_has_the_bits_and_the_statistics_of_the_parts(options, dtype, ways):
    layer = make_layer(**options, dtype=dtype)
    for shape in ((0,), (1,), (21,), (3, 5), ()):
        x = make_input(*shape, dtype=dtype)
        with torch.no_grad():
            with ways.block():
                expected, stats = layer(x), layer.stats
            layer.last.zero_()
            y = layer(x)
        assert ways[-2:] == [False, True]
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)
        assert_same(layer.stats, stats)


def test_tokens_need_not_be_contiguous(ways):
    layer, x = make_layer(), make_input(5)
    with torch.no_grad():
        for strided in (x.t().contiguous().t(), x.repeat_interleave(2, dim=1)[:, ::2], x.expand(3, 5, 12)):
            with ways.block():
                expected = layer(strided)
            assert torch.equal(layer(strided), expected)
    assert ways == [False, True] * 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_counts_follow_a_layer_that_has_come_from_a_checkpoint(mode, ways):
    """``assign=True`` moves parameters off the meta device, and nothing tells the counts, which training changes."""
    trained = make_layer(bias_update_rate=0.01)
    before = trained.router.expert_bias.clone()
    with torch.device("meta"):
        layer = MoE(12, 10, 8, 2, bias_update_rate=0.01, dtype=torch.float64)
    layer.load_state_dict(trained.state_dict(), assign=True)
    with mode():
        layer(make_input(3).detach())
    assert ways == [True]
    assert layer.router.counted["load"].device == torch.device("cpu")
    layer(make_input(4)).sum().backward()
    assert torch.equal(layer.router.counted["load"], layer.stats.load.long())
    layer.update_bias()
    assert not torch.equal(layer.router.expert_bias, before)


def frozen(layer):
    layer.requires_grad_(False)
    return nullcontext()


@pytest.mark.parametrize("mode", [lambda _: torch.no_grad(), lambda _: torch.inference_mode(), frozen])
@pytest.mark.parametrize("training", [False, True])
def test_where_nothing_is_differentiated_it_is_taken(mode, training, ways):
    layer = make_layer(bias_update_rate=0.01, aux_loss_coef=0.1).train(training)
    x = make_input(5)
    with ways.block():
        expected = layer(x).detach()
    counted = layer.router.counted["load"].clone()
    with mode(layer):
        y = layer(x.detach())
    assert ways == [False, True]
    assert torch.equal(y, expected)
    assert torch.equal(layer.router.counted["load"], counted), "nothing was trained on"


@pytest.mark.parametrize(
    "name",
    ["x", "router.weight", "router.bias", "experts.w_in", "experts.w_out", "experts.b_in", "experts.b_out"],
)
def test_one_operand_that_requires_a_gradient_gets_it(name, ways):
    layer = make_layer(bias=True, router_bias=True, renormalize=False).requires_grad_(False)
    x = make_input(5).requires_grad_(name == "x")
    operand = x if name == "x" else layer.get_parameter(name).requires_grad_()
    layer(x).sum().backward()
    found, operand.grad = operand.grad, None
    with ways.block():
        layer(x).sum().backward()
    assert ways == [True, False]
    assert found.abs().sum() > 0
    assert torch.equal(found, operand.grad)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Marked(torch.Tensor):
    """A tensor subclass that adds nothing."""


def hook_of(part):
    def change(layer):
        getattr(layer, part).register_forward_hook(lambda module, args, output: None)

    change.__name__ = f"hook of {part}"
    return change


def pre_hook_of(part):
    def change(layer):
        getattr(layer, part).register_forward_pre_hook(lambda module, args: None)

    change.__name__ = f"pre-hook of {part}"
    return change


def forward_of_the_router(layer):
    layer.router.forward = layer.router.forward


def another_class_of_router(layer):
    layer.router.__class__ = type("Own", (Router,), {})


def another_class_of_layer(layer):
    layer.__class__ = type("Own", (MoE,), {})


def compiled_router(layer):
    layer.router.compile(backend="eager")


def parametrized_weight_of_the_router(layer):
    parametrize.register_parametrization(layer.router, "weight", Doubled())


def parametrized_experts(layer):
    parametrize.register_parametrization(layer.experts, "w_in", Doubled())


def weight_that_is_no_parameter(layer):
    weight = layer.experts.w_out.detach()
    del layer.experts.w_out
    layer.experts.w_out = 3 * weight


def bias_that_is_no_parameter(layer):
    bias = layer.experts.b_out.detach()
    del layer.experts.b_out
    layer.experts.b_out = 3 * bias


def expert_bias_that_is_no_buffer(layer):
    bias = layer.router.expert_bias
    del layer.router.expert_bias
    layer.router.expert_bias = -bias


def expert_bias_that_is_not_contiguous(layer):
    layer.router._buffers["expert_bias"] = layer.router.expert_bias.repeat_interleave(2)[::2]


def router_of_another_dtype(layer):
    layer.router.float()


def subclass_of_tensor(layer):
    layer.experts.w_in = nn.Parameter(layer.experts.w_in.detach().as_subclass(Marked))


def reference(layer):
    layer.backend = "reference"


def reference_of_the_router(layer):
    layer.router.backend = "reference"


def reference_of_the_experts(layer):
    layer.experts.backend = "reference"


CHANGES = (
    *(make(part) for make in (hook_of, pre_hook_of) for part in ("router", "losses", "experts")),
    *(forward_of_the_router, another_class_of_router, another_class_of_layer, compiled_router),
    *(parametrized_weight_of_the_router, parametrized_experts),
    *(weight_that_is_no_parameter, bias_that_is_no_parameter, expert_bias_that_is_no_buffer),
    *(expert_bias_that_is_not_contiguous, router_of_another_dtype, subclass_of_tensor),
    *(reference, reference_of_the_router, reference_of_the_experts),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_stands_between_the_parts_is_called(change, ways):
    layer = make_layer(bias=True, bias_update_rate=0.01)
    x = make_input(7)
    change(layer)
    with torch.no_grad():
        y = layer(x)
    assert not any(ways)
    with ways.block():
        assert torch.equal(y, layer(x).detach())


@pytest.mark.parametrize("part", ["router", "losses", "experts", "shared"])
def test_a_hook_fires_in_every_call(part):
    layer = make_layer(num_shared_experts=1)
    fired = []
    getattr(layer, part).register_forward_hook(lambda *_: fired.append(1))
    with torch.no_grad():
        layer(make_input(3))
        layer(make_input(3))
    assert fired == [1, 1]


def test_hooks_of_the_layer_itself_fire_around_it(ways):
    layer = make_layer()
    x = make_input(3)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    layer.register_forward_hook(lambda module, args, output: -output)
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(y, -layer.forward(2 * x))
    assert ways == [True, True]


def test_transforms_and_tangents_take_the_parts(ways):
    layer = make_layer().requires_grad_(False)
    x = make_input(4, 3).detach()
    with ways.block():
        expected = torch.stack([layer(one) for one in x])
    ways.clear()
    y, pulled = torch.func.vjp(layer, x[0])
    assert torch.equal(y, expected[0])
    assert pulled(torch.ones_like(y))[0].abs().sum() > 0
    torch.testing.assert_close(
        torch.func.vmap(layer)(x), expected
    )  # a product over other rows: torch's bits may differ
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
        layer(forward_ad.make_dual(x[0], x[1]))
    assert not any(ways)


def test_autocast_takes_the_parts(ways):
    layer = make_layer(dtype=torch.float32)
    x = make_input(5, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        with ways.block():
            assert torch.equal(y, layer(x))
    assert y.dtype == torch.bfloat16
    assert ways == [False, False]


def test_compiled_and_fake_calls_take_the_parts(ways):
    torch._dynamo.reset()  # other tests of this process have compiled the same code
    layer = make_layer(dtype=torch.float32)
    x = make_input(5, dtype=torch.float32)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)
        with FakeTensorMode():
            fake = MoE(12, 10, 8, 2)
            assert fake(make_input(5, dtype=torch.float32)).shape == x.shape
    assert ways[0] is True


def test_weights_that_were_swapped_loaded_or_copied_are_those_that_count(ways):
    layer, other = make_layer(seed=0, bias=True), make_layer(seed=5, bias=True)
    x = make_input(9)
    with torch.no_grad(), ways.block():
        expected = other(x)
    ways.clear()
    with torch.no_grad():
        layer(x)
        assert torch.equal(functional_call(layer, dict(other.named_parameters()), x), expected)
        swapped = copy.deepcopy(layer)
        swapped.router, swapped.experts = other.router, other.experts
        assert torch.equal(swapped(x), expected)
        for name, parameter in other.experts.named_parameters():
            setattr(layer.experts, name, nn.Parameter(parameter.detach().clone()))
        layer.router.weight.copy_(other.router.weight)
        assert torch.equal(layer(x), expected)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        for assign in (False, True):
            fresh = make_layer(seed=3, bias=True)
            fresh.load_state_dict(other.state_dict(), assign=assign)
            assert torch.equal(fresh(x), expected)
    assert ways == [True] * 7


def test_bad_inputs_are_refused_in_the_same_words():
    layer = make_layer()
    for x, error, words in (
        ([1.0], TypeError, "MoE: x must be a tensor, got list"),
        (torch.zeros(3, 12), TypeError, "MoE: x must have the dtype of the parameters (torch.float64)"),
        (torch.zeros(3, 12, dtype=torch.int64), TypeError, "MoE: x must have dtype float32, float64"),
        (torch.zeros(3, 11, dtype=torch.float64), ValueError, "MoE: x must have shape (..., H) with H = 12"),
        (torch.zeros((), dtype=torch.float64), ValueError, "MoE: x must have shape (..., H) with H = 12"),
        (torch.zeros(3, 12, dtype=torch.float64, device="meta"), ValueError, "MoE: x must be on the device of"),
    ):
        with torch.no_grad(), pytest.raises(error) as raised:
            layer(x)
        assert str(raised.value).startswith(words)


def test_a_way_to_logits_of_the_routers_own_is_gone(ways):
    layer, x = make_layer(), make_input(4)
    with torch.no_grad():
        logits, expected = layer.router.logits, layer(x)
        layer.router.logits = lambda x_TH: logits(x_TH).t().contiguous().t()  # not contiguous
        assert torch.equal(layer(x), expected)
    assert ways == [True, False]


def test_it_makes_the_product_of_the_router_and_one_native_call():
    layer, x = make_layer(), make_input(1)
    with torch.no_grad(), Operators() as called:
        layer(x)
    product = ["aten.t.default", "aten.mm.default"]
    assert called.names == [*product, "pymoe.apply_chosen_experts.default"]


def test_it_runs_few_functions_of_python():
    """A call ran 108 Python functions in 84 µs; with direct native calls it needs a third of this time."""
    layer, x = make_layer(), make_input(1)
    with torch.no_grad():
        names = [name for _, name in functions_of(lambda: layer(x))]
    assert len(names) <= 48, f"{len(names)} functions: {names}"
    assert sum(name == "__getattr__" for name in names) <= 5, "look-ups past a layer's dictionaries"
    assert "__setattr__" not in names
