"""Tests of ``experts_implementation="pymoe"`` that apply to every class: layouts, dtypes, sentinels, errors."""

import copy
import subprocess
import sys

import pytest
import torch
from experts_classes import EXPERTS, HIDDEN, ExpertsClass, hidden_size

import pymoe
import pymoe.integrations.transformers
from pymoe.integrations.transformers import interface
from pymoe.integrations.transformers.activations import fused_activation

MIXTRAL = ExpertsClass("mixtral", "MixtralExperts")
GPT_OSS = ExpertsClass("gpt_oss", "GptOssExperts")
TOKENS, CHOICES = 9, 3


def build(one, dtype=torch.float32, implementation="pymoe"):
    torch.manual_seed(0)
    experts = one.build().to(dtype)
    experts.config._experts_implementation = implementation
    return experts


def inputs(experts, tokens=TOKENS):
    x = torch.randn(tokens, hidden_size(experts), dtype=experts.down_proj.dtype)
    return x, torch.rand(tokens, EXPERTS).topk(CHOICES).indices, torch.rand(tokens, CHOICES)


def eager(experts, *arguments):
    experts = copy.deepcopy(experts)
    experts.config._experts_implementation = "eager"
    return experts(*arguments)


@pytest.mark.parametrize("one", [ExpertsClass("aria", "AriaExperts"), GPT_OSS, MIXTRAL], ids=lambda one: one.name)
def test_weights_are_read_where_they_lie(one, monkeypatch):
    experts = build(one)
    read = []
    expected = [experts.gate_up_proj.data_ptr(), experts.down_proj.data_ptr()]
    fused = sys.modules["pymoe.nn.apply_experts"]
    call = fused.apply_experts_fused
    monkeypatch.setattr(
        fused, "apply_experts_fused", lambda *all: read.extend(one.data_ptr() for one in all[3:5]) or call(*all)
    )
    for recorded in (True, False):
        read.clear()
        with torch.set_grad_enabled(recorded):
            experts(*inputs(experts))
        assert read == expected


@pytest.mark.parametrize("one", [MIXTRAL, GPT_OSS], ids=lambda one: one.name)
def test_indices_of_other_ranks_add_nothing_and_get_no_gradient(one):
    experts = build(one)
    experts._is_expert_parallel = True
    x, index, weights = inputs(experts)
    far = torch.rand(TOKENS, CHOICES) < 0.4
    here = torch.where(far, EXPERTS + torch.arange(CHOICES), index)  # all numbers from E on
    x, weights = x.requires_grad_(), weights.requires_grad_()
    experts(x, here, weights).square().sum().backward()
    found = x.grad.clone(), weights.grad.clone(), *(p.grad.clone() for p in experts.parameters())

    experts._is_expert_parallel = False
    experts.zero_grad()
    x.grad = weights.grad = None
    y = experts(x, index, weights.masked_fill(far, 0))
    torch.testing.assert_close(y, pymoe_forward(experts, x, here, weights), rtol=1e-6, atol=1e-6)
    y.square().sum().backward()
    expected = x.grad, weights.grad, *(p.grad for p in experts.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert found[1][far].eq(0).all()


def pymoe_forward(experts, x, index, weights):
    experts = copy.deepcopy(experts)
    experts._is_expert_parallel = True
    return experts(x, index, weights)


def test_no_token_of_this_rank():
    experts = build(MIXTRAL)
    experts._is_expert_parallel = True
    x, index, weights = inputs(experts)
    assert experts(x, index + EXPERTS, weights).eq(0).all()


@pytest.mark.parametrize("one", [MIXTRAL, GPT_OSS], ids=lambda one: one.name)
def test_autocast(one):
    experts = build(one)
    arguments = inputs(experts)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = experts(*arguments), eager(experts, *arguments)
    assert y.dtype == expected.dtype == torch.float32
    exact = eager(experts, *arguments)
    assert (y - exact).norm() <= 1.25 * (expected - exact).norm()
    assert (y - exact).norm() > 0


@pytest.mark.parametrize("one", [MIXTRAL, GPT_OSS], ids=lambda one: one.name)
def test_rows_in_float32_meet_weights_in_bfloat16(one):
    experts = build(one, torch.bfloat16)
    x, index, weights = inputs(experts)
    y = experts(x.float(), index, weights)
    assert y.dtype == torch.float32
    assert torch.equal(y, experts(x, index, weights).float())


def test_no_tokens():
    experts = build(MIXTRAL)
    x, index, weights = inputs(experts, tokens=0)
    assert experts(x, index, weights).shape == (0, HIDDEN)


def test_an_activation_of_ones_own_is_called():
    """A class that replaces the code between the products is computed by its own code, not by the fused swiglu."""
    experts = build(MIXTRAL)
    assert fused_activation(experts) == "swiglu"
    arguments = inputs(experts)
    experts.act_fn = torch.nn.Tanh()
    assert fused_activation(experts) is None
    torch.testing.assert_close(experts(*arguments), eager(experts, *arguments))

    class Halved(type(experts)):
        def _apply_gate(self, gate_up):
            return super()._apply_gate(gate_up) / 2

    experts = build(MIXTRAL)
    full = experts(*arguments)
    experts.__class__ = Halved
    torch.testing.assert_close(experts(*arguments), full / 2)

    experts = build(GPT_OSS)
    arguments = inputs(experts)
    full = experts(*arguments)
    gate = experts._apply_gate
    experts._apply_gate = lambda rows: gate(rows) * 0.0
    assert fused_activation(experts) is None
    torch.testing.assert_close(experts(*arguments), eager(experts, *arguments))
    assert not torch.allclose(experts(*arguments), full)


def test_hooks_of_the_activation_are_called():
    for one in (MIXTRAL, ExpertsClass("nemotron_h", "NemotronHExperts")):
        experts = build(one)
        arguments = inputs(experts)
        full = experts(*arguments)
        hook = experts.act_fn.register_forward_hook(lambda module, rows, out: out * 0.0)
        assert fused_activation(experts) is None
        assert experts(*arguments).eq(0).all()
        hook.remove()
        assert torch.equal(experts(*arguments), full)


@pytest.mark.parametrize(
    ("act_fn", "kind"),
    [("relu", "relu"), ("gelu", "gelu"), ("relu2", "relu_squared"), ("silu", None), ("gelu_new", "gelu_tanh")],
)
def test_experts_without_a_gate(act_fn, kind):
    from transformers.activations import ACT2FN

    experts = build(ExpertsClass("nemotron_h", "NemotronHExperts"))
    experts.act_fn = ACT2FN[act_fn]
    assert fused_activation(experts) == kind
    arguments = inputs(experts)
    torch.testing.assert_close(experts(*arguments), eager(experts, *arguments))


def test_weights_that_are_no_floats_are_refused():
    experts = build(MIXTRAL)
    arguments = inputs(experts)
    quantised = torch.zeros_like(experts.gate_up_proj, dtype=torch.uint8)
    experts.gate_up_proj = torch.nn.Parameter(quantised, requires_grad=False)
    with pytest.raises(TypeError, match=r"'pymoe' \(MixtralExperts\): gate_up_proj must have dtype float32.*uint8"):
        experts(*arguments)


def test_indices_outside_the_experts_are_refused():
    experts = build(MIXTRAL)
    x, index, weights = inputs(experts)
    with pytest.raises(IndexError, match="experts must lie in"):
        experts(x, index + 1 - index.min() + EXPERTS, weights)


def test_pymoe_does_not_import_transformers():
    program = "import sys, pymoe.nn, pymoe.integrations; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, 'needs transformers: pip install "transformers>=5"'),
        ("4.57.1", "needs transformers 5 or newer, got 4.57.1"),
    ],
)
def test_without_a_transformers_that_fits(installed, message, monkeypatch):
    import types

    module = types.ModuleType("transformers")
    module.__version__ = installed
    monkeypatch.setitem(sys.modules, "transformers", module if installed else None)
    with pytest.raises(ImportError, match=message):
        interface.register(pymoe.integrations.transformers.experts_forward)
