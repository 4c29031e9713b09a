"""Tests of enable and disable on whole models, including models whose experts do not use transformers' interface."""

import copy
import pickle
import sys

import pytest
import tiny_models
import torch

from pymoe import ops
from pymoe.integrations.transformers import disable, enable
from pymoe.ops import raw

OUTSIDE = {
    "dbrx": "transformer.blocks.{}.ffn.experts",
    "jetmoe": "model.layers.{}.mlp.input_linear",
    "llama4": "model.layers.{}.feed_forward",
    "longcat_flash": "model.layers.{}.mlp.experts",
    "step3p7": "layers.{}.mlp.experts",
}


@pytest.fixture
def products(monkeypatch):
    """Return a list that grows by one with each call of grouped_linear, or of the function that makes both products."""
    seen = []
    fused = sys.modules["pymoe.nn.apply_experts"]
    for module, name in ((ops, "grouped_linear"), (raw, "grouped_linear"), (fused, "apply_experts_fused")):
        product = getattr(module, name)
        counted = lambda *args, product=product, **options: seen.append(1) or product(*args, **options)  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    return seen


def trained(model, ids):
    """Return logits or last hidden states, and the gradient of every parameter, by name."""
    model.train()
    model.zero_grad()
    outputs = model(input_ids=ids, use_cache=False)
    y = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    y.float().square().mean().backward()
    return y.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(found, expected, tolerance):
    (y, gradients), (expected_y, expected_gradients) = found, expected
    torch.testing.assert_close(y, expected_y, rtol=tolerance, atol=tolerance * expected_y.abs().max().item())
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    torch.testing.assert_close(gradients, expected_gradients, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.parametrize("name", OUTSIDE)
def test_models_outside_the_interface_equal_eager(name, products):
    model = tiny_models.build(name)
    keys, ids = list(model.state_dict()), tiny_models.tokens(24)
    expected = trained(model, ids)
    assert not products

    changed = enable(model)
    assert {OUTSIDE[name].format(layer) for layer in range(2)} <= set(changed)
    assert enable(model) == []  # there is nothing left to change
    compare(trained(model, ids), expected, 1e-5)
    assert products
    assert list(model.state_dict()) == keys

    products.clear()
    assert disable(model) == changed
    assert disable(model) == []
    found = trained(model, ids)
    assert not products
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("name", [name for name in OUTSIDE if name != "step3p7"])  # step3p7 has no language-model head
def test_generated_tokens_equal_eager(name):
    model = tiny_models.build(name)
    ids = tiny_models.tokens()
    expected = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    enable(model)
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0), expected)


@pytest.mark.parametrize("name", OUTSIDE)
def test_bfloat16_is_as_close_as_eager(name):
    model = tiny_models.build(name)
    ids = tiny_models.tokens(24)
    exact, _ = trained(copy.deepcopy(model).double(), ids)
    model.bfloat16()
    eager, _ = trained(model, ids)
    enable(model)
    pymoe, _ = trained(model, ids)
    assert (pymoe - exact).norm() <= 1.25 * (eager - exact).norm()


@pytest.mark.parametrize("name", ["llama4", "dbrx"])
def test_copies_and_pickles_run_on_pymoe_too(name, products):
    model = tiny_models.build(name)
    enable(model)
    ids = tiny_models.tokens()
    expected = model(ids).logits
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        products.clear()
        assert torch.equal(one(ids).logits, expected)
        assert products
        disable(one)
        products.clear()
        one(ids)
        assert not products
    model(ids)
    assert products, "that of the copy does not concern the original"


def test_other_models_stay_as_they_are(products):
    model, other = tiny_models.build("llama4"), tiny_models.build("llama4")
    enable(model)
    other(tiny_models.tokens())
    assert not products
    assert type(model.model.layers[0].feed_forward).__name__ == "Llama4TextMoe"
    assert isinstance(model.model.layers[0].feed_forward, type(other.model.layers[0].feed_forward))


def test_hooks_and_recorded_router_logits_stay():
    model = tiny_models.build("llama4")
    ids = tiny_models.tokens()
    expected = model.model(ids, output_router_logits=True)
    called = []
    model.model.layers[0].feed_forward.register_forward_hook(lambda *arguments: called.append(1))
    enable(model)
    found = model.model(ids, output_router_logits=True)
    assert called
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state)


@pytest.mark.parametrize("choices", [1, 3])
def test_llama4_with_one_and_with_several_choices(choices):
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    torch.manual_seed(0)
    config = Llama4TextConfig(hidden_size=48, intermediate_size=40, intermediate_size_mlp=40, num_local_experts=8)
    config.num_experts_per_tok = choices
    block = Llama4TextMoe(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 9, 48)
    expected = block(x)
    assert enable(block) == [""]
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)


def test_models_behind_the_interface_go_back_to_what_they_ran(products):
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("batched_mm")
    changed = enable(model)
    assert changed == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    model(tiny_models.tokens())
    assert products
    assert enable(model) == []
    assert disable(model) == changed
    assert model.config._experts_implementation == "batched_mm"


def test_a_part_takes_back_its_configuration_and_leaves_no_mark():
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("eager")
    enable(model)
    assert disable(model.model.layers[0].mlp) == ["experts"]
    assert model.config._experts_implementation == "eager", "also for the other layers, whose configuration it is"

    model.set_experts_implementation("pymoe")
    assert disable(model) == [], "what others chose since is left alone"
    assert model.config._experts_implementation == "pymoe"

    model.set_experts_implementation("eager")
    enable(model)
    disable(model.model.layers[0])
    model.set_experts_implementation("grouped_mm")
    assert enable(model.model.layers[0]) == ["mlp.experts"]
    assert disable(model) == ["model.layers.0.mlp.experts"]
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize("with_base", [False, True], ids=["parametrization", "fully_shard"])
def test_classes_derived_after_enable_are_not_undone(with_base):
    """fully_shard makes the module's class a subclass that has another base first."""
    from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

    model = torch.nn.Sequential(JetMoeParallelExperts(3, 8, 16))
    torch.nn.init.normal_(model[0].weight)
    x, sizes = torch.randn(6, 8), [1, 2, 3]
    expected = model[0](x, sizes)
    enable(model)
    enabled = type(model[0])
    if with_base:
        model[0].__class__ = type("Sharded", (type("Base", (), {}), enabled), {})
    else:
        torch.nn.utils.parametrize.register_parametrization(model[0], "weight", torch.nn.Identity())
    derived = type(model[0])
    with pytest.raises(TypeError, match=f"disable: expected 0 to have the class that enable .* got {derived.__name__}"):
        disable(model)
    assert type(model[0]) is derived
    torch.testing.assert_close(model[0](x, sizes), expected)
    if with_base:
        assert type(copy.deepcopy(model[0])) is derived
        model[0].__class__ = enabled
    else:
        with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
            pickle.dumps(model)
        torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert disable(model) == ["0"]
    assert type(model[0]) is JetMoeParallelExperts
    assert torch.equal(model[0](x, sizes), expected)


def test_an_implementation_chosen_by_others_is_left_alone():
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("pymoe")
    assert enable(model) == disable(model) == []
    assert model.config._experts_implementation == "pymoe"

    model.set_experts_implementation("eager")
    assert len(enable(model)) == 2
    model.set_experts_implementation("grouped_mm")
    assert disable(model) == []
    assert model.config._experts_implementation == "grouped_mm"


def test_a_model_of_text_and_images():
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 128}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": rope}
    text = {**sizes, **heads, "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 2}
    images = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3VLMoeConfig(text_config=text, vision_config={**images, "deepstack_visual_indexes": [0]})
    torch.manual_seed(0)
    model = Qwen3VLMoeForConditionalGeneration(config).eval()
    model.set_experts_implementation("eager")
    ids = tiny_models.tokens()
    expected = model(input_ids=ids).logits
    assert enable(model) == [f"model.language_model.layers.{layer}.mlp.experts" for layer in range(2)]
    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_part_of_a_model():
    model = tiny_models.build("mixtral")
    block = model.model.layers[0].mlp
    x = torch.randn(2, 5, 64)
    model.set_experts_implementation("eager")
    expected = block(x)
    assert enable(block) == ["experts"]
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match=r"enable: expected a model with experts.*got Linear with none of them"):
        enable(torch.nn.Linear(2, 2))


def test_experts_that_cannot_be_computed_are_refused_by_name_and_reason():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    block = SwitchTransformersSparseMLP(SwitchTransformersConfig(d_model=8, d_ff=8, num_experts=2))
    with pytest.raises(
        ValueError, match=r"enable: expected.*got SwitchTransformersSparseMLP with SwitchTransformersExp"
    ):
        enable(block)


def test_nllb_is_refused_because_transformers_computes_other_experts():
    """Its eager forward uses the router's mask of zeros and ones as expert numbers."""
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

    block = NllbMoeSparseMLP(NllbMoeConfig(d_model=16, num_experts=4, moe_token_dropout=0.0), ffn_dim=8).eval()
    x = torch.randn(2, 20, 16)
    chosen = block.router(x.view(-1, 16), None)[0].sum(dim=0)
    assert chosen[2:].gt(0).any(), "the router chooses the experts 2 and 3, too"
    expected = block(x)
    with torch.no_grad():
        for number in (2, 3):
            for parameter in block.experts[f"expert_{number}"].parameters():
                parameter.zero_()
    assert torch.equal(block(x), expected)
    with pytest.raises(ValueError, match="with NllbMoeExperts: transformers computes other experts"):
        enable(block)


def test_nothing_changes_where_something_is_refused():
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("eager")
    last = model.model.layers[1].mlp.experts
    last.down_proj = torch.nn.Parameter(torch.zeros_like(last.down_proj, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"enable: model.layers.1.mlp.experts.down_proj must have dtype float32.*int8"):
        enable(model)
    assert model.config._experts_implementation == "eager"
    assert disable(model) == []
