"""PymoeConfig: a checkpoint read in 8 or 4 bits is load and quantise; what is saved comes back; others are refused."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from specs.quantized_weight import FORMATS, STORED, in_format
from test_models import EVERY_MODEL, models
from torch.utils._python_dispatch import TorchDispatchMode

from pymoe.integrations.transformers import PymoeConfig
from pymoe.integrations.transformers.quantized import stacked_weights
from pymoe.nn import MoE, QuantizedDenseLinear, QuantizedLinear, prefetch_experts, quantize_experts, quantize_linears

pytestmark = pytest.mark.only_on("cpu")


def checkpoint(name, folder, dtype=torch.float32, **options):
    """Write a tiny model as the hub has it, in several files; return its class."""
    model = tiny_models.build(name).to(dtype)
    model.save_pretrained(folder, max_shard_size="200KB", **options)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return type(model)


def quantised(cls, folder, bits, format="int", **options):
    """Return what a user had before: the whole model, whose experts are then quantised."""
    model = cls.from_pretrained(folder, experts_implementation="pymoe", **options)
    quantize_experts(model, bits, format)
    return model


def everything(model):
    """Return all tensors of a model by name, also buffers that no file holds."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def logits(model):
    """Return what a copy computes: torch's products may round otherwise where tensors are mapped from files."""
    return tiny_models_output(copy.deepcopy(model))


def assert_dense_layers_are_rounded(model, plain):
    """Compare dense layers with those of the model in a folder, rounded to 8 bits; return how many there are."""
    expected = transformers.AutoModelForCausalLM.from_pretrained(plain, experts_implementation="pymoe").eval()
    quantize_linears(expected, 8)
    layers = {name: one for name, one in expected.named_modules() if isinstance(one, QuantizedDenseLinear)}
    for name, layer in layers.items():
        assert_same_bits(model.get_submodule(name).packed, layer.packed, name)
    return len(layers)


@torch.no_grad()
def tiny_models_output(model):
    output = model(input_ids=tiny_models.tokens(), use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def assert_same_model(got, expected):
    tensors = everything(expected)
    assert everything(got).keys() == tensors.keys()
    for name, tensor in everything(got).items():
        assert tensor.device.type == "cpu"
        assert_same_bits(tensor.detach(), tensors[name].detach(), name)
    assert any(name.endswith(".packed") for name in tensors)
    assert_same_bits(logits(got), logits(expected), "logits")
    assert not got.training


@pytest.mark.thinned(usual=12)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", models(EVERY_MODEL))
def test_a_checkpoint_is_read_in_few_bits_and_comes_back(name, form, tmp_path):
    cls = checkpoint(name, tmp_path / "whole")
    expected = quantised(cls, tmp_path / "whole", *form)
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(*form))
    assert_same_model(read, expected)
    assert {layer.format for layer in read.modules() if isinstance(layer, QuantizedLinear)} == {form[1]}
    read.save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    again = cls.from_pretrained(tmp_path / "packed")
    assert_same_model(again, expected)
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(cls.from_pretrained(tmp_path / "twice"), expected)
    expected.save_pretrained(tmp_path / "in memory")
    assert_same_model(cls.from_pretrained(tmp_path / "in memory"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_model_may_be_another_than_the_files(saved, dtype, tmp_path):
    cls = checkpoint("mixtral", tmp_path, saved)
    read = cls.from_pretrained(tmp_path, dtype=dtype, quantization_config=PymoeConfig(4))
    assert read.dtype == dtype
    assert_same_model(read, quantised(cls, tmp_path, 4, dtype=dtype))


def test_experts_that_a_checkpoint_has_stacked_are_read(tmp_path):
    """Such files are written with save_original_format=False, and newer checkpoints look like them."""
    cls = checkpoint("mixtral", tmp_path, save_original_format=False)
    read = cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(4))
    assert_same_model(read, quantised(cls, tmp_path, 4))


def test_a_base_model_and_one_with_a_head_read_each_others_files(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4))
    read.save_pretrained(tmp_path / "packed")
    base = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert_same_model(base, read.model)
    read.model.save_pretrained(tmp_path / "base")
    assert_same_model(transformers.AutoModel.from_pretrained(tmp_path / "base"), read.model)
    headed = cls.from_pretrained(tmp_path / "base")  # with a new head
    assert_same_model(headed.model, read.model)


def test_a_folder_holds_what_save_pretrained_writes_and_nothing_else(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    read = cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(bits=4))
    read.save_pretrained(tmp_path / "one")
    assert {file.name for file in (tmp_path / "one").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "pymoe", "bits": 4, "format": "int", "version": 2}
    read.save_pretrained(tmp_path / "several", max_shard_size="100KB")
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(tmp_path / "one" / "model.safetensors", framework="pt") as file:
        assert set(index) == set(file.keys())
    for file in (tmp_path / "whole").glob("*.safetensors"):
        with safe_open(file, framework="pt") as whole:
            assert all(name in index for name in whole.keys() if "experts" not in name)  # noqa: SIM118
    assert set(index.values()) == {file.name for file in (tmp_path / "several").glob("*.safetensors")}


def test_a_model_may_replace_the_files_that_it_is_mapped_from(packed):
    cls, folder = packed
    model = cls.from_pretrained(folder)
    expected = copy.deepcopy(model)
    assert str(folder / "model.safetensors") in Path("/proc/self/maps").read_text()
    model.save_pretrained(folder)
    assert_same_model(model, expected)
    assert_same_model(cls.from_pretrained(folder), expected)


class Layouts(TorchDispatchMode):
    """Collects what calls of experts pass on how weights are laid out."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.pymoe.apply_quantized_experts.default:
            self.found.append(args[7])
        return func(*args, **(kwargs or {}))


def test_experts_of_a_mapped_model_are_prefetched(packed):
    cls, folder = packed
    model = cls.from_pretrained(folder)
    expected = tiny_models_output(model)
    weights = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    assert prefetch_experts(model) == sum(layer.packed.nbytes for layer in weights) > 0
    with Layouts() as layouts:
        assert_same_bits(tiny_models_output(model), expected)
    assert [layout[4:] for layout in layouts.found] == [[1]] * (len(weights) // 2)
    prefetch_experts(model, enabled=False)
    with Layouts() as layouts:
        assert_same_bits(tiny_models_output(model), expected)
    assert [layout[4:] for layout in layouts.found] == [[]] * (len(weights) // 2)


def test_it_generates_and_has_gradients(tmp_path):
    cls = checkpoint("mixtral", tmp_path)
    read = cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(8))
    expected = quantised(cls, tmp_path, 8)
    ids = tiny_models.tokens()

    def generated(model):
        return copy.deepcopy(model).generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)

    assert torch.equal(generated(read), generated(expected))
    read(ids).logits.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in read.parameters())
    assert read.is_quantized
    assert read.hf_quantizer.is_trainable is True


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_another_implementation_is_refused(implementation, tmp_path):
    cls = checkpoint("mixtral", tmp_path)
    for options in ({"quantization_config": PymoeConfig(8)}, {}):
        if not options:
            packed = cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(8))
            packed.save_pretrained(tmp_path / "packed")
        folder = tmp_path if options else tmp_path / "packed"
        with pytest.raises(ValueError, match=f"experts_implementation='pymoe' .* got '{implementation}'"):
            cls.from_pretrained(folder, experts_implementation=implementation, **options)
        assert cls.from_pretrained(folder, experts_implementation="pymoe", **options).dtype == torch.float32


def test_a_model_without_such_experts_is_refused(tmp_path):
    for name in ("llama4", "dbrx"):  # outside of transformers' interface
        model = tiny_models.build(name)
        model.save_pretrained(tmp_path / name)
        with pytest.raises(ValueError, match=f"experts that pymoe quantises, got {type(model).__name__}"):
            type(model).from_pretrained(tmp_path / name, quantization_config=PymoeConfig(8))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bits": 5}, ValueError, "bits must be 8 or 4, got 5"),
        ({"bits": 8, "format": "mxfp"}, ValueError, "bits must be 4 for format 'mxfp', got 8"),
        (
            {"bits": 4, "format": "fp8"},
            ValueError,
            "format must be 'int', .*'symmetric' or 'stored', got 'fp8': format='stored' keeps",
        ),
        ({"bits": 4, "format": None}, TypeError, "format must be a str, got NoneType"),
        ({"bits": "4"}, TypeError, "bits must be an int"),
        ({"version": 3}, ValueError, "expected files of version 2, got version 3; install a pymoe that has it"),
        ({"bits": 4, "format": "later", "version": 3}, ValueError, "got version 3; install a pymoe that has it"),
        (
            {"bits": 4, "version": 1},
            ValueError,
            "got version 1, whose integers of 4 bits have another layout: quantise",
        ),
        ({"linear_bits": 4, "version": 1}, ValueError, "of version 2, got version 1, whose integers of 4 bits"),
        ({"group": 32}, ValueError, r"expected bits, format, linear_bits and version, got \{'group': 32\}"),
        ({"quant_method": "awq"}, ValueError, "got 'awq'"),
    ],
)
def test_other_configurations_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        PymoeConfig(**arguments)


def test_configurations_of_version_1_are_read_unless_they_have_integers_of_4_bits():
    for arguments in ({"bits": 8}, {"bits": 4, "format": "mxfp"}, {"bits": 4, "format": "mxfp", "linear_bits": 8}):
        assert PymoeConfig(**arguments, version=1).to_dict() == PymoeConfig(**arguments).to_dict()


def edited(source, folder, edit):
    """Copy a packed folder whose only file of weights, a dict of tensors, goes through ``edit``."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def packed(tmp_path):
    """Return a class and a folder that holds a packed model of this class in one file."""
    cls = checkpoint("qwen3_moe", tmp_path / "whole")
    cls.from_pretrained(tmp_path / "whole", quantization_config=PymoeConfig(4)).save_pretrained(tmp_path / "packed")
    return cls, tmp_path / "packed"


DOWN = "model.layers.1.mlp.experts.down_proj"


def resize(tensors):
    """Change the sizes but not the packed shape: inputs and outputs are both padded to 64."""
    assert tensors[f"{DOWN}.sizes"].tolist() == [4, 64, 40]
    tensors[f"{DOWN}.sizes"] = torch.tensor([4, 64, 41])


EDITS = {
    "a missing weight": (lambda t: [t.pop(DOWN), t.pop(f"{DOWN}.sizes")], f"to have '{DOWN}', got none"),
    "missing bytes": (lambda t: t.pop(DOWN), rf"{DOWN}.*, got \[4, 64, 40\]$"),
    "missing sizes": (lambda t: t.pop(f"{DOWN}.sizes"), rf"{DOWN}.*, got \[8, 1, 3136\]$"),
    "other sizes": (resize, rf"{DOWN}.* \[4, 64, 40, 8, 1, 3136\], got \[4, 64, 41, 8, 1, 3136\]"),
    "fewer experts": (lambda t: t.update({DOWN: t[DOWN][:7].clone()}), rf"{DOWN}.*, got \[4, 64, 40, 7, 1, 3136\]"),
    "another dtype": (lambda t: t.update({DOWN: t[DOWN].float()}), f"{DOWN}"),
    "two missing": (lambda t: [t.pop(n) for n in list(t) if "down_proj" in n and "experts" in n], r"\(and 1 more\)"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_packed_file_that_does_not_fit_is_refused(edit, packed, tmp_path):
    """Transformers itself would make random experts, and write a table into its log."""
    cls, folder = packed
    change, words = EDITS[edit]
    wrong = edited(folder, tmp_path / "edited", change)
    with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}") as raised:
        cls.from_pretrained(wrong)
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=words):
        cls.from_pretrained(wrong, ignore_mismatched_sizes=True)


def test_a_folder_from_before_there_were_formats_holds_integers(packed):
    cls, folder = packed
    expected = cls.from_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["format"]
    file.write_text(json.dumps(config))
    assert_same_model(cls.from_pretrained(folder), expected)


def test_a_configuration_that_does_not_fit_is_refused(packed):
    cls, folder = packed
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for entry, change, words in (
        ("bits", 8, r"expected .* \[8, 64, 40, .* got \[4, 64, 40"),
        ("format", "mxfp", r"expected .* \[14, 64, 40, .* got \[4, 64, 40"),
        (
            "format",
            "fp8",
            "PymoeConfig: format must be 'int', .*'symmetric' or 'stored', got 'fp8': format='stored' keeps",
        ),
        ("version", 3, "files of version 2, got version 3"),
        ("version", 1, "files of version 2, got version 1, whose integers of 4 bits have another layout"),
        ("groups", 16, "expected bits, format, linear_bits and version, got"),
    ):
        changed = copy.deepcopy(config)
        changed["quantization_config"][entry] = change
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=words):
            cls.from_pretrained(folder)
    file.write_text(json.dumps(config | {"moe_intermediate_size": 48}))
    with pytest.raises(ValueError, match=r"from_pretrained: expected .* got \[4, 64, 40"):
        cls.from_pretrained(folder)


@pytest.mark.parametrize("cut", [1, 100])
def test_a_file_that_is_cut_short_is_refused(cut, packed):
    cls, folder = packed
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=f"expected a whole safetensors file, got {file}"):
        cls.from_pretrained(folder)


def test_transformers_without_pymoe_raises(packed, monkeypatch):
    """Without pymoe, transformers did not know the folder's quantisation method, and created random experts."""
    from transformers.quantizers import auto

    cls, folder = packed
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "pymoe")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "pymoe")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        cls.from_pretrained(folder)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    model = tiny_models.build("gpt_oss")
    model.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    edits = {
        f"to have '{name}', got none": lambda t: t.pop(name),
        rf"packed, got '{name}': expected the shape \(8, .*\), got \(7, ": lambda t: t.update({name: t[name][1:]}),
        rf"packed, got '{name}': .*must be finite": lambda t: t[name][3, 2, 1].fill_(float("nan")),
    }
    for number, (words, edit) in enumerate(edits.items()):
        wrong = edited(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{number}"), edit)
        with pytest.raises(ValueError, match=f"^from_pretrained: expected .*{words}"):
            type(model).from_pretrained(wrong, quantization_config=PymoeConfig(8))


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
def test_a_format_to_which_no_weights_are_rounded_is_refused(form, tmp_path):
    cls = checkpoint("mixtral", tmp_path)
    with pytest.raises(ValueError, match=rf"^from_pretrained: format must be one to which .* rounded, got {form[1]!r}"):
        cls.from_pretrained(tmp_path, quantization_config=PymoeConfig(*form))


@torch.no_grad()
@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
def test_a_model_with_experts_that_others_rounded_comes_back(form, tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", experts_implementation="pymoe")
    for _, experts in [*model.named_modules()]:
        for name, weight in (stacked_weights(experts) or {}).items():
            layer = QuantizedLinear.from_quantized(in_format(weight.detach(), *form)).eval()
            delattr(experts, name)
            setattr(experts, name, layer)
    model.save_pretrained(tmp_path / "packed")
    got = cls.from_pretrained(tmp_path / "packed")
    assert {layer.format for layer in got.modules() if isinstance(layer, QuantizedLinear)} == {form[1]}
    assert_same_model(got, model)


def test_experts_without_their_bias_are_refused(tmp_path):
    """Transformers put zeros in the place of a bias that the files lack, and wrote a line into its log."""
    model = tiny_models.build("gpt_oss")
    model.save_pretrained(tmp_path / "whole")
    config = PymoeConfig(8)
    type(model).from_pretrained(tmp_path / "whole", quantization_config=config).save_pretrained(tmp_path / "packed")
    for folder, options in (("whole", {"quantization_config": config}), ("packed", {})):
        wrong = edited(tmp_path / folder, tmp_path / f"{folder}, edited", lambda t: t.pop(f"{DOWN}_bias"))
        with pytest.raises(ValueError, match=f"^from_pretrained: expected the checkpoint to have '{DOWN}_bias', got"):
            type(model).from_pretrained(wrong, **options)


def test_one_expert_too_few_is_refused(tmp_path):
    model = tiny_models.build("mixtral")
    model.save_pretrained(tmp_path)

    def edit(tensors):
        for name in [name for name in tensors if ".layers.1." in name and "experts.7.w2" in name]:
            tensors.pop(name)

    wrong = edited(tmp_path, tmp_path.with_name(f"{tmp_path.name}-edited"), edit)
    with pytest.raises(ValueError, match=r"got 'model.layers.1.mlp.experts.down_proj': expected the shape \(8, "):
        type(model).from_pretrained(wrong, quantization_config=PymoeConfig(8))


def save_by_trainer(model, folder):
    try:
        arguments = transformers.TrainingArguments(output_dir=str(folder), report_to=[])
    except ImportError:
        pytest.skip("transformers.Trainer needs accelerate")
    transformers.Trainer(model=model, args=arguments).save_model(str(folder))


SAVES = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "with a state": lambda model, folder: model.save_pretrained(folder, state_dict=model.state_dict()),
    "its own format": lambda model, folder: model.save_pretrained(folder, save_original_format=False),
    "Trainer": save_by_trainer,
}


@pytest.mark.parametrize("save", SAVES)
def test_every_way_to_save_writes_what_can_be_read(save, tmp_path):
    """Once they wrote keys that nothing read, and the model that came back had random experts; later they raised."""
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = quantised(cls, tmp_path / "whole", 8)
    SAVES[save](model, tmp_path / "packed")
    assert_same_model(cls.from_pretrained(tmp_path / "packed"), model)


def test_ranks_without_a_state_save_nothing_and_a_state_without_weights_is_refused(tmp_path):
    """FSDP gathers the state of a model on the first rank, and leaves the others an empty one."""
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = quantised(cls, tmp_path / "whole", 8)
    model.save_pretrained(tmp_path / "packed", state_dict={}, is_main_process=False)
    assert not list((tmp_path / "packed").glob("*.safetensors"))
    state = model.state_dict()
    (name, *_) = [name for name in state if name.endswith(".packed")]
    del state[name]
    with pytest.raises(ValueError, match=f"save_pretrained: expected a state_dict with '{name}', got none"):
        model.save_pretrained(tmp_path / "packed", state_dict=state)


def test_a_quantised_model_that_was_pickled_is_saved(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = quantised(cls, tmp_path / "whole", 8)
    torch.save(model, tmp_path / "pickled")
    loaded = torch.load(tmp_path / "pickled", weights_only=False)
    loaded.save_pretrained(tmp_path / "packed")
    assert_same_model(cls.from_pretrained(tmp_path / "packed"), model)


def assert_not_saved(prepare, tmp_path):
    """Save a model that ``prepare`` has changed, which must raise the error whose text ``prepare`` returns."""
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", experts_implementation="pymoe")
    words = prepare(model)
    with pytest.raises(ValueError, match=f"save_pretrained: expected a model .*{words}"):
        model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def refuse_others(model):
    model.extra = MoE(8, 8, 2, 1, renormalize=False).eval()
    quantize_experts(model, 8)
    return "experts of transformers alone, got 'extra.experts.w_in'"


def refuse_two_methods(model):
    quantize_experts(model, 8)
    base = transformers.quantizers.HfQuantizer
    kind = type("Other", (base,), {"is_serializable": lambda _: True, "is_trainable": False})
    model.hf_quantizer = kind(None)
    return "quantised by pymoe alone, got one of Other, too"


def refuse_after(model):
    quantize_experts(model, 8)
    model.save_pretrained(model.name_or_path + "-first")
    experts = model.model.layers[0].mlp.experts
    layer = experts.gate_up_proj
    del experts.gate_up_proj
    experts.gate_up_proj = torch.nn.Parameter(torch.zeros(8, layer.output_features, layer.input_features))
    return "both quantised or both not, got 'model.layers.0.mlp.experts.gate_up_proj', which is not"


@pytest.mark.parametrize("prepare", [refuse_others, refuse_two_methods, refuse_after])
def test_what_files_cannot_say_is_not_saved(prepare, tmp_path):
    assert_not_saved(prepare, tmp_path)


@pytest.mark.parametrize("second", [(8, "int"), (4, "mxfp"), (8, "fp"), None])
def test_layers_of_several_formats_are_saved(second, tmp_path):
    """The configuration says "stored", and the sizes of each weight its format; one without sizes is not packed."""
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", experts_implementation="pymoe")
    quantize_experts(model.model.layers[0], 4)
    if second:
        quantize_experts(model.model.layers[1], *second)
    model.save_pretrained(tmp_path / "packed")
    said = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "pymoe", "format": "stored", "version": 2}
    again = cls.from_pretrained(tmp_path / "packed")
    assert_same_model(again, model)
    quantize = {name: one for name, one in again.named_modules() if isinstance(one, QuantizedLinear)}
    assert {(one.bits, one.format) for one in quantize.values()} == {(4, "int")} | ({second} if second else set())


def test_models_that_are_not_quantised_are_saved_as_ever(tmp_path):
    cls = checkpoint("mixtral", tmp_path / "whole")
    model = cls.from_pretrained(tmp_path / "whole", experts_implementation="pymoe")
    model.save_pretrained(tmp_path / "again")
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    before, after = ({}, {})
    for folder, tensors in (("whole", before), ("again", after)):
        for file in (tmp_path / folder).glob("*.safetensors"):
            tensors.update(load_file(file))
    assert before.keys() == after.keys()


def test_a_transformers_that_cannot_read_packed_weights_is_refused(monkeypatch):
    """Before 5.21 a quantizer does not see the model: from_pretrained ended in a TypeError about an argument."""
    older = lambda self, weight_conversions: weight_conversions  # noqa: E731
    monkeypatch.setattr(transformers.quantizers.HfQuantizer, "update_weight_conversions", older)
    with pytest.raises(ImportError, match=r"PymoeConfig: transformers must be 5\.21 or newer, got 5"):
        PymoeConfig(bits=4)
