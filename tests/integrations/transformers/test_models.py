"""Tests that whole models have the same logits, gradients and generated tokens as with eager experts, and that the
state dict does not change.
"""

import sys

import pytest
import tiny_models
import torch
from experts_classes import experts_classes

import pymoe.integrations.transformers  # noqa: F401
from pymoe import ops
from pymoe.ops import raw

EVERY_MODEL = sorted({one.model for one in experts_classes()})
USUAL = (
    "deepseek_v3",
    "ernie4_5_moe",
    "gpt_oss",
    "granitemoe",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""Models that cover all kinds of experts, routers and attention; --level=exhaustive runs all models."""

NEW_TOKENS = 8


def models(names):
    return [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in names]


@pytest.fixture
def calls(monkeypatch):
    """Return a list that grows by one with each call of pymoe's build_routing by a layer."""
    seen = []
    fused = sys.modules["pymoe.nn.apply_experts"]
    for module, name in ((ops, "build_routing"), (raw, "build_routing"), (fused, "apply_experts_fused")):
        call = getattr(module, name)
        counted = lambda *these, call=call, **options: seen.append(1) or call(*these, **options)  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    return seen


def trained(model, implementation, ids):
    """Return logits, and the gradient of every parameter, by name."""
    model.set_experts_implementation(implementation)
    model.train()
    model.zero_grad()
    torch.manual_seed(0)  # of dropout
    outputs = model(input_ids=ids, use_cache=False)
    if hasattr(outputs, "logits"):
        y = outputs.logits
        torch.nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    else:
        y = outputs.last_hidden_state
        y.square().mean().backward()
    return y.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("name", models(EVERY_MODEL))
def test_logits_and_gradients_equal_eager(name, calls):
    model = tiny_models.build(name)
    keys = list(model.state_dict())
    ids = tiny_models.tokens(24)
    logits, gradients = trained(model, "eager", ids)
    assert not calls
    found, found_gradients = trained(model, "pymoe", ids)
    assert calls
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5 * logits.abs().max().item())
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    torch.testing.assert_close(found_gradients, gradients, rtol=1e-5, atol=1e-5 * largest)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", models(EVERY_MODEL))
def test_generated_tokens_equal_eager(name, cache):
    model = tiny_models.build(name)
    if not model.can_generate():
        pytest.skip("a model without a head")
    ids = tiny_models.tokens()

    def generate(implementation):
        model.set_experts_implementation(implementation)
        return model.generate(
            ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, cache_implementation=cache
        )

    try:
        expected = generate("eager")
    except Exception as error:
        pytest.skip(f"transformers itself cannot: {error}")
    assert torch.equal(generate("pymoe"), expected)
    assert model.config._experts_implementation == "pymoe"


COMPILED = [
    "mixtral",
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("gpt_oss", "olmoe", "nemotron_h")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name):
    model = tiny_models.build(name)
    model.set_experts_implementation("pymoe")
    ids = tiny_models.tokens(24)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits, gradients = trained(model, "pymoe", ids)
    model.zero_grad()
    found = compiled(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(found, logits)
    torch.nn.functional.cross_entropy(found[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for parameter, gradient in ((model.get_parameter(name), gradient) for name, gradient in gradients.items()):
        torch.testing.assert_close(parameter.grad, gradient)


def test_the_name_is_taken_by_configurations_and_checkpoints(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_models.build("mixtral")
    ids = tiny_models.tokens()
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="pymoe")
    made = AutoModelForCausalLM.from_config(model.config, experts_implementation="pymoe")
    made.load_state_dict(model.state_dict())
    for one in (loaded, made):
        assert one.config._experts_implementation == "pymoe"
        torch.testing.assert_close(one(ids).logits, expected)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_activation_checkpointing_leaves_the_same_gradients(name):
    model = tiny_models.build(name)
    ids = tiny_models.tokens(24)
    _, expected = trained(model, "pymoe", ids)
    model.activation_checkpointing_enable()
    _, found = trained(model, "pymoe", ids)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
