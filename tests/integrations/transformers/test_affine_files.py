"""Checkpoints of GPTQ, AWQ and compressed-tensors: PymoeConfig keeps all codes and scales, or refuses."""

import json

import numpy
import peft
import pytest
import torch
from integer_files import FILE, PACKERS, configuration, dequantised, is_stored, write
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from test_quantizer import assert_dense_layers_are_rounded, assert_same_model, logits
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, affine_files, fp8_files
from pymoe.integrations.transformers.configuration import STORED, configuration_for
from pymoe.integrations.transformers.quantizer import PymoeQuantizer
from pymoe.nn import QuantizedDenseLinear, QuantizedLinear
from pymoe.quantize import main

pytestmark = pytest.mark.only_on("cpu")

EXPERT = "model.layers.1.mlp.experts.2"
QUERY = "model.layers.0.self_attn.q_proj"
SIZES = {"vocab_size": 128, "hidden_size": 160, "num_hidden_layers": 2, "dtype": "float32"}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40, "num_experts_per_tok": 2}
QWEN3 = Qwen3MoeConfig(**SIZES, intermediate_size=200, moe_intermediate_size=144, num_experts=4, mlp_only_layers=[0])
MODELS = {
    "qwen3": QWEN3,
    "qwen2": Qwen2MoeConfig(
        **SIZES,
        intermediate_size=200,
        moe_intermediate_size=144,
        shared_expert_intermediate_size=136,
        num_experts=4,
        mlp_only_layers=[0],
    ),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=144, num_local_experts=4),
}
CASES = {  # kind, bits and group of the files, bits of pymoe's format, model
    "gptq": ("gptq", 4, 128, 4, "qwen3"),
    "gptq-v2": ("gptq_v2", 4, 128, 4, "mixtral"),
    "gptq-rows": ("gptq_v2", 4, -1, 4, "qwen2"),
    "gptq-32": ("gptq", 4, 32, 8, "qwen3"),
    "gptq-8-bits": ("gptq_v2", 8, 64, 8, "qwen3"),
    "awq": ("awq", 4, 128, 4, "qwen3"),
    "awq-64": ("awq", 4, 64, 8, "mixtral"),
    "awq-qwen2": ("awq", 4, 128, 4, "qwen2"),
    "compressed": ("compressed", 4, 128, 4, "qwen3"),
    "compressed-channels": ("compressed", 4, -1, 4, "mixtral"),
    "compressed-8-bits": ("compressed", 8, 32, 8, "qwen2"),
    "compressed-symmetric": ("compressed_symmetric", 4, 128, 4, "qwen3"),
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    """Return folders of a small quantised model and of the same with all weights widened, and pymoe's bits."""
    kind, bits, group, own, model = CASES[request.param]
    return *write(tmp_path, MODELS[model], kind, bits, group), own


@pytest.fixture
def published(request, tmp_path):
    """Return the folder of a small model of the kind that the test's parameter names."""
    kind, bits, group, _, model = CASES[request.param]
    return write(tmp_path, MODELS[model], kind, bits, group)[0]


def each(*names):
    return pytest.mark.parametrize("published", names, indirect=True)


def read(folder, bits=4, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=PymoeConfig(bits, "affine", **options), dtype=torch.float32
    )


def stacked(wide, name):
    """Return a stacked weight of the experts in a widened checkpoint, (E, N, H), by its name in the model."""
    path, _, own = name.rpartition(".")
    mixtral = path.replace(".mlp.", ".block_sparse_moe.")
    if f"{mixtral}.0.w1.weight" in wide:
        path, projections = mixtral, {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[own]
    else:
        projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[own]
    of_experts = [torch.cat([wide[f"{path}.{expert}.{one}.weight"] for one in projections]) for expert in range(4)]
    return torch.stack(of_experts)


@pytest.mark.thinned(usual=6)
def test_weights_are_what_the_formula_says_and_all_of_few_bits_stay_in_them(case):
    published, plain, bits = case
    model, wide = read(published, bits), load_file(plain / FILE)
    experts = dense = 0
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert (layer.format, layer.bits) == ("affine", bits)
            is_dense = isinstance(layer, QuantizedDenseLinear)
            expected = wide[f"{name}.weight"][None] if is_dense else stacked(wide, name)
            error = ops.dequantize_weight(layer.quantized_weight) - expected
            assert error.abs().max() == 0, name
            dense += is_dense
            experts += not is_dense
    assert experts in (2, 4)
    assert dense == sum(is_stored(name) and ".experts." not in name for name in wide) >= 8
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        of_file = name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if name not in wide else name
        assert torch.equal(parameter.detach(), wide[of_file]), name
    biases = [(name, one) for name, one in model.named_buffers() if name.endswith(".bias")]
    assert bool(biases) == (model.config.model_type == "qwen2_moe")
    for name, bias in biases:
        assert torch.equal(bias, wide[name]), name
        assert bias.any(), name


@pytest.mark.thinned(usual=6)
def test_it_computes_what_the_widened_model_does_and_comes_back(case, tmp_path):
    published, plain, bits = case
    model = read(published, bits)
    computed = logits(model)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, experts_implementation="pymoe"))
    assert (computed - expected).norm() / expected.norm() < 1e-5
    model.save_pretrained(tmp_path / "packed")
    entries = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert (entries["quant_method"], entries["bits"], entries["format"]) == ("pymoe", bits, "affine")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(logits(again), computed, "logits")


@each("gptq", "awq-qwen2", "compressed")
def test_a_saved_folder_says_the_format_of_each_dense_layer(published, tmp_path):
    """The layers are not those that linear_bits packs: one is in 16 bits, and none has integers of pymoe's own."""
    wide = load_file(published.parent / "plain" / FILE)[f"{QUERY}.weight"].half()

    def keep_one(tensors):
        for name in [name for name in tensors if name.startswith(f"{QUERY}.") and not name.endswith(".bias")]:
            del tensors[name]
        tensors[f"{QUERY}.weight"] = wide

    changed(published, keep_one)
    model = read(published)
    assert type(model.get_submodule(QUERY)) is nn.Linear
    assert torch.equal(model.get_submodule(QUERY).weight, wide.float())
    model.save_pretrained(tmp_path / "packed", max_shard_size="50KB")
    entries = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert "linear_bits" not in entries
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_model(again, model)
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "twice"), model)
    base = AutoModel.from_pretrained(tmp_path / "packed")
    assert_same_model(base, model.model)


@each("awq-qwen2")
def test_damaged_sizes_of_dense_layers_are_refused(published, tmp_path):
    """Whatever the numbers are, they must be those of the bytes next to them."""
    read(published).save_pretrained(tmp_path / "packed")
    whole = load_file(tmp_path / "packed" / FILE)
    names = sorted(name for name in whole if name.endswith("proj.weight.sizes"))
    random = torch.Generator().manual_seed(0)
    damaged = [torch.empty(0, dtype=torch.int64), torch.tensor(24), torch.tensor([torch.nan, 160, 160])]
    for _ in range(12):
        shift = torch.zeros(3, dtype=torch.int64)
        shift[torch.randint(3, (), generator=random)] = torch.randint(1, 40, (), generator=random)
        damaged.append(whole[names[0]] + shift)
    for number, sizes in enumerate(damaged):
        save_file(whole | {names[number % len(names)]: sizes}, tmp_path / "packed" / FILE, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"^from_pretrained: expected .*_proj\.weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


@each("gptq-v2", "awq-qwen2")
def test_gradients_and_lora_go_through_dense_layers(published):
    """Gradients reach the embedding and the adapters as those of the widened model do."""
    computed = {}
    for name, model in (
        ("packed", read(published)),
        (
            "wide",
            AutoModelForCausalLM.from_pretrained(published.parent / "plain", experts_implementation="pymoe").eval(),
        ),
    ):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
        torch.manual_seed(3)
        adapted = peft.get_peft_model(model, config).eval()
        model.get_input_embeddings().weight.requires_grad_()
        adapted(torch.arange(24).view(2, 12)).logits.square().mean().backward()
        computed[name] = {own: one.grad for own, one in adapted.named_parameters() if one.grad is not None}
    assert computed["packed"].keys() == computed["wide"].keys()
    assert len(computed["wide"]) == 1 + 2 * 2 * 2
    for name, expected in computed["wide"].items():
        assert (computed["packed"][name] - expected).norm() < 1e-4 * expected.norm(), name


@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, bits) for kind in PACKERS for bits in (4, 8) if (kind, bits) != ("awq", 8)]
)
def test_every_code_has_its_value_with_every_zero_point_in_every_place_of_a_word(kind, bits):
    in_word, count = 32 // bits, 2**bits
    first = 1 if kind == "gptq" else 0  # a zero point of 0 is refused there: see below
    outputs = numpy.arange((count - first) * in_word)
    inputs = numpy.arange(count * in_word)
    # Neighbours in a word differ, or the order in words would not matter.
    q = (inputs // in_word + 3 * (inputs % in_word) + outputs[:, None]) % count
    z = first + ((outputs // in_word + outputs % in_word) % (count - first))[:, None]
    for place in range(in_word):
        assert set(z[place::in_word, 0]) == set(range(first, count))
        assert all(set(row) == set(range(count)) for row in q[:, place::in_word])
    if kind == "compressed_symmetric":
        q, z = q[:64], numpy.full((64, 1), count // 2)
    torch.manual_seed(2)
    s = torch.randn(len(z), 1).mul(2.0 ** torch.randint(-20, 12, (len(z), 1))).half()
    s[0], s[1], s[2] = 2.0**-24, 65504, 0
    stored = STORED[configuration(kind, bits, -1)["quant_method"]](configuration(kind, bits, -1))
    parts = PACKERS[kind](q, z, s, bits, -1)
    layer = QuantizedLinear(q.shape[1], q.shape[0], 1, bits=bits, format="affine")
    layer.packed = stored.packed_weight("weight", stored.joined(parts)[None], layer)
    expected = dequantised(numpy.ascontiguousarray(q), z, s, q.shape[1])
    assert (ops.dequantize_weight(layer.weight)[0] - expected).abs().max() == 0
    assert torch.equal(stored.widened(parts, torch.float32), expected)


@pytest.mark.parametrize(("published", "bits"), [("awq", 4), ("compressed-8-bits", 8)], indirect=["published"])
def test_dense_layers_are_rounded_with_linear_bits(published, bits):
    model = read(published, bits, linear_bits=8)
    assert assert_dense_layers_are_rounded(model, published.parent / "plain") >= 4 * 2 + 3 + 1


@each("gptq")
def test_layers_share_converters(published, monkeypatch):
    """Every converter is tried on the name of every tensor, of which real files have 100,000."""
    counts = []
    add = PymoeQuantizer._from_rows

    def counted(quantizer, *arguments):
        converters = add(quantizer, *arguments)
        targets = [target for one in converters for target in one.target_patterns]
        counts.append((len(quantizer.dense), sum(r"\1." in target for target in targets)))
        return converters

    monkeypatch.setattr(PymoeQuantizer, "_from_rows", counted)
    for change in ({}, {"linear_bits": 8}):
        read(published, 4, **change)
    assert counts == [(11, 7), (12, 8)]  # the attentions of both layers share four; with linear_bits there is the head


@each("gptq")
def test_the_command_converts_a_folder(published, tmp_path):
    assert main([str(published), str(tmp_path / "packed"), "--format=affine"]) == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert_same_bits(logits(again), logits(read(published)), "logits")


def changed(published, change):
    tensors = load_file(published / FILE)
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, published / FILE, metadata={"format": "pt"})


def without(name):
    return lambda tensors: tensors.pop(name)


def with_value(name, value):
    return lambda tensors: tensors[name].view(-1)[1:2].fill_(value)


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


def of_dtype(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def plus(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def permuted(name):
    return lambda tensors: tensors.update({name: tensors[name].flip(0)})


TENSORS = {
    "qzeros": ("gptq", without(f"{EXPERT}.up_proj.qzeros"), r"to have '.*experts.2.up_proj.qzeros', got none"),
    "scales": ("awq", without(f"{QUERY}.scales"), r"to have '.*q_proj.scales', got none"),
    "codes": ("awq", without(f"{QUERY}.qweight"), r"to have '.*q_proj.qweight', got none"),
    "packed": (
        "compressed",
        without(f"{EXPERT}.up_proj.weight_packed"),
        "up_proj.weight_packed', got none",
    ),
    "shape": ("compressed", without(f"{EXPERT}.up_proj.weight_shape"), r"to have '.*up_proj.weight_shape', got none"),
    "zeros": ("compressed", without(f"{QUERY}.weight_zero_point"), r"to have '.*q_proj.weight_zero_point', got none"),
    "an activation's scales": ("awq", plus("model.layers.0.mlp.act.scales", torch.ones(3)), "act.qweight', got none"),
    "a dense layer": (
        "awq",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{QUERY}.")],
        "to have 'model.layers.0.self_attn.q_proj.weight', got none",
    ),
    "an expert": (
        "awq",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{EXPERT}.up_proj.")],
        r"weights in AWQ, got 'model.layers.1.mlp.experts.gate_up_proj': Sizes of tensors must match",
    ),
    "other experts": (
        "gptq",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{EXPERT}.")],
        r"down_proj' of 4 experts, 160 outputs and 144 inputs, got \(3, 160\)",
    ),
    "an order": (
        "gptq",
        permuted(f"{EXPERT}.up_proj.g_idx"),
        "gate_up_proj': expected neighbouring .*act-order",
    ),
    "an order of a dense layer": ("gptq", permuted(f"{QUERY}.g_idx"), r"q_proj.weight': expected neighbouring"),
    "an order of all": (
        "compressed",
        plus(f"{EXPERT}.up_proj.weight_g_idx", (torch.arange(160) // 128).flip(0).int()),
        "weight_g_idx of|neighbouring",
    ),
    "NaN": ("awq", with_value(f"{EXPERT}.up_proj.scales", torch.nan), "expected scales to be numbers, got NaN"),
    "infinity": ("compressed", with_value(f"{QUERY}.weight_scale", torch.inf), "q_proj.weight': expected scales to be"),
    "a zero point": (
        "gptq",
        with_value(f"{EXPERT}.down_proj.qzeros", 15 << 8),
        "expected zero points of 1 to 15, got a stored 15, which is 16 to some readers",
    ),
    "cut codes": ("awq", cut(f"{EXPERT}.down_proj.qweight"), r"rows of \d+ bytes|sizes|stack expects"),
    "cut zeros": ("gptq", cut(f"{EXPERT}.down_proj.qzeros"), r"expected qzeros \(2, 20\), got \(1, 20\)"),
    "cut scales": ("gptq", cut(f"{QUERY}.scales"), r"expected scales \(2, 160\), got \(1, 160\)"),
    "cut words": ("compressed", cut(f"{QUERY}.weight_packed"), r"expected weight_packed \(160, 20\), got \(159, 20\)"),
    "wrong shape": ("compressed", with_value(f"{QUERY}.weight_shape", 999), r"expected weight_packed \(160, 125\)"),
    "dtype of codes": ("gptq", of_dtype(f"{QUERY}.qweight", torch.int64), "expected qweight in torch.int32, got"),
    "dtype of scales": ("awq", of_dtype(f"{QUERY}.scales", torch.float64), "expected scales in torch.float16, got"),
    "a weight, too": ("awq", plus(f"{QUERY}.weight", torch.ones(160, 160)), "qweight, qzeros, scales without weight"),
    "a bias": (
        "gptq",
        lambda tensors: [
            tensors.update({f"model.layers.1.mlp.experts.{one}.down_proj.bias": torch.ones(160)}) for one in range(4)
        ],
        "experts.down_proj': expected no bias, or zeros for it, as the model has none",
    ),
    "a bias of a dense layer": (
        "compressed",
        plus(f"{QUERY}.bias", torch.ones(160)),
        "q_proj.weight': expected no bias, or zeros for it",
    ),
    "no bias": ("awq-qwen2", without(f"{QUERY}.bias"), "to have '.*q_proj.bias', got none"),
    "a dense layer of other sizes": (
        "compressed",
        lambda tensors: tensors.update(
            {
                name.replace("o_proj", "k_proj"): tensors[name].clone()
                for name in list(tensors)
                if name.startswith("model.layers.0.self_attn.o_proj.")
            }
        ),
        r"k_proj.weight' of 1 experts, 80 outputs and 160 inputs, got \(1, 160\)",
    ),
    "scales of many bits": (
        "compressed",
        lambda tensors: tensors.update(
            {f"{EXPERT}.up_proj.weight_scale": tensors[f"{EXPERT}.up_proj.weight_scale"].float() * 1.0000002}
        ),
        "expected zero points times scales to be float32 without rounding",
    ),
}


@pytest.mark.parametrize(("published", "change", "match"), TENSORS.values(), ids=TENSORS, indirect=["published"])
def test_tensors_that_do_not_fit_are_refused(published, change, match):
    changed(published, change)
    with pytest.raises(ValueError, match=f"from_pretrained: expected.*(?:{match})"):
        read(published)


@each("gptq", "gptq-32", "compressed-8-bits")
def test_the_format_of_the_files_need_not_be_known(published):
    quantization = PymoeConfig(format="stored")
    model = AutoModelForCausalLM.from_pretrained(published, quantization_config=quantization, dtype=torch.float32)
    bits = {layer.bits for layer in model.modules() if isinstance(layer, QuantizedLinear)}
    (bits,) = bits
    assert_same_bits(logits(model), logits(read(published, bits)), "logits")
    assert quantization.bits is None, "the configuration that was passed stays as it is"


@each("compressed")
@pytest.mark.parametrize("count", [1, None])
def test_an_order_of_minus_one_is_none(published, count):
    """compressed-tensors fills the groups of inputs with -1 until an order is set, and takes one -1 for none."""
    expected = logits(read(published))

    def with_indices(tensors):
        for name in [name for name in tensors if ".experts." in name and name.endswith("_packed")]:
            inputs = int(tensors[name.replace("_packed", "_shape")][1])
            index = torch.zeros(inputs, dtype=torch.int32)
            index[:count] = -1
            tensors[name.replace("_packed", "_g_idx")] = index

    changed(published, with_indices)
    assert_same_bits(logits(read(published)), expected, "logits")


@each("awq", "compressed")
@pytest.mark.filterwarnings("ignore")
def test_a_model_may_have_a_head_that_the_files_lack(published):
    model = AutoModelForSequenceClassification.from_pretrained(
        published, quantization_config=PymoeConfig(4, "affine"), dtype=torch.float32
    )
    assert model.score.weight.isfinite().all()


def test_the_pattern_of_whole_weights_comes_last():
    """Before version 5.23 transformers tries patterns in this order, and this one matches other tensors' names, too."""
    for stored in (affine_files.STORED["awq"](configuration("awq", 4, 128)), fp8_files.STORED):
        assert stored.sources([r"experts.*.up_proj.weight"])[-1] == r"experts.*.up_proj.weight"


@pytest.mark.parametrize(
    ("published", "key", "part"),
    [("gptq", "desc_act", "g_idx"), ("compressed", "actorder", "weight_g_idx")],
    indirect=["published"],
)
def test_files_that_may_have_another_order_must_say_it(published, key, part):
    """Act-order that changes nothing is read; without the groups of the inputs nobody could know that."""
    expected = logits(read(published))
    config = json.loads((published / "config.json").read_text())
    method = config["quantization_config"]
    if key == "desc_act":
        method[key] = True
    else:
        method["config_groups"]["group_0"]["weights"][key] = "group"
    (published / "config.json").write_text(json.dumps(config))
    tensors = load_file(published / FILE)
    for name in [name for name in tensors if name.endswith((".qweight", ".weight_packed"))]:
        path, _, own = name.rpartition(".")
        inputs = 8 * tensors[name].shape[0 if own == "qweight" else 1]
        tensors[f"{path}.{part}"] = (torch.arange(inputs) // 128).int()
    save_file(tensors, published / FILE, metadata={"format": "pt"})
    assert_same_bits(logits(read(published)), expected, "logits")
    changed(published, without(f"{EXPERT}.up_proj.{part}"))
    with pytest.raises(ValueError, match=f"expected the checkpoint to have '{EXPERT}.up_proj.{part}', got none"):
        read(published)


@each("gptq")
def test_a_bias_of_zeros_is_no_bias(published):
    expected = logits(read(published))

    def change(tensors):
        for expert in range(4):
            tensors[f"model.layers.1.mlp.experts.{expert}.down_proj.bias"] = torch.zeros(160, dtype=torch.float16)

    changed(published, change)
    assert_same_bits(logits(read(published)), expected, "logits")


@each("gptq")
def test_a_file_that_is_cut_short_is_refused(published):
    data = (published / FILE).read_bytes()
    (published / FILE).write_bytes(data[:-100])
    with pytest.raises(ValueError, match="expected a whole safetensors file"):
        read(published)


WEIGHTS = configuration("compressed", 4, 128)["config_groups"]["group_0"]
ENTRIES = {
    "bits of GPTQ": ("gptq", {"bits": 3}, "of GPTQ with bits of 4 or 8, got 3"),
    "bits of AWQ": ("awq", {"bits": 8}, "of AWQ with bits of 4, got 8"),
    "gptq_v3": ("gptq", {"checkpoint_format": "gptq_v3"}, "with checkpoint_format 'gptq' or 'gptq_v2', got gptq_v3"),
    "groups": ("gptq", {"group_size": 16}, "of GPTQ with group_size -1 or a multiple of 32, got 16"),
    "no groups": ("awq", {"group_size": None}, "of AWQ with group_size -1 or a multiple of 32, got None"),
    "marlin": ("gptq", {"checkpoint_format": "marlin"}, "with checkpoint_format 'gptq' or 'gptq_v2', got marlin"),
    "old marlin": ("gptq", {"checkpoint_format": None, "is_marlin_format": True}, "'gptq' or 'gptq_v2', got marlin"),
    "gemv": ("awq", {"version": "GEMV"}, "of AWQ with version 'gemm', got gemv"),
    "gemv_fast": ("awq", {"version": "gemv_fast"}, "of AWQ with version 'gemm', got gemv_fast"),
    "llm-awq": ("awq", {"backend": "llm-awq"}, "of AWQ with version 'gemm', got llm-awq"),
    "no zero points": ("awq", {"zero_point": False}, "of AWQ with zero_point, got False"),
    "fp4": (
        "compressed",
        {"format": "nvfp4-pack-quantized"},
        "format 'pack-quantized', got .*nvfp4-pack-quantized",
    ),
    "mixed": ("compressed", {"format": "mixed-precision"}, "format 'pack-quantized'"),
    "sparse": (
        "compressed",
        {"sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}},
        "without sparsity, got sparse-24-bitmask",
    ),
    "rounded keys": ("compressed", {"kv_cache_scheme": {"num_bits": 8}}, "with no kv_cache_scheme"),
    "rotated": ("compressed", {"transform_config": {"config_groups": {"a": {}}}}, "with no transform_config"),
    "rounded rows": (
        "compressed",
        {"config_groups": {"group_0": WEIGHTS | {"input_activations": {"num_bits": 8}}}},
        "with rows that are not quantised, got input_activations",
    ),
    "floating": (
        "compressed",
        {"config_groups": {"group_0": {"weights": WEIGHTS["weights"] | {"type": "float"}}}},
        "with integers for groups or channels, got float for each group",
    ),
    "tensors": (
        "compressed",
        {"config_groups": {"group_0": {"weights": WEIGHTS["weights"] | {"strategy": "tensor"}}}},
        "got int for each tensor",
    ),
    "several": (
        "compressed",
        {"config_groups": {"a": WEIGHTS, "b": {"weights": WEIGHTS["weights"] | {"num_bits": 8}}}},
        "config_groups with the same bits, groups and symmetry",
    ),
    "none": ("compressed", {"config_groups": {}}, "config_groups with the same bits"),
    "bits of a rule": (
        "gptq",
        {"dynamic": {"-:.*gate.*": {}, "+:.*down.*": {"bits": 8}}},
        r"the same bits and group_size for all layers, got \{'bits': 8\} for '\+:.\*down.\*'",
    ),
    "groups of a rule": ("gptq", {"dynamic": {".*down.*": {"group_size": 32}}}, "got {'group_size': 32} for '.*down"),
    "a list of rules": ("gptq", {"dynamic": ["-:.*gate.*"]}, "of GPTQ with an object for dynamic, got "),
    "a number for a rule": ("gptq", {"dynamic": {".*down.*": 8}}, "of GPTQ with an object for .*down.*, got 8"),
    "fractions of bits": ("gptq", {"bits": 4.0}, "of GPTQ with bits of 4 or 8, got 4.0"),
    "text for groups": ("awq", {"group_size": "128"}, "multiple of 32, got 128"),
    "a list of groups": ("compressed", {"config_groups": [WEIGHTS]}, "with an object for config_groups, got"),
    "a list for a group": ("compressed", {"config_groups": {"a": [1]}}, "with an object for a, got"),
    "text for weights": ("compressed", {"config_groups": {"a": {"weights": "int4"}}}, "object for weights, got 'int4'"),
    "text for sparsity": ("compressed", {"sparsity_config": "2:4"}, "with an object for sparsity_config, got '2:4'"),
    "a list of bits": (
        "compressed",
        {"config_groups": {"group_0": {"weights": WEIGHTS["weights"] | {"num_bits": [4]}}}},
        r"with bits of 4 or 8, got \[4\]",
    ),
}


@pytest.mark.parametrize(("kind", "change", "match"), ENTRIES.values(), ids=ENTRIES)
def test_other_layouts_are_refused_by_their_configuration(kind, change, match):
    entries = configuration(kind, 4, 128) | change
    with pytest.raises(ValueError, match=f"from_pretrained: expected a checkpoint .*{match}"):
        STORED[entries["quant_method"]](entries)


def test_rules_that_change_nothing_are_honoured():
    """Layers that are not quantised have a weight in the files, and layers in another order the groups of inputs."""
    entries = configuration("gptq", 4, 128)
    rules = {"-:.*gate.*": {"bits": 8}, "+:.*up.*": {"bits": 4, "sym": False}, ".*down.*": {}}
    assert STORED["gptq"](entries | {"dynamic": rules}) == STORED["gptq"](entries)
    of_order = STORED["gptq"](entries | {"dynamic": {".*down.*": {"desc_act": True}}})
    assert of_order == STORED["gptq"](entries | {"desc_act": True})
    assert of_order.ordered


@pytest.mark.parametrize("method", [["gptq"], {"gptq": 1}, 4])
def test_a_method_that_is_no_text_is_left_to_transformers(method):
    assert configuration_for({"quant_method": method}, PymoeConfig(format="stored")) is None


@pytest.mark.parametrize("kind", PACKERS)
def test_a_single_row_of_any_number_of_inputs(kind):
    """Its scales follow the codes, at a byte that is no multiple of 4."""
    outputs, inputs = (8, 33) if kind == "awq" else (1, 40)
    q = numpy.arange(outputs * inputs).reshape(outputs, inputs) % 16
    z, s = numpy.full((outputs, 1), 8), torch.rand(outputs, 1).half()
    stored = STORED[configuration(kind, 4, -1)["quant_method"]](configuration(kind, 4, -1))
    parts = PACKERS[kind](q, z, s, 4, -1)
    if kind.startswith("compressed"):
        q, inputs = q[:, :33], 33
        parts |= {"weight_shape": torch.tensor([1, 33])}
    layer = QuantizedLinear(inputs, 1, 1, bits=4, format="affine")
    layer.packed = stored.packed_weight("weight", stored.joined(parts)[None, :1], layer)
    assert torch.equal(ops.dequantize_weight(layer.weight)[0], dequantised(q, z, s, inputs)[:1])


@pytest.mark.parametrize(
    ("published", "bits", "expected"),
    [("gptq", 8, 4), ("gptq-32", 4, 8), ("compressed-8-bits", 4, 8)],
    indirect=["published"],
)
def test_another_format_is_refused(published, bits, expected):
    message = rf"expected PymoeConfig\(bits={expected}, format='affine'\) for a checkpoint in .*, which is not rounded"
    with pytest.raises(ValueError, match=message):
        read(published, bits)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(published, quantization_config=PymoeConfig(bits))
