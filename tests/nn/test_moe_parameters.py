"""Parameters that do not fit their layer, assigned or swapped in, are named in the error, with and without
gradients.
"""

import pytest
import torch
from moe_layers import BACKENDS, make_input, make_layer
from torch import nn

pytestmark = pytest.mark.only_on("cpu")

SHAPES = {
    "router.weight": (8, 12),
    "router.bias": (8,),
    "router.expert_bias": (8,),
    "experts.w_in": (8, 20, 12),
    "experts.w_out": (8, 12, 10),
    "experts.b_in": (8, 20),
    "experts.b_out": (8, 12),
    "shared.w_in": (20, 12),
    "shared.w_out": (12, 10),
    "shared.b_in": (20,),
    "shared.b_out": (12,),
    "shared.w_gate": (1, 12),
}
CUTS = [(name, dim) for name, shape in SHAPES.items() for dim in range(len(shape))]


def change(layer, name, function):
    """Replace the layer's tensor of this name."""
    part, own = name.split(".")
    module = getattr(layer, part)
    changed = function(getattr(module, own).detach())
    if own == "expert_bias":
        module._buffers[own] = changed  # this bypasses the check that assigning makes
    else:
        setattr(module, own, nn.Parameter(changed))


def layer_and_input(backend="native"):
    options = {"num_shared_experts": 1, "shared_gate": True, "router_bias": True, "backend": backend}
    return make_layer(bias=True, bias_update_rate=0.01, **options), make_input(5)


def refused(layer, x, error):
    """Return the layer's error, which is the same with gradients and without."""
    said = set()
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded), pytest.raises(error) as raised:
            layer(x)
        said.add(str(raised.value))
    assert len(said) == 1, said
    return said.pop()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "dim"), CUTS, ids=[f"{name}, {dim}" for name, dim in CUTS])
def test_another_size_is_named(name, dim, backend):
    layer, x = layer_and_input(backend)
    change(layer, name, lambda value: value.narrow(dim, 0, value.shape[dim] - 1).contiguous())
    found = tuple(size - (at == dim) for at, size in enumerate(SHAPES[name]))
    assert refused(layer, x, ValueError) == f"MoE: {name} must have shape {SHAPES[name]}, got {found}"


@pytest.mark.parametrize("name", SHAPES)
def test_another_number_of_dimensions_is_named(name):
    layer, x = layer_and_input()
    change(layer, name, lambda value: value[0].clone())
    said = refused(layer, x, ValueError)
    assert said == f"MoE: {name} must have shape {SHAPES[name]}, got {SHAPES[name][1:]}"


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "experts.w_in"])
def test_another_device_is_named(name):
    """Without gradients a native call received a tensor on the meta device, and the output had no values."""
    layer, x = layer_and_input()
    change(layer, name, lambda value: value.to("meta"))
    assert refused(layer, x, ValueError) == f"MoE: {name} must be on the device of x (cpu), got meta"


@pytest.mark.parametrize("name", [name for name in SHAPES if name[0] in "es" and name != "experts.w_in"])
def test_another_dtype_of_experts_is_named(name):
    layer, x = layer_and_input()
    change(layer, name, lambda value: value.float())
    said = refused(layer, x, TypeError)
    assert said == f"MoE: {name} must have the dtype of the rows (torch.float64), got torch.float32"


@pytest.mark.parametrize("tokens", [0, 5])
def test_experts_of_ones_own_return_rows_of_the_hidden_size(tokens):
    """One feature would have been broadcast over the output of shared experts, and no token fits every size."""

    class Own(nn.Module):
        w_in = torch.ones((), dtype=torch.float64)

        def forward(self, rows, offsets):
            return rows[:, :1]

    layer, _ = layer_and_input()
    layer.experts = Own()
    said = refused(layer, make_input(tokens), ValueError)
    assert said == "MoE: experts must return rows (S, H) with H = 12, got 1 features"


def test_autocast_takes_parameters_of_several_dtypes_and_no_float64():
    layer = make_layer(num_shared_experts=1, dtype=torch.float32)
    x = make_input(5, dtype=torch.float32)
    change(layer, "experts.w_out", lambda value: value.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        change(layer, "shared.w_in", lambda value: value.double())
        said = refused(layer, x, TypeError)
    assert said == "MoE: shared.w_in must have the dtype of the rows (torch.bfloat16), got torch.float64"
