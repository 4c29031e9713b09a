"""LoRA of PEFT on quantised models: adapters of experts and of dense layers, in the files of PEFT without pymoe."""

import pytest
import tiny_models
import torch
from experts_classes import experts_classes
from safetensors.torch import load_file
from test_peft_lora import MODELS, STACKED, Holding, adapt, assert_equal, build, configured, gradients, logits, peft
from test_quantizer import checkpoint

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, interface
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear, quantize_experts, quantize_linears

pytestmark = pytest.mark.only_on("cpu")

BOTH = {"target_modules": ["q_proj", "v_proj", "o_proj"], "target_parameters": STACKED}


def quantized(name, bits=4, linear_bits=8):
    model = build(name)
    quantize_experts(model, bits)
    if linear_bits:
        quantize_linears(model, linear_bits)
    return model


def widened(name, bits=4, linear_bits=8):
    """Return a model that is not quantised, with the values for which the weights of ``quantized`` stand."""
    model, packed = build(name), quantized(name, bits, linear_bits)
    for path, layer in packed.named_modules():
        if isinstance(layer, QuantizedLinear):
            weight = ops.dequantize_weight(layer.quantized_weight)
            if isinstance(layer, QuantizedDenseLinear):
                model.get_parameter(f"{path}.weight").data = weight[0]
            else:
                parent = model.get_submodule(path.rpartition(".")[0])
                transposed = interface.flags(parent).transposed
                model.get_parameter(path).data = weight.transpose(1, 2).contiguous() if transposed else weight
    return model


def train(model, steps=20):
    """Return the losses of some steps."""
    model.train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tiny_models.tokens(), labels=tiny_models.tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def files(folder):
    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_losses_of_a_model_with_the_same_weights_whole(name):
    """They differ by what quantised products round of their rows, and by a token for which this changes a choice."""
    found, expected = (train(adapt(one, **BOTH, init_lora_weights=True)) for one in (quantized(name), widened(name)))
    assert found[-1] < 0.9 * found[0]
    # 1.003e-2 with one processor and BLAS, less with others
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=3e-2, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_adapters_are_those_of_a_model_with_the_same_weights_whole(name):
    found, expected = (gradients(adapt(one, **BOTH)) for one in (quantized(name), widened(name)))
    assert found.keys() == expected.keys()
    for key in expected:
        assert float((found[key] - expected[key]).norm() / expected[key].norm()) < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_adapters_are_exchanged_with_whole_models_bit_for_bit(name, tmp_path):
    whole = adapt(widened(name), **BOTH).eval()
    whole.save_pretrained(tmp_path / "whole")
    model = peft.PeftModel.from_pretrained(quantized(name), tmp_path / "whole")
    with torch.no_grad():
        assert_equal(logits(model), logits(whole), 1e-3)
    model.save_pretrained(tmp_path / "quantized")
    own, expected = files(tmp_path / "quantized"), files(tmp_path / "whole")
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[key], expected[key]) and own[key].dtype == expected[key].dtype for key in expected)
    loaded = quantized(name)
    loaded.load_adapter(str(tmp_path / "whole"))  # of transformers
    with torch.no_grad():
        assert_equal(logits(loaded), logits(model), 1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_new_adapters_are_those_of_whole_models(name, tmp_path):
    """The same seed gives the same numbers under the same names, so files from either fit the other."""
    for folder, model in (("whole", build(name)), ("quantized", quantized(name))):
        adapt(model.bfloat16(), **BOTH).save_pretrained(tmp_path / folder)
    own, expected = files(tmp_path / "quantized"), files(tmp_path / "whole")
    assert list(own) == list(expected)
    for key in expected:
        torch.testing.assert_close(own[key], expected[key], rtol=1e-2, atol=1e-3)


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize("one", experts_classes(), ids=lambda one: one.name)
def test_every_class_has_the_wrappers_and_shapes_that_it_has_when_whole(one):
    """Names of adapters say in which order PEFT found the parameters, and biases are between the weights."""
    shapes = []
    for bits in (None, 8):
        experts = one.build().eval()
        experts.config._experts_implementation = "pymoe"
        targets = [f"experts.{name}" for name in experts._parameters]
        if bits:
            quantize_experts(experts, bits)
        before = list(experts._parameters)
        model = adapt(Holding(experts), target_parameters=targets)
        assert list(experts._parameters) == before
        shapes.append({name: one.shape for name, one in model.named_parameters() if "lora" in name})
    assert len(shapes[0]) == 2 * len(targets)
    assert shapes[0] == shapes[1]


def test_a_checkpoint_read_packed_takes_the_adapter_of_the_whole_model(tmp_path):
    cls = checkpoint("qwen3_moe", tmp_path / "published")
    whole = cls.from_pretrained(tmp_path / "published", experts_implementation="pymoe")
    adapt(whole, **BOTH).save_pretrained(tmp_path / "adapter")
    model = cls.from_pretrained(tmp_path / "published", quantization_config=PymoeConfig(8, linear_bits=8))
    assert model.hf_quantizer.is_trainable
    with torch.no_grad():
        alone = logits(model)
        adapted = logits(peft.PeftModel.from_pretrained(model, tmp_path / "adapter"))
        assert float((adapted - logits(whole)).norm() / logits(whole).norm()) < 0.05
    assert float((adapted - alone).norm() / alone.norm()) > 0.2


def test_several_adapters_together_and_disabled():
    model, whole = (adapt(one, **BOTH) for one in (quantized("gpt_oss"), widened("gpt_oss")))
    with torch.no_grad():
        for one in (model, whole):
            torch.manual_seed(2)
            one.add_adapter("other", configured(r=3, **BOTH))
            one.base_model.set_adapter(["default", "other"])
        assert_equal(logits(model), logits(whole), 1e-3)
        with model.disable_adapter():
            assert torch.equal(logits(model), logits(quantized("gpt_oss")))
        assert torch.equal(logits(model.unload()), logits(quantized("gpt_oss")))


# Refusals.


@pytest.mark.parametrize("targets", [{"target_modules": ["q_proj"]}, {"target_parameters": STACKED}], ids=list)
@pytest.mark.parametrize("merge", ["merge_adapter", "merge_and_unload"])
def test_merging_into_quantised_weights_is_refused_before_anything_changes(targets, merge):
    model = adapt(quantized("qwen3_moe"), **targets)
    with torch.no_grad():
        expected = logits(model)
        with pytest.raises(ValueError, match=r"not quantised, got 'model\.layers\.0\.\S+' in \d bits; keep the"):
            getattr(model, merge)()
        assert torch.equal(logits(model), expected)


def test_dense_layers_are_merged_next_to_quantised_experts_without_adapters():
    model = adapt(quantized("qwen3_moe", linear_bits=None), target_modules=["q_proj"], target_parameters=None)
    with torch.no_grad():
        expected = logits(model)
        assert_equal(logits(model.merge_and_unload()), expected, 1e-3)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (dict(use_dora=True), ValueError, "use_dora"),
        (dict(init_lora_weights="pissa"), AttributeError, "no tensor called 'weight', as its weights are packed"),
    ],
)
def test_what_needs_whole_weights_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        adapt(quantized("qwen3_moe"), target_modules=["q_proj"], target_parameters=None, **options)


def test_another_implementation_does_not_run_quantised_experts_with_adapters():
    model = adapt(quantized("qwen3_moe"), target_parameters=STACKED)
    model.get_base_model().set_experts_implementation("eager")
    with pytest.raises(TypeError, match="with experts_implementation='pymoe' alone"):
        logits(model)
