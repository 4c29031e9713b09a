"""save_quantized and load_quantized: a layer comes back from its file with the same bits, or the file is refused."""

import json

import pytest
import torch
from moe_layers import OPTIONS, SCORED_BEFORE, make_layer, quantize_layer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from specs.quantized_weight import EVERY_FORMAT

from pymoe.nn import MoE, QuantizedExperts, load_quantized, save_quantized
from pymoe.ops import ClampedSwiglu

pytestmark = pytest.mark.only_on("cpu")
CLAMPED = {"clamped": {"activation": ClampedSwiglu(0.25, alpha=1.702, up_offset=1.0, interleaved=True)}}
EVERY = OPTIONS | SCORED_BEFORE | CLAMPED


def quantised(bits=4, format="int", dtype=torch.float32, **options):
    moe = make_layer(hidden_size=40, ffn_size=36, dtype=dtype, **options).eval()
    quantize_layer(moe, bits, format)
    return moe


def described(moe):
    """Return everything that a layer reports about itself and its parts."""
    return {name: (type(part), part.extra_repr(), part.training) for name, part in moe.named_modules()} | {
        "": repr(moe)
    }


@torch.no_grad()
@pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY.keys())
def test_a_layer_comes_back(options, form, tmp_path):
    moe = quantised(*form, **options)
    moe.router.row_invariant = True  # torch's products may round differently with weights mapped from a file
    if moe.router.expert_bias is not None:
        moe.router.expert_bias.uniform_(-0.1, 0.1)
    save_quantized(moe, tmp_path / "layer.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["layer.safetensors"]
    loaded = load_quantized(tmp_path / "layer.safetensors")
    assert described(loaded) == described(moe)
    assert repr(loaded) == repr(moe)
    state = moe.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    for name, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, state[name], name)
    for attribute in ("capacity_factor", "top_k", "num_experts", "hidden_size", "backend"):
        assert getattr(loaded, attribute) == getattr(moe, attribute)
    x = torch.randn(30, 40)
    if moe.shared is None:
        assert_same_bits(loaded(x), moe(x), "y")
    torch.testing.assert_close(loaded(x), moe(x))
    assert_same_bits(loaded.stats.load, moe.stats.load, "load")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_come_back_and_may_replace_the_file_they_are_mapped_from(dtype, tmp_path):
    moe = quantised(dtype=dtype, bias=True)
    moe.router.row_invariant = True
    x = torch.randn(9, 40).to(dtype)
    expected = moe(x)
    save_quantized(moe, tmp_path / "layer")
    for _ in range(2):
        loaded = load_quantized(tmp_path / "layer")
        assert_same_bits(loaded(x), expected, "y")
        save_quantized(loaded, tmp_path / "layer")
        assert_same_bits(loaded(x), expected, "y of the replaced file")


def hooked(moe):
    moe.experts.register_forward_hook(lambda *_: None)


def replaced(moe):
    moe.router = torch.nn.Identity()


def patched(moe):
    moe.forward = lambda x: x


CHANGES = [
    (hooked, "got experts with hooks"),
    (replaced, "got router with another class"),
    (patched, "got the layer with a forward of its own"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_a_file_cannot_hold_is_refused(change, words, tmp_path):
    moe = quantised()
    change(moe)
    with pytest.raises(ValueError, match=f"save_quantized: layer must be as it was made, {words}"):
        save_quantized(moe, tmp_path / "layer")
    assert not list(tmp_path.iterdir())


def test_a_layer_with_weights_of_two_formats_is_refused(tmp_path):
    """The layer's file would name one format, and could not be loaded."""
    moe = quantised()
    moe.experts.w_out = quantised(4, "mxfp").experts.w_out
    with pytest.raises(ValueError, match=r"of one format and as many bits, got \[\('int', 4\), \('mxfp', 4\)\]"):
        save_quantized(moe, tmp_path / "layer")
    assert not list(tmp_path.iterdir())


def test_other_layers_are_refused(tmp_path):
    class Mine(MoE):
        pass

    for layer in (Mine(8, 8, 2, 2), QuantizedExperts(8, 8, 2), None):
        with pytest.raises(TypeError, match=f"save_quantized: layer must be a MoE, got {type(layer).__name__}"):
            save_quantized(layer, tmp_path / "layer")
    with pytest.raises(ValueError, match=r"got Experts; call quantize_experts\(layer\) first"):
        save_quantized(MoE(8, 8, 2, 2), tmp_path / "layer")


def edit(path, change=None, **described):
    """Write the file again with other tensors, or with another description."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["pymoe"])
    if change is not None:
        change(tensors)
    save_file(tensors, path, metadata={"pymoe": json.dumps(metadata | described)})


EDITS = {
    "version": ({"version": 3}, "of version 2, got .*layer with 3$"),
    "old integers": (
        {"version": 1},
        "of version 2, got .*layer with 1, whose integers of 4 bits have another layout: ",
    ),
    "bits": ({"bits": 8}, "the tensors that its options need, got .*layer: .*size mismatch"),
    "another format": ({"format": "mxfp"}, "its options need, got .*layer: .*size mismatch"),
    "unknown format": (
        {"format": "fp8"},
        "a known format, got .*layer: .*format must be 'int', 'mxfp', 'fp', 'affine' or 'symmetric', got 'fp8'",
    ),
    "no format": ({"format": None}, "a known format, got .*layer: .*format must be a str, got NoneType"),
    "bits of another format": ({"format": "mxfp", "bits": 8}, "bits must be 4 for format 'mxfp', got 8"),
    "missing": ({"change": lambda t: t.pop("experts.w_in.packed")}, "need, got .*Missing key.*experts.w_in.packed"),
    "more": ({"change": lambda t: t.update(x=torch.zeros(1))}, "need, got .*Unexpected key"),
    "sizes": ({"change": lambda t: t["experts.w_in.sizes"].add_(1)}, "need, got .*size mismatch for experts.w_in"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_file_that_does_not_fit_is_refused(name, tmp_path):
    path = tmp_path / "layer"
    save_quantized(quantised(), path)
    changes, words = EDITS[name]
    edit(path, **changes)
    with pytest.raises(ValueError, match=f"^load_quantized: expected .*{words}") as raised:
        load_quantized(path)
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_a_file_from_before_there_were_formats_holds_integers(tmp_path):
    moe = quantised(8)
    moe.router.row_invariant = True
    path = tmp_path / "layer"
    save_quantized(moe, path)
    with safe_open(path, framework="pt") as file:
        metadata = json.loads(file.metadata()["pymoe"])
    assert metadata.pop("format") == "int"
    metadata["version"] = 1
    save_file(load_file(path), path, metadata={"pymoe": json.dumps(metadata)})
    x = torch.randn(9, 40)
    assert_same_bits(load_quantized(path)(x), moe(x), "y")


@torch.no_grad()
@pytest.mark.parametrize("form", [(8, "int"), (4, "mxfp")], ids=str)
def test_files_of_version_1_are_read_unless_they_hold_integers_of_4_bits(form, tmp_path):
    moe = quantised(*form)
    moe.router.row_invariant = True
    path = tmp_path / "layer"
    save_quantized(moe, path)
    edit(path, version=1)
    x = torch.randn(9, 40)
    assert_same_bits(load_quantized(path)(x), moe(x), "y")
    save_quantized(load_quantized(path), path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["pymoe"])["version"] == 2


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "layer"
    with pytest.raises(OSError, match="layer"):
        load_quantized(path)
    save_quantized(quantised(), path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"load_quantized: expected a whole file of save_quantized, got .*layer"):
        load_quantized(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match=r"load_quantized: expected a whole file of save_quantized, got .*layer"):
        load_quantized(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"expected a file of save_quantized of version 2, got .*layer with none"):
        load_quantized(path)
