"""LoRA of PEFT on experts that run on pymoe: the numbers and files of PEFT's own way, without its copy of all experts.

The reference is PEFT alone, around experts that run transformers' eager implementation.
"""

import functools
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from experts_classes import EXPERTS, experts_classes, hidden_size
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

import pymoe.integrations.transformers  # noqa: F401
from pymoe.integrations.transformers import adapters, enable, peft_layers, sharded

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.only_on("cpu")

MODELS = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"]
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def build(name, implementation="pymoe"):
    model = tiny_models.build(name)
    model.set_experts_implementation(implementation)
    return model


def configured(**options):
    defaults = dict(r=4, lora_alpha=8, target_modules=[], target_parameters=STACKED, init_lora_weights=False)
    return peft.LoraConfig(**(defaults | options))


def adapt(model, **options):
    torch.manual_seed(1)
    return peft.get_peft_model(model, configured(**options))


def logits(model):
    return model(input_ids=tiny_models.tokens(), use_cache=False).logits


def assert_equal(found, expected, tolerance=2e-5):
    scale = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


def gradients(model):
    model.zero_grad()
    logits(model).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}


# The numbers.


@functools.cache
def losses(name, implementation):
    model = adapt(build(name, implementation), init_lora_weights=True, target_modules=["o_proj"]).train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    losses = []
    for _ in range(50):
        loss = model(input_ids=tiny_models.tokens(), labels=tiny_models.tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_losses_of_peft_with_eager(name):
    found, expected = losses(name, "pymoe"), losses(name, "eager")
    assert found[-1] < 0.8 * found[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_losses_of_the_way_of_peft_on_pymoe(name, monkeypatch):
    expected = losses(name, "pymoe")
    kind = peft.tuners.lora.layer.ParamWrapper
    monkeypatch.setattr(kind, "_activate_lora", kind._activate_lora.__wrapped__)
    found = losses.__wrapped__(name, "pymoe")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=0)


class Holding(torch.nn.Module):
    """A model of nothing but experts, in which PEFT finds their parameters."""

    def __init__(self, experts):
        super().__init__()
        self.experts, self.config = experts, SimpleNamespace(model_type="none")

    def forward(self, *arguments):
        return self.experts(*arguments)


@pytest.mark.thinned(usual=8)
@pytest.mark.parametrize("one", experts_classes(), ids=lambda one: one.name)
def test_every_class_behind_the_interface_has_the_gradients_of_peft(one):
    """All flags of the interface occur: no gate, biases, transposed weights, a norm after the experts."""
    found = {}
    for implementation in ("pymoe", "eager"):
        torch.manual_seed(0)
        experts = one.build()
        experts.config._experts_implementation = implementation
        names = [f"experts.{name}" for name in peft_layers.stacked_names(experts)]
        x = torch.randn(9, hidden_size(experts)).requires_grad_()
        index, weights = torch.rand(9, EXPERTS).topk(3).indices, torch.rand(9, 3).requires_grad_()
        model = adapt(Holding(experts), target_parameters=names)
        y = model(x, index, weights)
        y.square().mean().backward()
        trained = {name: one.grad for name, one in model.named_parameters() if one.requires_grad}
        assert len(trained) == 4
        found[implementation] = {"y": y.detach(), "x": x.grad, "weights": weights.grad, **trained}
    for name, expected in found["eager"].items():
        assert_equal(found["pymoe"][name], expected)


@pytest.mark.parametrize(
    "options",
    [
        dict(r=8, lora_alpha=3, use_rslora=True),
        dict(rank_pattern={"mlp.experts.down_proj": 2}, alpha_pattern={"mlp.experts.down_proj": 5}),
        dict(target_parameters=STACKED[1:]),
        dict(layers_to_transform=[1], target_modules=["o_proj"], target_parameters=STACKED),
        dict(target_parameters=[*STACKED, "mlp.gate.weight"]),
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:.*pattern keys did not match")
def test_options_of_adapters(options):
    found, expected = (gradients(adapt(build("qwen3_moe", each), **options)) for each in ("pymoe", "eager"))
    assert found.keys() == expected.keys()
    for name in expected:
        assert_equal(found[name], expected[name])


@pytest.mark.parametrize("options", [dict(lora_dropout=0.1), dict(use_dora=True), dict(lora_bias=True)])
def test_what_peft_does_not_do_with_parameters_it_refuses(options):
    with pytest.raises(ValueError, match=r"lora\.ParamWrapper does not work"):
        adapt(build("qwen3_moe"), **options)


def test_several_adapters_together_alone_scaled_and_disabled():
    found, expected = [], []
    for outputs, implementation in ((found, "pymoe"), (expected, "eager")):
        model = adapt(build("gpt_oss", implementation), r=2)
        model.add_adapter("other", configured(r=3, lora_alpha=9))
        for active in (["default"], ["other"], ["default", "other"]):
            model.base_model.set_adapter(active)
            outputs.append(logits(model))
        for module in model.modules():
            if hasattr(module, "scale_layer"):
                module.scale_layer(0.5)
        outputs.append(logits(model))
        with model.disable_adapter():
            outputs.append(logits(model))
        outputs.append(logits(model.unload()))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
    distances = [(one - other).abs().max() for i, one in enumerate(found[:5]) for other in found[:i]]
    assert min(distances) > 1e-3, "the outputs tell the adapters apart"
    assert torch.equal(found[4], found[5])


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merging_is_that_of_peft(name):
    model = adapt(build(name))
    alone, expected = logits(model.get_base_model().eval()), None
    with model.disable_adapter():
        without = logits(model)
    expected = logits(model)
    assert torch.equal(alone, expected)
    model.merge_adapter()
    assert_equal(logits(model), expected)
    model.unmerge_adapter()
    assert_equal(logits(model), expected)
    with model.disable_adapter():
        assert_equal(logits(model), without)
    merged = model.merge_and_unload()
    assert not any("lora" in key for key in merged.state_dict())
    assert_equal(logits(merged), expected)


def test_bfloat16_and_autocast():
    """The result of rows is at least as near to that of float32 as PEFT's, whose sum W + B @ A is rounded."""
    exact = logits(adapt(build("qwen3_moe")))
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True)):
        errors = []
        for implementation in ("pymoe", "eager"):
            model = adapt(build("qwen3_moe", implementation).to(dtype))
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                errors.append(((logits(model) - exact).norm() / exact.norm()).item())
        assert 0 < errors[0] < max(1.5 * errors[1], 0.02), errors


def test_checkpoints_and_compiled_code_compute_the_same():
    model = adapt(build("olmoe")).train()
    expected = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_equal(logits(compiled), logits(model))
    model.get_base_model().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    for name, found in gradients(model).items():
        assert_equal(found, expected[name])


# Costs.


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operator makes, in elements."""

    def __init__(self, given):
        super().__init__()
        self.given, self.elements = given, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        made = function(*arguments, **(named or {}))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.untyped_storage().data_ptr() not in self.given:
                self.elements = max(self.elements, one.untyped_storage().nbytes() // one.element_size())
        return made


@pytest.mark.parametrize("implementation", ["pymoe", "grouped_mm"])
def test_nothing_as_large_as_the_experts_is_computed(implementation):
    """With another implementation, PEFT computes it: so the test would notice."""
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeExperts

    config = OlmoeConfig(hidden_size=64, intermediate_size=64, num_experts=64)
    config._experts_implementation = implementation
    experts = OlmoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = adapt(Holding(experts), target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    given = {one.untyped_storage().data_ptr() for one in experts.parameters()}
    x = torch.randn(8, 64).requires_grad_()
    with Largest(given) as largest:
        model(x, torch.arange(8).reshape(8, 1) % 64, torch.ones(8, 1)).sum().backward()
    smallest = min(parameter.numel() for parameter in (experts.down_proj, experts.gate_up_proj))
    assert (largest.elements >= smallest) == (implementation != "pymoe")


# Files.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("saved_by", ["pymoe", "eager"])
def test_adapters_are_exchanged_with_peft_bit_for_bit(name, saved_by, tmp_path):
    loaded_by = {"pymoe": "eager", "eager": "pymoe"}[saved_by]
    model = adapt(build(name, saved_by), target_modules=["o_proj"]).eval()
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(build(name, loaded_by), tmp_path / "saved")
    assert_equal(logits(again), expected)
    again.save_pretrained(tmp_path / "again")
    saved, loaded = (load_file(tmp_path / each / "adapter_model.safetensors") for each in ("saved", "again"))
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) and saved[key].dtype == loaded[key].dtype for key in saved)
    own = build(name, loaded_by)
    own.load_adapter(str(tmp_path / "saved"))  # of transformers
    assert_equal(logits(own), expected)


# What is not computed by rows.


def test_experts_outside_of_the_interface_go_the_way_of_peft_and_one_warning_says_so():
    peft_layers._warn_once.cache_clear()
    model = adapt(tiny_models.build("longcat_flash"), target_parameters=STACKED)
    expected = logits(model)
    enable(model.get_base_model())
    with pytest.warns(UserWarning, match="adapters of LongcatFlashExperts are computed as PEFT does it") as warned:
        found = logits(model)
    assert_equal(found, expected)
    assert len([one for one in warned if "as PEFT does it" in str(one.message)]) == 1


def test_biases_go_the_way_of_peft():
    peft_layers._warn_once.cache_clear()
    targets = [*STACKED, "mlp.experts.down_proj_bias"]
    expected = logits(adapt(build("gpt_oss", "eager"), target_parameters=targets))
    with pytest.warns(UserWarning, match="adapters of GptOssExperts are computed as PEFT does it"):
        assert_equal(logits(adapt(build("gpt_oss"), target_parameters=targets)), expected)


def test_an_implementation_may_be_chosen_later():
    model = adapt(build("olmoe", "eager"))
    expected = logits(model)
    model.get_base_model().set_experts_implementation("pymoe")
    found = logits(model)
    assert_equal(found, expected)
    assert not torch.equal(found, expected)


def test_a_forward_that_leaves_the_adapters_out_is_an_error():
    model = adapt(build("olmoe"))
    experts = model.get_submodule("base_model.model.model.layers.1.mlp.experts").get_base_layer()
    experts.forward = lambda x, index, weights: x
    with pytest.raises(RuntimeError, match=r"OlmoeExperts.*adds the adapters of down_proj, gate_up_proj.* did not"):
        logits(model)
    assert adapters.take(experts) == {}


def test_an_error_of_the_experts_is_the_one_that_is_seen():
    model = adapt(build("olmoe"))
    experts = model.get_submodule("base_model.model.model.layers.1.mlp.experts").get_base_layer()

    def forward(*arguments):
        raise ArithmeticError

    experts.forward = forward
    with pytest.raises(ArithmeticError):
        logits(model)
    assert adapters.take(experts) == {}


def test_a_call_during_another_one_is_refused():
    """Two threads would take each other's adapters, and one would compute without any."""
    model = adapt(build("olmoe"))
    experts = model.get_submodule("base_model.model.model.layers.1.mlp.experts").get_base_layer()
    computed = experts.forward

    def forward(*arguments):
        y = computed(*arguments)
        with adapters.lend(experts, "down_proj", []), pytest.raises(RuntimeError, match=r"one call of experts .* at a"):
            logits(model)
        return y

    expected = logits(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "forward", forward)
        with pytest.raises(RuntimeError, match="did not"):  # of the call that this test pretends
            logits(model)
    assert_equal(logits(model), expected)


def test_other_parameters_of_experts_on_several_ranks_are_refused():
    model = adapt(build("gpt_oss"), target_parameters=["mlp.experts.down_proj_bias"])
    experts = model.get_submodule("base_model.model.model.layers.1.mlp.experts").get_base_layer()
    experts.described = sharded.stacked_experts(experts)  # as pymoe.ep.shard leaves it
    with pytest.raises(ValueError, match=r"LoRA: expected stacked weights .* got 'down_proj_bias' of GptOssExperts"):
        logits(model)


# The imports.


def printed(program):
    run = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.split()


@pytest.mark.parametrize("first", ["peft", "pymoe.integrations.transformers"])
def test_peft_may_be_imported_before_or_after_and_pymoe_does_not_import_it(first):
    program = f"import sys, {first}; print('peft' in sys.modules); import peft, pymoe.integrations.transformers as own;"
    program += "own.peft_layers.register(); activate = peft.tuners.lora.layer.ParamWrapper._activate_lora;"
    program += "print(hasattr(activate.__wrapped__.__wrapped__, '__wrapped__'))"  # one is of contextmanager
    assert printed(program) == [str(first == "peft"), "False"]


def test_another_version_of_peft_is_left_alone_and_a_warning_says_so():
    class ParamWrapper:
        get_param = get_delta_factors = get_base_layer = None

    module = SimpleNamespace(ParamWrapper=ParamWrapper, LoraModel=peft.LoraModel)
    before = dict(vars(ParamWrapper))
    with pytest.warns(UserWarning, match=r"PEFT has no ParamWrapper._activate_lora.*PEFT 0\.21 is known to work"):
        peft_layers.change(module)
    assert vars(ParamWrapper) == before
