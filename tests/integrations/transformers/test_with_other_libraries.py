"""Quantised models together with PEFT, accelerate and torchao: the same results as alone, or an error that says why.

The libraries are optional. Tests of a refusal that pymoe itself raises have stand-ins, and run without them.
"""

import pytest
import tiny_models
import torch
from test_quantizer import checkpoint, logits

from pymoe.integrations.transformers import PymoeConfig, enable
from pymoe.nn import quantize_experts, quantize_linears

pytestmark = pytest.mark.only_on("cpu")


def build():
    model = tiny_models.build("qwen3_moe")
    model.set_experts_implementation("pymoe")
    return model


def outputs(model):
    with torch.no_grad():
        return model(input_ids=tiny_models.tokens(), use_cache=False).logits


class Holding(torch.Tensor):
    """A tensor as torchao makes it: a subclass that holds other tensors."""

    def __tensor_flatten__(self):
        raise AssertionError


def held(weight):
    return torch.nn.Parameter(weight.detach().as_subclass(Holding), requires_grad=False)


# Architectures outside of the interface.


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("name", "experts"),
    [
        ("llama4", "Llama4TextMoe"),
        ("dbrx", "DbrxExperts"),
        ("jetmoe", "JetMoeParallelExperts"),
        ("longcat_flash", "LongcatFlashExperts"),
        ("step3p7", "Step3p7Experts"),
    ],
)
def test_experts_outside_of_the_interface_are_refused_by_name(name, experts, when):
    """The error once said that experts are found when the integration is imported, which it was."""
    model = tiny_models.build(name)
    if when == "after":
        enable(model)
    match = rf"must have experts behind transformers' interface, got those of {experts}, .*enable\(model\) runs them"
    with pytest.raises(ValueError, match=match):
        quantize_experts(model, 8)


@pytest.mark.parametrize("name", ["llama4", "dbrx", "jetmoe"])
def test_their_dense_layers_are_quantised_and_enable_runs_them(name):
    model = tiny_models.build(name)
    expected = outputs(model)
    assert enable(model)
    assert quantize_linears(model, 8).layers
    assert 0 < float((outputs(model) - expected).norm() / expected.norm()) < 0.05


def test_experts_that_nothing_runs_are_refused_without_that_advice():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    block = SwitchTransformersSparseMLP(SwitchTransformersConfig(d_model=8, d_ff=8, num_experts=2))
    with pytest.raises(ValueError, match=r"got those of SwitchTransformersExperts, which are outside of it$"):
        quantize_experts(block.eval(), 8)


def test_from_pretrained_refuses_them_too(tmp_path):
    cls = checkpoint("llama4", tmp_path)
    with pytest.raises(ValueError, match="expected a model with experts that pymoe quantises, got Llama4ForCausalLM"):
        cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(8))


# Weights that another method of quantisation has replaced.


def test_experts_of_another_method_are_refused():
    model = build()
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = held(experts.down_proj)
    with pytest.raises(TypeError, match=r"plain tensors, got a Holding in 'model.layers.1.mlp.experts'"):
        quantize_experts(model, 8)


def test_dense_layers_of_another_method_are_refused_and_the_others_can_be_selected():
    """With torchao this ended in a NotImplementedError of its tensors."""
    model = build()
    attention = model.model.layers[1].self_attn
    attention.q_proj.weight = held(attention.q_proj.weight)
    with pytest.raises(TypeError, match=r"plain tensors, got a Holding in 'model.layers.1.self_attn.q_proj'"):
        quantize_linears(model, 8)
    assert quantize_linears(model, 8, select=lambda name, _: "layers.0.self_attn" in name).layers == 4


def test_a_model_with_weights_of_another_method_is_not_saved(tmp_path):
    model = build()
    quantize_experts(model, 8)
    model.lm_head.weight = held(model.lm_head.weight)
    with pytest.raises(ValueError, match=r"by pymoe alone, got 'lm_head.weight' of the class Holding"):
        model.save_pretrained(tmp_path)


def test_torchao_quantises_dense_layers_next_to_quantised_experts(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    cls = checkpoint("qwen3_moe", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(8))
    expected = outputs(model)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert 0 < float((outputs(model) - expected).norm() / expected.norm()) < 0.05
    with pytest.raises(TypeError, match="plain tensors, got a "):
        quantize_linears(model, 8)
    with pytest.raises(ValueError, match="by pymoe alone"):
        model.save_pretrained(tmp_path / "packed")
    other = build()
    torchao.quantize_(other, torchao.Int8WeightOnlyConfig())
    quantize_experts(other, 8)
    outputs(other)


# Adapters.


def adapted(model, **targets):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **targets)).eval()


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


class Wrapping(torch.nn.Module):
    """A module as PEFT makes it: around the one that it adapts."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x):
        return self.base_layer(x)


def test_a_model_with_adapters_is_not_saved(tmp_path):
    """It was saved under names that nothing reads, and came back with random attention."""
    model = build()
    quantize_experts(model, 8)
    attention = model.model.layers[0].self_attn
    attention.q_proj = Wrapping(attention.q_proj)
    with pytest.raises(ValueError, match=r"without adapters, got 'model.layers.0.self_attn.q_proj.base_layer.weight'"):
        model.save_pretrained(tmp_path)
    attention.q_proj = attention.q_proj.base_layer
    model.save_pretrained(tmp_path)


def test_adapters_on_attention_work_with_quantised_experts(tmp_path):
    before = adapted(build(), **ATTENTION)
    before.save_pretrained(tmp_path / "adapter")
    quantize_experts(before, 8)
    expected = outputs(before)
    peft = pytest.importorskip("peft")
    cls = checkpoint("qwen3_moe", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(8))
    alone = outputs(model)
    torch.testing.assert_close(outputs(peft.PeftModel.from_pretrained(model, tmp_path / "adapter")), expected)
    assert not torch.allclose(alone, expected, atol=1e-3)
    with pytest.raises(ValueError, match="without adapters"):
        before.get_base_model().save_pretrained(tmp_path / "packed")
    merged = before.merge_and_unload()
    merged.save_pretrained(tmp_path / "packed")
    torch.testing.assert_close(logits(cls.from_pretrained(tmp_path / "packed")), logits(merged))


def test_adapters_are_merged_before_what_they_adapt_is_quantised():
    model = adapted(build(), **ATTENTION, **EXPERTS)
    expected = outputs(model)
    with pytest.raises(ValueError, match=r"that nothing adapts, got .* merge it first \(merge_and_unload"):
        quantize_experts(model, 8)
    with pytest.raises(ValueError, match=r"that nothing wraps, got .*q_proj.* merge an adapter first"):
        quantize_linears(model, 8)
    merged = model.merge_and_unload()
    quantize_experts(merged, 8)
    quantize_linears(merged, 8)
    assert float((outputs(merged) - expected).norm() / expected.norm()) < 0.05


def test_trainer_trains_adapters_on_attention_over_quantised_experts(tmp_path):
    """Trainer refuses a quantised model whose method does not say that it is trainable."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    cls = checkpoint("qwen3_moe", tmp_path / "whole")
    model = adapted(cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4)), **ATTENTION)
    packed = {name: value.clone() for name, value in model.named_buffers() if name.endswith("packed")}
    ids = tiny_models.tokens()[0]
    rows = [{"input_ids": ids, "labels": ids}] * 16
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"),
        learning_rate=0.02,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.1
    after = dict(model.named_buffers())
    assert packed
    assert all(torch.equal(value, after[name]) for name, value in packed.items())


# Devices.


@pytest.mark.parametrize("place", ["cpu", "auto", "disk", "disk with buffers"])
def test_a_device_map_changes_no_result(place, tmp_path):
    pytest.importorskip("accelerate")
    cls = checkpoint("qwen3_moe", tmp_path / "whole")
    quantization = PymoeConfig(8, linear_bits=8)
    model = cls.from_pretrained(tmp_path / "whole", quantization_config=quantization)
    expected = outputs(model)
    model.save_pretrained(tmp_path / "packed")
    named = {"device_map": place}
    if place.startswith("disk"):
        parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
        named = {"device_map": dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk"}}
        named |= {"offload_folder": str(tmp_path / "offloaded"), "offload_buffers": "buffers" in place}
    for options in ({"quantization_config": quantization}, {}):
        folder = tmp_path / ("whole" if options else "packed")
        torch.testing.assert_close(outputs(cls.from_pretrained(folder, **options, **named)), expected)


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_offloaded_models_are_refused_and_quantised_ones_can_be_offloaded(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def offloaded(model):
        folder = [str(tmp_path / "offloaded")] if offload == "disk_offload" else []
        return getattr(accelerate, offload)(model, *folder, execution_device=torch.device("cpu"))

    for quantize in (quantize_experts, quantize_linears):
        with pytest.raises(ValueError, match="load the model without offloading"):
            quantize(offloaded(build()), 8)
    model = build()
    quantize_experts(model, 8)
    quantize_linears(model, 8)
    expected = outputs(model)
    torch.testing.assert_close(outputs(offloaded(model)), expected)
