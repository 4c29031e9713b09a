"""Layers and calls that the tests of this folder share."""

import copy
import sys
from contextlib import contextmanager

import pytest
import torch
from specs.quantized_weight import STORED, in_format

from pymoe.nn import MoE, QuantizedExperts, QuantizedLinear, quantize_experts

BACKENDS = ("native", "reference")

OPTIONS = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu", "bias": True},
    "bias": {"bias": True},
    "sigmoid": {"score": "sigmoid"},
    "not renormalized": {"renormalize": False},
    "sigmoid not renormalized": {"score": "sigmoid", "renormalize": False, "scale": 2.5},
    "one choice": {"top_k": 1, "renormalize": False},
    "one choice renormalized": {"top_k": 1, "aux_loss_coef": 0.1},
    "every expert": {"top_k": 8},
    "one expert": {"num_experts": 1, "top_k": 1, "aux_loss_coef": 0.1, "z_loss_coef": 0.1},
    "expert bias": {"bias_update_rate": 0.01},
    "expert bias sigmoid": {"bias_update_rate": 0.01, "score": "sigmoid"},
    "groups": {"num_groups": 4, "topk_groups": 2},
    "groups sigmoid bias": {
        "num_groups": 2,
        "topk_groups": 1,
        "score": "sigmoid",
        "bias_update_rate": 0.01,
        "scale": 2.5,
    },
    "capacity below the mean": {"capacity_factor": 0.5},
    "capacity above the mean": {"capacity_factor": 1.25, "bias": True},
    "capacity of one": {"capacity_factor": 1e-6},
    "shared": {"num_shared_experts": 1},
    "two shared gelu": {"num_shared_experts": 2, "activation": "gelu", "bias": True},
    "gated shared": {"num_shared_experts": 2, "shared_gate": True},
    "router bias": {"router_bias": True, "bias_update_rate": 0.01},
    "balancing loss": {"aux_loss_coef": 0.5},
    "balancing loss sigmoid": {"aux_loss_coef": 0.5, "score": "sigmoid"},
    "z loss": {"z_loss_coef": 0.3},
    "both losses": {"aux_loss_coef": 0.5, "z_loss_coef": 0.3, "capacity_factor": 1.0},
    "everything": {
        "score": "sigmoid",
        "bias_update_rate": 0.01,
        "num_groups": 4,
        "topk_groups": 2,
        "scale": 1.5,
        "capacity_factor": 1.0,
        "num_shared_experts": 1,
        "shared_gate": True,
        "router_bias": True,
        "aux_loss_coef": 0.5,
        "z_loss_coef": 0.3,
        "bias": True,
    },
}
SCORED_BEFORE = {
    "scored before": {"score_before_experts": True, "score": "sigmoid", "renormalize": False, "top_k": 1},
    "several scored before": {
        "score_before_experts": True,
        "bias": True,
        "capacity_factor": 0.75,
        "num_shared_experts": 1,
        "aux_loss_coef": 0.5,
        "top_k": 3,
    },
}
"""Options of layers that multiply the inputs of experts, which no single native call does."""


def quantize_layer(layer, bits, format="int"):
    """Call quantize_experts, or give the layer weights in a format to which that does not round."""
    if (bits, format) not in STORED.values():
        quantize_experts(layer, bits, format)
        return
    experts = layer.experts
    weights = [in_format(weight.detach(), bits, format) for weight in (experts.w_in, experts.w_out)]
    layer.experts = QuantizedExperts.from_experts(experts, 8)
    layer.experts.bits, layer.experts.format = bits, format
    for name, weight in zip(("w_in", "w_out"), weights, strict=True):
        setattr(layer.experts, name, QuantizedLinear.from_quantized(weight, experts.backend).train(experts.training))


def make_layer(*, seed=0, hidden_size=12, ffn_size=10, num_experts=8, top_k=2, **options):
    """Return a small layer whose expert bias, if it has one, is large enough to change choices."""
    torch.manual_seed(seed)
    options.setdefault("dtype", torch.float64)
    layer = MoE(hidden_size, ffn_size, num_experts, top_k, **options)
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.uniform_(-0.2, 0.2)
    return layer if "device" in options else layer.to(torch.empty(0).device)  # drawn on the CPU, the same anywhere


def make_input(*shape, hidden_size=12, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, hidden_size, generator=generator, dtype=dtype).requires_grad_()


def with_backend(layer, backend):
    """Return a copy of ``layer`` with other operators."""
    layer = copy.deepcopy(layer)
    for module in layer.modules():
        if hasattr(module, "backend"):
            module.backend = backend
    return layer


def gradients(layer, x):
    """Return the gradients of input and parameters by name, and leave no gradients behind."""
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    found["x"] = x.grad
    layer.zero_grad()
    x.grad = None
    return found


@contextmanager
def one_by_one():
    """Make layers and apply_experts run one operator after the other inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["pymoe.nn.moe"], "forward_directly", lambda *_: None)
        for module in ("pymoe.nn.moe", "pymoe.nn.apply_experts"):
            patch.setattr(sys.modules[module], "is_one_call", lambda *_: False)
        yield


def run(layer, x, call=None, factor=1.0):
    """Return output and gradients of ``layer(x)``, or of ``call(x)``, for one fixed objective of the output."""
    y = layer(x) if call is None else call(x)
    direction = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
    (factor * (y * direction).sum()).backward()
    return y.detach(), gradients(layer, x)


def assert_same(found, expected, rtol=0.0, atol=0.0):
    """Check that two dictionaries of gradients agree, bit for bit unless a tolerance is given."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
