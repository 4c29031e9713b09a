"""The layout of tokens changes no bit, and the layout of weights makes no difference between the ways through a
layer.
"""

import pytest
import torch
from moe_layers import make_layer, run
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pymoe.nn import MoE, apply_experts, quantize_experts
from pymoe.nn.options import as_rows

pytestmark = pytest.mark.only_on("cpu")

H, SIZES = 64, (1, 2, 5, 33)

TOKENS = {
    "one after the other": lambda x: x.clone(),
    "column by column": lambda x: x.t().contiguous().t(),
    "every second number": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "cut out of wider ones": lambda x: F.pad(x, (3, 5))[:, 3:-5],
    "of three dimensions": lambda x: x.t().contiguous().t()[:, None],
    "sequence before batch": lambda x: torch.stack([x, x + 1]).transpose(0, 1)[:, 0],
}

WEIGHTS = {
    "as made": lambda w: w,
    "the other way round": lambda w: w.transpose(-1, -2).contiguous().transpose(-1, -2),
    "cut out of wider ones": lambda w: F.pad(w, (2, 3))[..., 2:-3],
    "every second number": lambda w: w.repeat_interleave(2, dim=-1)[..., ::2],
}


class Watched(nn.Module):
    """A wrapper that calls a layer with hooks that make it call its router and its experts."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        hooks = [part.register_forward_hook(lambda *_: None) for part in (self.layer.router, self.layer.experts)]
        y = self.layer(x)
        for hook in hooks:
            hook.remove()
        return y


def without_gradients(layer):
    return torch.no_grad()(layer)


def through_all_parts(layer):
    return torch.no_grad()(Watched(layer))


def with_checkpoints(layer):
    return lambda x: checkpoint(layer, x, use_reentrant=True)


def by_functions(layer):
    """Return a function that computes the layer by its router and by ``apply_experts``."""
    own = layer.experts

    def call(x):
        rows = as_rows(x, H)
        gate, _ = layer.router(rows)
        y = apply_experts(x.reshape(-1, H), gate.experts, gate.weights, own.w_in, own.w_out, activation=own.activation)
        return (y if layer.shared is None else y + layer.shared(rows)).reshape(x.shape)

    return call


WAYS = {
    "with gradients": lambda layer: layer,
    "without gradients": without_gradients,
    "part by part": Watched,
    "part by part, without gradients": through_all_parts,
    "with checkpoints": with_checkpoints,
    "functions": by_functions,
    "functions, without gradients": lambda layer: torch.no_grad()(by_functions(layer)),
}


def tokens(number, dtype):
    return torch.randn(number, H, generator=torch.Generator().manual_seed(number)).to(dtype)


def layer_of(dtype, **options):
    return make_layer(hidden_size=H, ffn_size=48, dtype=dtype, num_shared_experts=1, **options)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


@pytest.mark.thinned(usual=49)
@DTYPES
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("layout", TOKENS.values(), ids=TOKENS)
def test_the_layout_of_tokens_changes_no_bit_on_any_way(layout, way, dtype):
    layer = layer_of(dtype)
    for number in SIZES:
        x = tokens(number, dtype)
        expected, laid = layer(x), layout(x)
        assert torch.equal(laid.reshape(x.shape), x)
        assert torch.equal(way(layer)(laid).reshape(x.shape), expected), number


@pytest.mark.thinned(usual=35)
@DTYPES
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("part", ["router.weight", "experts.w_in", "experts.w_out", "shared.w_in", "shared.w_out"])
@pytest.mark.parametrize("layout", WEIGHTS.values(), ids=WEIGHTS)
def test_the_layout_of_weights_changes_no_bit_between_the_ways(layout, part, way, dtype):
    layer = layer_of(dtype)
    weight = layer.get_parameter(part)
    weight.data = layout(weight.data)
    for number in SIZES:
        x = tokens(number, dtype)
        assert torch.equal(way(layer)(x), layer(x)), number


@pytest.mark.parametrize("layout", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_layout_of_tokens_changes_no_bit_of_quantised_experts(bits, layout):
    layer = layer_of(torch.float32).eval()
    quantize_experts(layer, bits)
    for recorded in (False, True):
        watched = Watched(layer)
        with torch.set_grad_enabled(recorded):
            for number in SIZES:
                x = tokens(number, torch.float32)
                for one in (layer, watched):
                    assert torch.equal(one(layout(x)).reshape(x.shape), layer(x)), number


@pytest.mark.parametrize("layout", TOKENS.values(), ids=TOKENS)
def test_the_layout_of_tokens_changes_no_bit_of_gradients(layout):
    layer = layer_of(torch.float32)
    for number in SIZES:
        x = tokens(number, torch.float32)
        _, expected = run(layer, plain := x.clone().requires_grad_())
        _, found = run(layer, x := layout(x).detach().requires_grad_())
        assert plain.shape[-1] == x.shape[-1] == H
        for name, value in expected.items():
            assert torch.equal(found[name].reshape(value.shape), value), name


def test_rows_are_one_after_the_other_whatever_came_in():
    for number in (0, 1, 5):
        for layout in TOKENS.values():
            x = torch.randn(number, H)
            rows = as_rows(layout(x), H)
            assert rows.stride() == (H, 1)
            assert torch.equal(rows, x)
    x = torch.randn(5, H)
    assert as_rows(x, H) is x, "nothing is copied that need not be"
    assert MoE(H, 8, 2, 1, renormalize=False)(x[:0]).shape == (0, H)
