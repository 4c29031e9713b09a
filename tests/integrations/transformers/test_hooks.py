"""Hooks and replaced parts are heard on pymoe, where its operators do the work of parts, as in transformers' code."""

import pytest
import tiny_models
import torch
from torch import nn

import pymoe.integrations.transformers  # noqa: F401
from pymoe.integrations.transformers import enable
from pymoe.integrations.transformers.activations import activation_of, gated_activation
from pymoe.integrations.transformers.outside import FORWARDS, PARTS
from pymoe.nn import quantize_experts

ACTIVATIONS = {
    "dbrx": "transformer.blocks.0.ffn.experts.mlp.activation_fn",
    "llama4": "model.layers.0.feed_forward.experts.act_fn",
    "longcat_flash": "model.layers.0.mlp.experts.act_fn",
    "step3p7": "layers.0.mlp.experts.act_fn",
}
"""Of models outside the interface; the layer 0 of Step3p7 does not clamp."""

PASSED_OVER = {
    "dbrx": "transformer.blocks.0.ffn.experts.mlp",
    "llama4": "model.layers.0.feed_forward.experts",
    "longcat_flash": "model.layers.0.mlp.experts.identity_expert",
}
"""Parts that the forwards on pymoe do not call."""


def doubled(module, arguments, output):
    return 2 * output


@torch.no_grad()
def output(model):
    outputs = model(input_ids=tiny_models.tokens(24), use_cache=False)
    return outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state


def assert_heard(model, expected, without):
    found = output(model)
    assert not torch.allclose(expected, without, rtol=1e-3), "the change is one that the outputs show"
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("name", "path"), [*ACTIVATIONS.items(), *PASSED_OVER.items()])
def test_hooks_on_parts_outside_the_interface(name, path):
    model = tiny_models.build(name)
    without = output(model)
    handle = model.get_submodule(path).register_forward_hook(doubled)
    expected = output(model)
    enable(model)
    assert_heard(model, expected, without)

    handle.remove()
    torch.testing.assert_close(output(model), without, rtol=1e-5, atol=1e-5 * without.abs().max().item())
    model.get_submodule(path).register_forward_hook(doubled)  # after enable
    assert_heard(model, expected, without)


@pytest.mark.parametrize(("name", "path"), PASSED_OVER.items())
def test_replaced_parts_outside_the_interface(name, path):
    model = tiny_models.build(name)
    without = output(model)
    part = model.get_submodule(path)
    forward = type(part).forward
    part.__class__ = type("Doubled", (type(part),), {"forward": lambda self, *these: 2 * forward(self, *these)})
    expected = output(model)
    enable(model)
    assert_heard(model, expected, without)


def test_a_replaced_gate_outside_the_interface():
    model = tiny_models.build("step3p7")
    without = output(model)
    experts = model.layers[0].mlp.experts
    assert experts.limit == float("inf")
    experts._apply_gate = lambda rows: rows.chunk(2, dim=-1)[1]
    expected = output(model)
    enable(model)
    assert_heard(model, expected, without)


def test_parts_are_those_of_known_classes():
    assert set(PARTS) <= set(FORWARDS)


@pytest.mark.parametrize("base", [nn.ReLU, nn.GELU])
def test_activations_derived_from_those_of_torch_run_their_own_code(base):
    class Twice(base):
        def forward(self, rows):
            return 2 * super().forward(rows)

    rows = torch.randn(5, 8)
    gate, up = rows.chunk(2, dim=-1)
    activation = gated_activation(Twice())
    assert callable(activation)
    assert torch.equal(activation(rows), 2 * base()(gate) * up)
    experts = tiny_models.build("nemotron_h").get_submodule("model.layers.1.mixer.experts")  # without a gate
    experts.act_fn = Twice()
    assert callable(activation_of(experts))
    experts.act_fn = base()
    assert activation_of(experts) == base.__name__.lower()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_hooks_on_quantised_weights(name):
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("pymoe")
    quantize_experts(model, bits=8)
    without = output(model)
    layer = model.model.layers[0].mlp.experts.get_submodule(name)
    seen = []
    handle = layer.register_forward_hook(lambda module, arguments, result: seen.append(result))
    torch.testing.assert_close(output(model), without)
    assert len(seen) == 1
    handle.remove()
    layer.register_forward_hook(doubled)
    assert not torch.allclose(output(model), without, rtol=1e-3)


def test_without_hooks_nothing_of_transformers_runs(monkeypatch):
    model = tiny_models.build("llama4")
    enable(model)
    calls = []
    monkeypatch.setattr(type(model.model.layers[0].feed_forward.experts), "forward", lambda *these: calls.append(1))
    output(model)
    assert not calls
