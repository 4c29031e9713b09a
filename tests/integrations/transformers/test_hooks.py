"""Tests that hooks and replaced parts have the same effect with pymoe as with transformers' own code."""

import sys

import pytest
import tiny_models
import torch
from torch import nn

import pymoe.integrations.transformers  # noqa: F401
from pymoe.integrations.transformers import disable, enable, outside
from pymoe.integrations.transformers.activations import activation_of, gated_activation
from pymoe.integrations.transformers.outside import CALLED, FORWARDS, PARTS
from pymoe.nn import quantize_experts

ACTIVATIONS = {
    "dbrx": "transformer.blocks.0.ffn.experts.mlp.activation_fn",
    "llama4": "model.layers.0.feed_forward.experts.act_fn",
    "longcat_flash": "model.layers.0.mlp.experts.act_fn",
    "step3p7": "layers.0.mlp.experts.act_fn",
}
"""Activations of models outside the interface; layer 0 of Step3p7 does not clamp."""

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


def all_scores(router, arguments, output):
    """Send every token to every expert, as a hook that makes each score non-zero."""
    scores, logits = output
    return torch.full_like(scores, 0.3), logits


def other_logits(router, arguments, output):
    """Change the router's reported logits and not its scores, as a hook."""
    scores, logits = output
    return scores, -logits


def hooked(hook):
    return lambda block: block.router.register_forward_hook(hook)


def derived_router(block):
    forward = type(block.router).forward
    changed = {"forward": lambda self, *these: all_scores(self, these, forward(self, *these))}
    block.router.__class__ = type("AllScores", (type(block.router),), changed)


def more_choices(block):
    block.router.top_k = 2


LLAMA4_ROUTERS = {
    "scores": hooked(all_scores),
    "logits": hooked(other_logits),
    "class": derived_router,
    "top_k": more_choices,
}


@pytest.mark.parametrize("change", LLAMA4_ROUTERS.values(), ids=LLAMA4_ROUTERS)
def test_a_router_of_llama4_that_chooses_otherwise_is_heard(change):
    """The forward on pymoe chose the ``top_k`` best logits and ignored the scores that the router had returned."""
    model = tiny_models.build("llama4")
    without = output(model)
    change(model.model.layers[0].feed_forward)
    expected = output(model)
    enable(model)
    found = output(model)
    assert change is LLAMA4_ROUTERS["logits"] or not torch.allclose(expected, without, rtol=1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_a_router_of_llama4_whose_logits_transformers_records_stays_on_pymoe(monkeypatch):
    """A hook of transformers, which records logits and changes nothing, stays on the router after its first use."""
    model = tiny_models.build("llama4")
    enable(model)
    ids = tiny_models.tokens(24)
    with torch.no_grad():
        recorded = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
    router = model.model.layers[0].feed_forward.router
    assert len(recorded) > 0
    assert router._forward_hooks
    calls = []
    run = outside.run_experts
    monkeypatch.setattr(outside, "run_experts", lambda *these, **named: calls.append(1) or run(*these, **named))
    output(model)
    assert len(calls) == len(recorded)
    router.register_forward_hook(all_scores)
    output(model)
    assert len(calls) == 2 * len(recorded) - 1


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
    assert set(PARTS) | set(CALLED) <= set(FORWARDS)


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


def test_without_hooks_nothing_of_transformers_runs():
    model = tiny_models.build("llama4")
    forward = type(model.model.layers[0].feed_forward.experts).forward.__code__
    for switch, called in ((disable, True), (enable, False)):
        switch(model)
        ran = set()
        sys.setprofile(lambda frame, event, _, ran=ran: ran.add(frame.f_code))
        try:
            output(model)
        finally:
            sys.setprofile(None)
        assert (forward in ran) == called


def gradients(model):
    """Return the gradients of a model's parameters for a fixed objective."""
    outputs = model(input_ids=tiny_models.tokens(24), use_cache=False)
    found = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    (found * torch.linspace(-1, 2, found.numel()).reshape(found.shape)).sum().backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


BEHIND = {"mixtral": "model.layers.0.mlp.experts.act_fn", "nemotron_h": "model.layers.1.mixer.experts.act_fn"}
"""Activations of experts behind the interface, with a gate and without."""


def halved(module, inputs, outputs):
    return tuple(None if one is None else one / 2 for one in inputs)


@pytest.mark.parametrize(("name", "path"), [*BEHIND.items(), *ACTIVATIONS.items(), *PASSED_OVER.items()])
def test_backward_hooks_change_gradients_as_in_transformers(name, path):
    found = []
    for on_pymoe in (False, True):
        model = tiny_models.build(name)
        if on_pymoe:
            enable(model)
        handle = model.get_submodule(path).register_full_backward_hook(halved)
        found.append(gradients(model))
        handle.remove()
    for parameter, expected in found[0].items():
        near = dict(rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        torch.testing.assert_close(found[1][parameter], expected, **near, msg=lambda m, name=parameter: f"{name}: {m}")


def twice(function):
    return lambda self, *these: 2 * function(self, *these)


@pytest.mark.parametrize(("name", "path"), [*BEHIND.items(), *ACTIVATIONS.items(), *PASSED_OVER.items()])
def test_a_patched_class_of_a_part_is_heard(name, path, monkeypatch):
    model = tiny_models.build(name)
    without = output(model)
    kind = type(model.get_submodule(path))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", twice(kind.forward))
        expected = output(model)
        enable(model)
        assert_heard(model, expected, without)
    torch.testing.assert_close(output(model), without, rtol=1e-5, atol=1e-5 * without.abs().max().item())


def test_a_patched_class_with_a_gate_of_its_own_is_heard(monkeypatch):
    model = tiny_models.build("gpt_oss")
    without = output(model)
    enable(model)
    kind = next(type(module) for module in model.modules() if type(module).__name__ == "GptOssExperts")
    monkeypatch.setattr(kind, "_apply_gate", twice(kind._apply_gate))
    found = output(model)
    model.set_experts_implementation("eager")
    assert_heard(model, found, without)


def test_a_patched_forward_of_a_class_that_enable_replaces_is_heard(monkeypatch):
    model = tiny_models.build("llama4")
    without = output(model)
    enable(model)
    kind = next(type(module) for module in model.modules() if type(module).__name__ == "Llama4TextMoe").__bases__[1]
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: tuple(2 * one for one in forward(self, x)))
    assert not torch.allclose(output(model), without, rtol=1e-3)
