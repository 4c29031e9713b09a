"""A layer refuses wrong parts, options and tensors that were changed after its construction, with and without
gradients.

Each case is refused on every path through the layer, by a message that names the argument and what was expected.
"""

from itertools import product

import pytest
import torch
from moe_layers import make_input, make_layer, one_by_one
from torch import nn

from pymoe.nn import MoE, QuantizedExperts, QuantizedLinear, Router, quantize_experts

pytestmark = pytest.mark.only_on("cpu")


class Losses(nn.Module):
    """A stand-in for a layer's losses that changes the weights of the choice."""

    aux_loss_coef = z_loss_coef = 0.0
    score, backend = "softmax", "native"

    def __init__(self, change):
        super().__init__()
        self.change = change

    def injects(self):
        return False

    def forward(self, gate, logits):
        return self.change(gate.weights), None


class OwnLogits(Router):
    """A router that changes its logits."""

    def logits(self, x_TH):
        return self.change(super().logits(x_TH))


def put(path, value):
    """Return a change of a layer that sets an attribute of one of its parts."""

    def change(layer):
        *parts, name = path.split(".")
        setattr(layer.get_submodule(".".join(parts)), name, value() if callable(value) else value)

    return change


def weight(path, make):
    return put(path, lambda: nn.Parameter(make()))


def losses(change):
    return lambda layer: setattr(layer, "losses", Losses(change))


def logits(change):
    def replace(layer):
        router = OwnLogits(12, 8, 2, bias_update_rate=0.1)
        router.load_state_dict(layer.router.state_dict())
        router.change = change
        layer.router = router

    return replace


def groups(number, best):
    def change(layer):
        layer.router.num_groups, layer.router.topk_groups = number, best

    return change


def bias(make):
    return lambda layer: setattr(layer.router, "expert_bias", make())


def act(kind):
    return lambda layer: setattr(layer.experts, "activation", kind)


TOGETHER = "num_groups and topk_groups must be given together"

REFUSED = {
    "scale nan": (put("router.scale", float("nan")), ValueError, "scale must be finite, got nan"),
    "scale text": (put("router.scale", "2"), TypeError, "scale must be a float, got str"),
    "score text": (put("router.score", "tanh"), ValueError, "score must be one of 'softmax', 'sigmoid', got 'tanh'"),
    "score none": (put("router.score", None), TypeError, "score must be a string, got NoneType"),
    "top_k 0": (put("router.top_k", 0), ValueError, "must be in 1..E (E = 8), got 0"),
    "top_k -1": (put("router.top_k", -1), ValueError, "must be in 1..E (E = 8), got -1"),
    "top_k 9": (put("router.top_k", 9), ValueError, "must be in 1..E (E = 8), got 9"),
    "top_k float": (put("router.top_k", 2.0), TypeError, "k must be an int, got float"),
    "top_k bool": (put("router.top_k", True), TypeError, "k must be an int, got bool"),
    "renormalize text": (put("router.renormalize", "no"), TypeError, "renormalize must be a bool, got str"),
    "renormalize int": (put("router.renormalize", 0), TypeError, "renormalize must be a bool, got int"),
    "num_groups 0": (put("router.num_groups", 0), ValueError, TOGETHER),
    "num_groups alone": (put("router.num_groups", 4), ValueError, TOGETHER),
    "topk_groups alone": (
        put("router.topk_groups", 2),
        ValueError,
        TOGETHER,
    ),
    "no groups": (groups(0, 0), ValueError, "num_groups must be in 1..E (E = 8), got 0"),
    "negative groups": (groups(-2, 1), ValueError, "num_groups must be in 1..E (E = 8), got -2"),
    "uneven groups": (groups(3, 1), ValueError, "num_groups must divide E (E = 8), got 3"),
    "too many groups": (groups(4, 5), ValueError, "topk_groups must be in 1..num_groups, got 5"),
    "too few left": (groups(8, 1), ValueError, "topk_groups must leave at least k = 2 experts"),
    "router of another size": (put("router.num_experts", 7), ValueError, "router.weight must have shape (7, 12)"),
    "experts of another size": (put("experts.hidden_size", 11), ValueError, "experts.w_in must have shape (8, 20, 11)"),
    "bias of integers": (bias(lambda: torch.zeros(8, dtype=torch.int64)), TypeError, "bias must have dtype"),
    "bias of another size": (bias(lambda: torch.zeros(7)), ValueError, "router.expert_bias must have shape (8,)"),
    "activation text": (act("silu"), ValueError, "activation must be one of 'swiglu'"),
    "activation none": (act(None), TypeError, "activation must be a string or a ClampedSwiglu, got NoneType"),
    "activation function": (act(torch.relu), TypeError, "activation must be a string or a ClampedSwiglu"),
    "another activation": (act("gelu"), ValueError, "experts.w_in must have shape (8, 10, 12)"),
    "router in float64": (lambda layer: layer.router.double(), TypeError, "weights must not have dtype float64"),
    "router weight of another size": (
        weight("router.weight", lambda: torch.randn(7, 12)),
        ValueError,
        "router.weight must have shape (8, 12)",
    ),
    "w_in of another size": (
        weight("experts.w_in", lambda: torch.randn(7, 20, 12)),
        ValueError,
        "experts.w_in must have shape (8, 20, 12)",
    ),
    "w_in in float64": (
        weight("experts.w_in", lambda: torch.randn(8, 20, 12).double()),
        TypeError,
        "dtype of the parameters (torch.float64)",
    ),
    "w_in on meta": (weight("experts.w_in", lambda: torch.empty(8, 20, 12, device="meta")), ValueError, "device"),
    "b_in of another size": (
        weight("experts.b_in", lambda: torch.randn(20)),
        ValueError,
        "experts.b_in must have shape (8, 20)",
    ),
    "b_in in float64": (
        weight("experts.b_in", lambda: torch.randn(8, 20).double()),
        TypeError,
        "experts.b_in must have the dtype of the rows",
    ),
    "losses: too many weights": (losses(lambda w: torch.cat([w, w[:, :1]], 1)), ValueError, "weights must have"),
    "losses: too few weights": (losses(lambda w: w[:, :1]), ValueError, "weights must have"),
    "losses: too few tokens": (losses(lambda w: w[:-1]), ValueError, "weights must have"),
    "losses: flat weights": (losses(lambda w: w.flatten()), ValueError, "weights must have"),
    "losses: weights of a dimension more": (losses(lambda w: w[..., None]), ValueError, "weights must have"),
    "losses: weights in float64": (losses(lambda w: w.double()), TypeError, "weights must not have dtype float64"),
    "losses: integers": (losses(lambda w: w.long()), TypeError, "weights must have dtype"),
    "losses: complex": (losses(lambda w: w.to(torch.complex64)), TypeError, "weights must have dtype"),
    "losses: meta": (losses(lambda w: w.to("meta")), ValueError, "weights must be on the device of"),
    "logits: too many experts": (logits(lambda w: torch.cat([w, w[:, :1]], 1)), (ValueError, IndexError), "8"),
    "logits: too few tokens": (logits(lambda w: w[:-1]), ValueError, "experts must have size 5 (T of x)"),
    "logits: integers": (logits(lambda w: w.long()), TypeError, "logits must have dtype"),
    "logits: complex": (logits(lambda w: w.to(torch.complex64)), TypeError, "logits must have dtype"),
    "logits: three dimensions": (logits(lambda w: w[None]), ValueError, "logits must have shape (T, E)"),
    "logits: in float64": (logits(lambda w: w.double()), TypeError, "weights must not have dtype float64"),
}


def made(change, **options):
    layer = make_layer(dtype=torch.float32, bias_update_rate=0.1, **options)
    change(layer)
    return layer


@pytest.mark.parametrize("one_node", [True, False], ids=["direct", "one by one"])
@pytest.mark.parametrize("recorded", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_name(case, recorded, one_node):
    change, error, words = case
    layer, x = made(change, bias=True), make_input(5, dtype=torch.float32)
    way = pytest.MonkeyPatch.context() if one_node else one_by_one()
    with way, torch.set_grad_enabled(recorded), pytest.raises(error) as raised:
        layer(x)
    assert words in str(raised.value)


def other_weight(name, inputs, outputs, experts):
    def change(layer):
        torch.manual_seed(1)
        setattr(layer.experts, name, QuantizedLinear.from_weight(torch.randn(experts, outputs, inputs), 8))

    return change


def on_meta(name):
    def change(layer):
        *parts, last = f"experts.{name}".split(".")
        module = layer.get_submodule(".".join(parts))
        setattr(module, last, getattr(module, last).to("meta"))

    return change


QUANTIZED = {
    "w_out with too many outputs": (other_weight("w_out", 10, 13, 8), ValueError, "12"),
    "w_out with too few outputs": (other_weight("w_out", 10, 11, 8), ValueError, "12"),
    "w_out with other inputs": (other_weight("w_out", 11, 12, 8), ValueError, "must have size"),
    "w_out of more experts": (other_weight("w_out", 10, 12, 9), ValueError, "9"),
    "w_out of fewer experts": (other_weight("w_out", 10, 12, 7), ValueError, "8"),
    "w_in with other inputs": (other_weight("w_in", 13, 20, 8), ValueError, "must have size"),
    "w_in with other outputs": (other_weight("w_in", 12, 22, 8), ValueError, "must have size"),
    "w_out on meta": (on_meta("w_out.packed"), ValueError, "device"),
    "b_in on meta": (on_meta("b_in"), ValueError, "device"),
    "activation": (act("silu"), ValueError, "must be one of 'swiglu'"),
    "scale nan": (put("router.scale", float("nan")), ValueError, "scale must be finite, got nan"),
    "num_groups": (put("router.num_groups", 4), ValueError, "must be given together"),
    "router in float64": (lambda layer: layer.router.double(), TypeError, "float64"),
    "losses: too few weights": (losses(lambda w: w[:, :1]), ValueError, "weights must have"),
}


@pytest.mark.parametrize("one_node", [True, False], ids=["direct", "one by one"])
@pytest.mark.parametrize("case", QUANTIZED.values(), ids=QUANTIZED)
def test_it_is_refused_with_quantised_experts(case, one_node):
    """The native call of the whole layer accepted experts whose last product does not have H outputs, and packed
    weights on the meta device, which no kernel can read.
    """
    change, error, words = case
    biases = [True] if case is QUANTIZED["b_in on meta"] else [False, True]
    for has_bias, shape in product(biases, ((5,), (13,), (2, 3))):
        layer, x = make_layer(dtype=torch.float32, bias=has_bias).eval(), make_input(*shape, dtype=torch.float32)
        quantize_experts(layer, 8)
        assert type(layer.experts) is QuantizedExperts
        change(layer)
        way = pytest.MonkeyPatch.context() if one_node else one_by_one()
        with way, torch.no_grad(), pytest.raises(error) as raised:
            layer(x)
        assert words in str(raised.value)


def test_the_layer_is_used_where_nothing_was_changed():
    assert type(made(lambda layer: None)) is MoE
    assert made(lambda layer: None)(make_input(5, dtype=torch.float32)).shape == (5, 12)
