"""Tests of converting sparse blocks of transformers to MoE and back: equal outputs, weights with equal bits."""

import copy

import pytest
import tiny_models
import torch

from pymoe.integrations.transformers import from_transformers, to_transformers
from pymoe.integrations.transformers.blocks import DIFFERENT, PLANS
from pymoe.nn import MoE, load_quantized, quantize_experts, save_quantized, update_expert_biases

MODELS = {
    "afmoe": "AfmoeSparseMoeBlock",
    "aria": "AriaTextMoELayer",
    "axk2": "AXK2MoE",
    "bailing_hybrid": "BailingHybridMoE",
    "beam": "BeamMoE",
    "cohere2_moe": "Cohere2MoeSparseMoeBlock",
    "deepseek_ocr2": "DeepseekOcr2TextMoe",
    "deepseek_v2": "DeepseekV2Moe",
    "deepseek_v3": "DeepseekV3MoE",
    "deepseek_v32": "DeepseekV32MoE",
    "dots1": "Dots1MoE",
    "dots3_note": "Dots3NoteTextMoE",
    "ernie4_5_moe": "Ernie4_5_MoeSparseMoeBlock",
    "exaone_moe": "ExaoneMoeSparseMoEBlock",
    "flex_olmo": "FlexOlmoSparseMoeBlock",
    "flint": "FlintSparseMoeBlock",
    "glm4_moe": "Glm4MoeMoE",
    "glm4_moe_lite": "Glm4MoeLiteMoE",
    "glm4v_moe": "Glm4vMoeTextMoE",
    "glm5_next": "Glm5NextTextMoE",
    "glm_moe_dsa": "GlmMoeDsaMoE",
    "gpt_oss": "GptOssMLP",
    "granitemoe": "GraniteMoeMoE",
    "granitemoe_swa": "GraniteMoeSWAMoE",
    "granitemoehybrid": "GraniteMoeHybridMoE",
    "granitemoeshared": "GraniteMoeSharedMoE",
    "hunyuan_v1_moe": "HunYuanMoEV1Moe",
    "hy_v3": "HYV3MoE",
    "jamba": "JambaSparseMoeBlock",
    "kimi_linear": "KimiLinearMoE",
    "laguna": "LagunaSparseMoeBlock",
    "llama4": "Llama4TextMoe",
    "mellum": "MellumSparseMoeBlock",
    "mimo_v2_flash": "MiMoV2FlashMoE",
    "minimax": "MiniMaxSparseMoeBlock",
    "minimax_m2": "MiniMaxM2SparseMoeBlock",
    "minimax_m3_vl": "MiniMaxM3VLSparseMoeBlock",
    "mistral4": "Mistral4MoE",
    "mistral_large4": "MistralLarge4TextMoE",
    "mixtral": "MixtralSparseMoeBlock",
    "nemotron_h": "NemotronHMoE",
    "olmoe": "OlmoeSparseMoeBlock",
    "openai_privacy_filter": "OpenAIPrivacyFilterMLP",
    "qwen2_moe": "Qwen2MoeSparseMoeBlock",
    "qwen3_5_moe": "Qwen3_5MoeSparseMoeBlock",
    "qwen3_moe": "Qwen3MoeSparseMoeBlock",
    "qwen3_next": "Qwen3NextSparseMoeBlock",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextSparseMoeBlock",
    "qwen3_omni_moe talker": "Qwen3OmniMoeTalkerTextSparseMoeBlock",
    "qwen3_vl_moe": "Qwen3VLMoeTextSparseMoeBlock",
    "qwen4_exp": "Qwen4ExpTextSparseMoeBlock",
    "solar_open": "SolarOpenMoE",
    "unlimited_ocr": "UnlimitedOcrTextMoe",
}
CLAMPED = {"swiglu_limit": 1.5}  # so small that the tests' tokens exceed it
OPTIONS = {
    "AXK2MoE": {"n_group": None},
    "Cohere2MoeSparseMoeBlock": {"shared_expert_combination_strategy": "sum"},
    **dict.fromkeys(("Glm5NextTextMoE", "GptOssMLP", "MiniMaxM3VLSparseMoeBlock", "OpenAIPrivacyFilterMLP"), CLAMPED),
    "NemotronHMoE": {"moe_shared_expert_intermediate_size": 80},
}
"""Options of configurations that blocks need to be taken, or that show what they compute."""
REFUSED = {
    "axk1": "AXK1MoE",
    "deepseek_v4": "DeepseekV4SparseMoeBlock",
    "gemma4": "Gemma4TextDecoderLayer",
    "hy_v4": "HYV4MoE",
    "inkling2": "Inkling2SparseMoeBlock",
    "kolibri1": "Kolibri1SparseMoeBlock",
    "lfm2_moe": "Lfm2MoeSparseMoeBlock",
    "muse_spark": "MuseSparkMoE",
    "phimoe": "PhimoeSparseMoeBlock",
    "zaya": "ZayaSparseMoeBlock",
}


def talker():
    """Return a block of the talker of Qwen3-Omni, which no tiny model has, and its configuration."""
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    config = tiny_models.configuration(configuration.Qwen3OmniMoeTalkerTextConfig, {})
    config.shared_expert_intermediate_size = 80
    return modeling.Qwen3OmniMoeTalkerTextSparseMoeBlock(config), config


def block_of(model, name):
    """Return the last block of this class in a tiny model, with random weights large enough that choices differ, and
    its configuration.
    """
    if model.endswith("talker"):
        block, config = talker()
    else:
        built = tiny_models.build(model)
        block, config = [one for one in built.modules() if type(one).__name__ == name][-1], built.config
    if name in OPTIONS:
        config = config.get_text_config()
        for option, value in OPTIONS[name].items():
            setattr(config, option, value)
        block = type(block)(config)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    block.eval().requires_grad_()
    generator = torch.Generator().manual_seed(0)
    for key, tensor in block.state_dict().items():
        scale = 0.05 if "bias" in key and "proj" not in key else 0.3
        tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    return block, config


def tokens(block, *shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*(shape or (3, 20)), 64, generator=generator)


def output_of(block, x):
    """Return what a block adds to its tokens; some return the router's results, too, or rows without a batch."""
    y = block(x)
    return (y[0] if isinstance(y, tuple) else y).reshape(x.shape)


def relative_error(found, expected):
    """Return the largest difference as a share of the largest value; NaN, which no bound allows, if all are 0."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def states_equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


def test_every_plan_is_tested():
    assert set(MODELS.values()) == set(PLANS)
    assert set(REFUSED.values()) <= set(DIFFERENT)
    assert not set(PLANS) & set(DIFFERENT)


@pytest.mark.thinned(usual=20)
@pytest.mark.parametrize(("model", "name"), MODELS.items(), ids=MODELS.keys())
def test_a_block_becomes_a_layer_and_comes_back(model, name):
    block, config = block_of(model, name)
    moe = from_transformers(block)
    assert not moe.training
    for shape in ((1, 1), (2, 7), (3, 20)):
        x = tokens(block, *shape)
        with torch.no_grad():
            expected, found = output_of(block, x), moe(x)
        assert relative_error(found, expected) <= 1e-6
    assert moe.stats.load.gt(0).sum() > moe.top_k, "the tokens choose various experts"

    back = to_transformers(moe, type(block), config.get_text_config())
    assert states_equal(back, block)
    with torch.no_grad():
        assert torch.equal(output_of(back, x), expected)
    assert states_equal(from_transformers(back), moe)


@pytest.mark.thinned(usual=20)
@pytest.mark.parametrize(("model", "name"), MODELS.items(), ids=MODELS.keys())
def test_gradients_are_those_of_the_block(model, name):
    block, _ = block_of(model, name)
    moe = from_transformers(block.train())
    x, again = tokens(block).requires_grad_(), tokens(block).requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    (output_of(block, x) * direction).sum().backward()
    (moe(again) * direction).sum().backward()
    of_block = copy.deepcopy(block)
    for parameter, original in zip(of_block.parameters(), block.parameters(), strict=True):
        parameter.data = torch.zeros_like(original) if original.grad is None else original.grad  # a bias of the choice
    expected = dict(from_transformers(of_block).named_parameters()) | {"x": x.grad}
    found = {key: parameter.grad for key, parameter in moe.named_parameters()} | {"x": again.grad}
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        error = relative_error(gradient, expected[key])
        assert error <= 1e-5, f"{key}: {error}"


@pytest.mark.thinned(usual=20)
@pytest.mark.parametrize(("model", "name"), MODELS.items(), ids=MODELS.keys())
def test_in_bfloat16_a_layer_is_as_close_as_its_rounding_allows(model, name):
    """The exact block has the same rounded weights in float32. Tokens that choose other experts are left out."""
    block, _ = block_of(model, name)
    moe = from_transformers(block.bfloat16())
    exact = from_transformers(block.float())
    x = tokens(block).bfloat16()
    with torch.no_grad():
        expected, found = output_of(block, x.float()).flatten(0, 1), moe(x).flatten(0, 1)
        chosen = [layer.router(rows.flatten(0, 1))[0].experts for layer, rows in ((moe, x), (exact, x.float()))]
    assert found.dtype == torch.bfloat16
    same = (chosen[0] == chosen[1]).all(dim=1)
    assert same.float().mean() >= 0.9
    assert relative_error(found.float()[same], expected[same]) <= 2**-6


@pytest.mark.parametrize("model", ["gpt_oss", "llama4", "nemotron_h", "qwen2_moe"])
def test_steps_of_training_agree(model):
    block, _ = block_of(model, MODELS[model])
    moe = from_transformers(block.train())
    for one in (block, moe):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            output_of(one, tokens(block, step + 2, 7)).square().mean().backward()
            optimizer.step()
    state = from_transformers(block).state_dict()
    for key, tensor in moe.state_dict().items():
        assert relative_error(tensor, state[key]) <= 1e-5, key


@pytest.mark.parametrize("model", ["gpt_oss", "llama4", "nemotron_h", "qwen2_moe"])
def test_layers_of_blocks_are_quantised_and_saved(model, tmp_path):
    block, _ = block_of(model, MODELS[model])
    moe = from_transformers(block)
    quantize_experts(moe, bits=8)
    x = tokens(block)
    save_quantized(moe, tmp_path / "layer.safetensors")
    with torch.no_grad():
        assert relative_error(moe(x), output_of(block, x)) <= 0.02
        assert relative_error(load_quantized(tmp_path / "layer.safetensors")(x), moe(x)) <= 1e-6


def test_weights_keep_dtypes_and_are_copies():
    block, config = block_of("deepseek_v3", "DeepseekV3MoE")
    block.bfloat16()
    block.gate.e_score_correction_bias = block.gate.e_score_correction_bias.float()
    block.experts.requires_grad_(False)
    moe = from_transformers(block.train())
    assert moe.training
    assert moe.experts.w_in.dtype == torch.bfloat16
    assert moe.router.expert_bias.dtype == torch.float32
    assert not moe.experts.w_in.requires_grad
    assert moe.router.weight.requires_grad
    back = to_transformers(moe, type(block), config)
    assert states_equal(back, block)
    assert not back.experts.gate_up_proj.requires_grad
    before = block.experts.down_proj.clone()
    with torch.no_grad():
        moe.experts.w_out.zero_()
    assert torch.equal(block.experts.down_proj, before)


def test_the_layer_trains_on():
    block, _ = block_of("deepseek_v3", "DeepseekV3MoE")
    moe = from_transformers(block, bias_update_rate=0.01).train()
    bias = moe.router.expert_bias.clone()
    moe(tokens(block)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())
    update_expert_biases(moe)
    assert (moe.router.expert_bias - bias).abs().max() == pytest.approx(0.01)


def test_a_layer_of_ones_own_becomes_a_block():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(**sizes, norm_topk_prob=True)
    config._experts_implementation = "eager"
    moe = MoE(32, 24, num_experts=8, top_k=2)
    block = to_transformers(moe, Qwen3MoeSparseMoeBlock, config)
    x = torch.randn(2, 5, 32)
    torch.testing.assert_close(block(x), moe(x))

    with pytest.raises(ValueError, match=r"to_transformers: expected a layer with top_k=2, as Qwen3MoeSparse.*, got 3"):
        to_transformers(MoE(32, 24, num_experts=8, top_k=3), Qwen3MoeSparseMoeBlock, config)
    with pytest.raises(ValueError, match=r"expected a layer with capacity_factor=None, .* got 1\.5"):
        to_transformers(MoE(32, 24, 8, 2, capacity_factor=1.5), Qwen3MoeSparseMoeBlock, config)
    with pytest.raises(ValueError, match=r"expected a layer with bias=False, .* got True"):
        to_transformers(MoE(32, 24, 8, 2, bias=True), Qwen3MoeSparseMoeBlock, config)
    with pytest.raises(ValueError, match="expected a layer without expert bias, which Qwen3MoeSparseMoeBlock lacks"):
        to_transformers(MoE(32, 24, 8, 2, bias_update_rate=0.1), Qwen3MoeSparseMoeBlock, config)
    with pytest.raises(TypeError, match=r"to_transformers: moe must be a pymoe.nn.MoE, got Linear"):
        to_transformers(torch.nn.Linear(2, 2), Qwen3MoeSparseMoeBlock, config)


def test_a_bias_that_the_layer_lacks_becomes_zero():
    block, config = block_of("solar_open", "SolarOpenMoE")
    moe = from_transformers(block)
    plain = MoE(
        *(moe.hidden_size, moe.experts.ffn_size, moe.num_experts, moe.top_k),
        score="sigmoid",
        num_groups=moe.router.num_groups,
        topk_groups=moe.router.topk_groups,
        renormalize=moe.router.renormalize,
        scale=moe.router.scale,
        num_shared_experts=1,
    )
    back = to_transformers(plain, type(block), config)
    assert back.gate.e_score_correction_bias.eq(0).all()
    torch.testing.assert_close(back(tokens(block)).shape, tokens(block).shape)


def test_scores_that_are_an_option_of_the_configuration():
    block, config = block_of("cohere2_moe", "Cohere2MoeSparseMoeBlock")
    x = tokens(block)
    for score, norm in (("softmax", False), ("sigmoid", False), ("sigmoid", True)):
        block.gate.expert_selection_fn, block.gate.norm_topk_prob = score, norm
        moe = from_transformers(block)
        assert (moe.router.score, moe.router.renormalize) == (score, norm or score == "softmax")
        with torch.no_grad():
            assert relative_error(moe(x), block(x)) <= 1e-6
    with pytest.raises(ValueError, match="expected a layer with score='softmax', as Cohere2MoeSparseMoeBlock has it"):
        to_transformers(moe, type(block), config)

    block.shared_expert_combination_strategy = "average"
    message = "expected a Cohere2MoeSparseMoeBlock with shared_expert_combination_strategy='sum', got 'average'"
    with pytest.raises(ValueError, match=message):
        from_transformers(block)
    config.num_shared_experts = 0
    config.shared_expert_combination_strategy = "average"  # of no effect now
    block = type(block)(config).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
        assert relative_error(from_transformers(block)(x), block(x)) <= 1e-6


def test_projections_around_experts_are_refused():
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    _, config = block_of("nemotron_h", "NemotronHMoE")
    config.moe_latent_size = 24
    message = r"from_transformers: expected a NemotronHMoE with known weights alone, got 'fc[12]_latent_proj\.weight'"
    with pytest.raises(ValueError, match=message):
        from_transformers(NemotronHMoE(config))
    with pytest.raises(ValueError, match=r"expected a NemotronHMoE with config\.moe_latent_size=None, got 24"):
        to_transformers(MoE(64, 40, 8, 3), NemotronHMoE, config)


def test_a_weight_that_is_not_known_is_refused():
    """A part that another version of transformers adds to a block would be lost without a word."""
    block, _ = block_of("qwen3_moe", "Qwen3MoeSparseMoeBlock")
    block.shared_expert = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(ValueError, match="expected a Qwen3MoeSparseMoeBlock with known weights alone, got 'shared_exp"):
        from_transformers(block)


@pytest.mark.parametrize(("model", "name"), REFUSED.items(), ids=REFUSED.keys())
def test_other_blocks_are_refused_with_the_reason(model, name):
    block, _ = block_of(model, name)
    with pytest.raises(ValueError, match=f"from_transformers: expected a block .* got {name}: {DIFFERENT[name]}"):
        from_transformers(block)


def test_quantised_experts_are_refused():
    model = tiny_models.build("mixtral")
    model.set_experts_implementation("pymoe")
    quantize_experts(model, bits=8)
    with pytest.raises(
        TypeError, match=r"from_transformers \(MixtralSparseMoeBlock\): experts.gate_up_proj must be a tens"
    ):
        from_transformers(model.model.layers[0].mlp)
    moe = MoE(32, 24, num_experts=8, top_k=2).eval()
    quantize_experts(moe, bits=8)
    kind = type(model.model.layers[0].mlp)
    with pytest.raises(TypeError, match=r"to_transformers \(MoE\): experts.w_in must be a tensor, got QuantizedLinear"):
        to_transformers(moe, kind, model.config)


def doubled(module, arguments, output):
    return tuple(2 * one for one in output) if isinstance(output, tuple) else 2 * output


def hooked(path):
    return lambda module: module.get_submodule(path).register_forward_hook(doubled)


def own_forward(path):
    def change(module):
        part = module.get_submodule(path)
        forward = part.forward
        part.forward = lambda *these: doubled(part, these, forward(*these))

    return change


def own_class(path):
    def change(module):
        part = module.get_submodule(path)
        forward = type(part).forward
        changed = {"forward": lambda self, *these: doubled(self, these, forward(self, *these))}
        part.__class__ = type(type(part).__name__, (type(part),), {**changed, "__module__": __name__})

    return change


class Around(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *these):
        return self.inner(*these)


def wrapped(path):
    def change(module):
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, Around(module.get_submodule(path)))

    return change


def parametrized(path):
    def change(module):
        parent, _, name = path.rpartition(".")
        torch.nn.utils.parametrize.register_parametrization(module.get_submodule(parent), name, torch.nn.Identity())

    return change


CHANGES_OF_BLOCKS = {
    "hook of the block": hooked(""),
    "hook of the gate": hooked("gate"),
    "hook of the experts": hooked("experts"),
    "hook of a shared layer": hooked("shared_experts.up_proj"),
    "forward of the block": own_forward(""),
    "forward of the gate": own_forward("gate"),
    "forward of the experts": own_forward("experts"),
    "class of the block": own_class(""),
    "class of the gate": own_class("gate"),
    "class of the experts": own_class("experts"),
    "wrapped experts": wrapped("experts"),
    "wrapped shared layer": wrapped("shared_experts.up_proj"),
    "parametrized gate": parametrized("gate.weight"),
    "parametrized experts": parametrized("experts.down_proj"),
}
CHANGES_OF_LAYERS = {
    "hook of the layer": hooked(""),
    "hook of the router": hooked("router"),
    "hook of the experts": hooked("experts"),
    "forward of the router": own_forward("router"),
    "class of the layer": own_class(""),
    "class of the router": own_class("router"),
    "wrapped experts": wrapped("experts"),
    "wrapped router": wrapped("router"),
    "wrapped shared experts": wrapped("shared"),
    "parametrized router": parametrized("router.weight"),
    "parametrized experts": parametrized("experts.w_out"),
}


@pytest.mark.parametrize("change", CHANGES_OF_BLOCKS.values(), ids=CHANGES_OF_BLOCKS)
def test_what_a_layer_would_lose_is_refused(change):
    """Conversion dropped hooks, replaced forwards and derived classes, so the layer computed something else."""
    block, _ = block_of("deepseek_v3", "DeepseekV3MoE")
    change(block)
    with pytest.raises(ValueError, match=r"^from_transformers: expected (a|the) DeepseekV3MoE .*, got "):
        from_transformers(block)


@pytest.mark.parametrize("change", CHANGES_OF_LAYERS.values(), ids=CHANGES_OF_LAYERS)
def test_what_a_block_would_lose_is_refused(change):
    block, config = block_of("deepseek_v3", "DeepseekV3MoE")
    moe = from_transformers(block)
    change(moe)
    with pytest.raises(ValueError, match=r"^to_transformers: expected a [A-Za-z]+ .*, got "):
        to_transformers(moe, type(block), config)


def test_another_number_of_choices_is_seen():
    """The layer's own number of choices was used, even if its router had another number."""
    block, config = block_of("mixtral", "MixtralSparseMoeBlock")
    moe = from_transformers(block)
    moe.router.top_k = 1
    with pytest.raises(ValueError, match="expected a layer with top_k=3, as MixtralSparseMoeBlock has it, got 1"):
        to_transformers(moe, type(block), config)


def test_hooks_by_which_transformers_records_outputs_are_no_obstacle():
    model = tiny_models.build("mixtral").eval()
    with torch.no_grad():
        model(input_ids=tiny_models.tokens(24), output_router_logits=True)
    block = model.model.layers[0].mlp
    assert block.gate._forward_hooks
    x = torch.randn(2, 5, block.gate.weight.shape[1])
    with torch.no_grad():
        torch.testing.assert_close(from_transformers(block)(x), block(x))


def test_options_that_the_layer_lacks_are_refused():
    block, _ = block_of("mixtral", "MixtralSparseMoeBlock")
    block.jitter_noise = 0.1
    with pytest.raises(ValueError, match=r"expected a MixtralSparseMoeBlock with jitter_noise=0, got 0\.1"):
        from_transformers(block)
    block.jitter_noise = 0.0
    gate = block.gate.weight
    block.gate.weight = torch.nn.Parameter(torch.cat([gate, gate]))
    with pytest.raises(ValueError, match=r"with all experts that its router knows \(16\), got 8"):
        from_transformers(block)
    block.gate.weight = gate
    block.experts.act_fn = torch.nn.Tanh()
    message = "expected a MixtralSparseMoeBlock whose experts compute one of pymoe's activations, got Tan"
    with pytest.raises(ValueError, match=message):
        from_transformers(block)
    block, _ = block_of("deepseek_v3", "DeepseekV3MoE")
    with pytest.raises(ValueError, match="bias_update_rate must be greater than 0 for a block whose choice has a bias"):
        from_transformers(block, bias_update_rate=0.0)
    block.shared_experts.act_fn = torch.nn.Tanh()
    message = "expected a DeepseekV3MoE whose shared experts compute 'swiglu', as the others do, without biases"
    with pytest.raises(ValueError, match=message):
        from_transformers(block)
    with pytest.raises(ValueError, match="got Linear; known are AXK2MoE, "):
        from_transformers(torch.nn.Linear(2, 2))
