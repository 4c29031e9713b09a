"""quantize_experts on models of transformers: they compute with the rounded weights, generate, and come back."""

import copy

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import parametrize

import pymoe.integrations.transformers
from pymoe.integrations.transformers.quantized import stacked_weights
from pymoe.nn import QuantizedLinear, quantize_experts

NAMES = ("gpt_oss", "mixtral", "nemotron_h", "qwen3_moe")
"""Models with, in order: biases and (E, in, out) weights, the usual layout, no gate in experts, shared settings."""

pytestmark = pytest.mark.only_on("cpu")


def build(name):
    model = tiny_models.build(name).eval()
    model.set_experts_implementation("pymoe")
    return model


def logits(model):
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_computes_with_its_rounded_weights(name, bits):
    model = build(name)
    rounded = copy.deepcopy(model)
    layers = 0
    for module in rounded.modules():
        for weight in (stacked_weights(module) or {}).values():
            weight.copy_(pymoe.ops.dequantize_weight(pymoe.ops.quantize_weight(weight, bits)))
            layers += 0.5
    done = quantize_experts(model, bits)
    assert done.layers == layers > 0
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 2 * done.layers
    expected = logits(rounded)
    assert float((logits(model) - expected).norm() / expected.norm()) < 1e-3


@torch.no_grad()
def test_a_quantised_model_generates_and_comes_back_from_its_state(tmp_path):
    model = build("mixtral")
    prompt = torch.tensor([[5, 7, 11]])
    quantize_experts(model, 8)
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    save_file({name: one.contiguous() for name, one in model.state_dict().items()}, tmp_path / "state")
    other = build("mixtral")
    quantize_experts(other, 8)
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(load_file(tmp_path / "state"))
    assert torch.equal(other.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), tokens)


@torch.no_grad()
def test_gpt_oss_computes_with_the_mxfp4_weights_of_a_checkpoint():
    """The results equal what transformers computes from the codes and scales, except for the standard's NaN."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = torch.Generator().manual_seed(0)
    whole_groups = {**tiny_models.OWN.get("gpt_oss", {}), "hidden_size": 64, "intermediate_size": 96}
    plain = tiny_models.built(GptOssForCausalLM, tiny_models.configuration(GptOssConfig, whole_groups)).eval()
    plain.set_experts_implementation("pymoe")
    packed = copy.deepcopy(plain)
    replaced = 0
    for one, other in zip(list(plain.modules()), list(packed.modules()), strict=True):
        for name, weight in (stacked_weights(one) or {}).items():
            experts, outputs, inputs = weight.shape
            codes = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=random)
            scales = torch.randint(118, 122, codes.shape[:3], dtype=torch.uint8, generator=random)
            theirs = convert_moe_packed_tensors(codes, scales).transpose(1, 2)  # theirs is (E, in, out)
            ours = pymoe.ops.pack_weight(codes, scales)
            assert torch.equal(pymoe.ops.dequantize_weight(ours), theirs.float())
            weight.copy_(theirs)
            delattr(other, name)
            setattr(other, name, QuantizedLinear.from_quantized(ours))
            replaced += 1
    assert replaced == 4
    expected = logits(plain)
    assert float((logits(packed) - expected).norm() / expected.norm()) < 1e-3


def test_all_mxfp4_weights_are_those_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 255, 1, 1) * 0x11
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)  # 255 is NaN in the standard, infinite there
    theirs = convert_moe_packed_tensors(codes, scales).transpose(1, 2).float().contiguous()
    ours = pymoe.ops.dequantize_weight(pymoe.ops.pack_weight(codes, scales))
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def test_another_implementation_is_refused_before_and_after():
    model = build("mixtral")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match=r"got 'eager'; call model.set_experts_implementation\('pymoe'\) first"):
        quantize_experts(model)
    model.set_experts_implementation("pymoe")
    quantize_experts(model)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        with pytest.raises(TypeError, match="experts_implementation='pymoe' alone"), torch.no_grad():
            logits(model)


@torch.no_grad()
def test_parametrized_weights_are_rounded_as_they_are_used():
    class Half(torch.nn.Module):
        def forward(self, weight):
            return weight / 2

    model, plain = build("mixtral"), build("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj *= 2
    parametrize.register_parametrization(experts, "down_proj", Half())
    assert quantize_experts(model, 8) == quantize_experts(plain, 8)
    assert torch.equal(logits(model), logits(plain))


def test_offloaded_weights_are_refused():
    """Offloaded weights are on the meta device until their module is called; without this check, only the next call
    failed.
    """
    model = build("mixtral")
    experts = model.model.layers[0].mlp.experts.to("meta")
    forward = experts.forward
    experts.forward = lambda *args: forward(*args)
    with pytest.raises(ValueError, match="load the model without offloading"):
        quantize_experts(model, 8)
