"""Dense layers of GGUF files keep the codes and scales of their types, also where the model has another order of rows.

The files are made up, as in ``test_gguf_files.py``.
"""

import numpy
import pytest
import torch
import transformers
from test_quantizer import assert_same_model, everything, logits
from transformers import AutoModelForCausalLM

from pymoe import ops
from pymoe.integrations.transformers import PymoeConfig, gguf_blocks
from pymoe.integrations.transformers.gguf_files import dense_weight
from pymoe.nn import QuantizedDenseLinear, quantize_linears
from pymoe.quantize import main

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")  # transformers asks for it
import gguf_models  # noqa: E402
from test_gguf_files import Rows, assert_holds, distance, read, rewritten  # noqa: E402

pytestmark = pytest.mark.only_on("cpu")

BITS = {
    ("int", 4): 4.5 + 8 / 256,
    ("mxfp", 4): 4.25,
    ("affine", 8): 10,
    ("affine", 2): 6,
    ("symmetric", 8): 10,
}
"""Bits of a weight of 256 inputs, as the documentation has them; at 4 bits, a row has a byte more."""
MIXED = {
    "attn_q": "Q4_K",
    "attn_k": "Q6_K",
    "attn_v": "Q8_0",
    "attn_output": "IQ3_S",
    "ffn_gate_shexp": "Q2_K",
    "ffn_up_shexp": "BF16",
    "ffn_down_shexp": "MXFP4",
    "ffn_gate_inp": "Q8_0",
    "token_embd": "Q4_K",
    "output": "Q5_K",
}


def write(path, architecture, dense, **sizes):
    """Write a model all of whose matrices have 256 inputs, as many as the largest blocks."""
    sizes = {"num_hidden_layers": 1, "shared_expert_intermediate_size": 256} | sizes
    return gguf_models.write(path, architecture, "Q4_K", dense, **sizes)


def mixed(name):
    return MIXED[name.removesuffix(".weight").split(".")[-1]]


def dense_layers(model):
    return {name: one for name, one in model.named_modules() if isinstance(one, QuantizedDenseLinear)}


def paths(architecture, layers=1):
    own = [f"self_attn.{part}_proj" for part in "qkvo"]
    if architecture == "qwen2moe":
        own += [f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    return {f"model.layers.{number}.{one}" for number in range(layers) for one in own} | {"lm_head"}


@pytest.mark.thinned(usual=16)
@pytest.mark.parametrize("architecture", gguf_models.CLASSES)
@pytest.mark.parametrize("name", sorted(gguf_blocks.KEPT))
def test_every_type_is_kept_in_every_architecture(name, architecture, tmp_path):
    """Embeddings are widened, and no bytes stay of the widened layers."""
    config, expected, _ = write(tmp_path / "x.gguf", architecture, name)
    model = read(tmp_path / "x.gguf", config)
    layers = dense_layers(model)
    assert layers.keys() == paths(architecture)
    assert {(layer.format, layer.bits) for layer in layers.values()} == {gguf_blocks.KEPT[name]}
    assert_holds(model, expected)
    assert distance(logits(model), logits(expected)) < 1e-3, "rows are rounded to integers of 16 bits"
    own = {f"{path}.{ending}" for path in layers for ending in ("weight", "packed")}
    wide, packed = (
        sum(tensor.nbytes for one, tensor in everything(each).items() if one in own) for each in (expected, model)
    )
    assert packed == wide / 32 * BITS[gguf_blocks.KEPT[name]]


@pytest.mark.parametrize("architecture", ["qwen2moe", "gpt-oss"])
def test_a_model_with_layers_of_several_types_is_saved_and_mapped(architecture, tmp_path):
    """Those without a format, and routers whatever their type, take the model's dtype."""
    path = tmp_path / "in" / "x.gguf"
    path.parent.mkdir()
    config, expected, _ = write(path, architecture, mixed, num_hidden_layers=2)
    config.save_pretrained(path.parent)
    model = read(path, config)
    assert_holds(model, expected)
    widened = {one for one in paths(architecture, 2) if one.endswith(("o_proj", "up_proj"))}
    assert dense_layers(model).keys() == paths(architecture, 2) - widened
    assert len({(layer.format, layer.bits) for layer in dense_layers(model).values()}) == (
        5 if architecture == "qwen2moe" else 3
    )
    model.save_pretrained(tmp_path / "packed", max_shard_size="500KB")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)
    base = transformers.AutoModel.from_pretrained(tmp_path / "packed")
    assert_same_model(base, model.model)
    assert main([str(path), str(tmp_path / "out")]) == 0
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)


def test_few_rows_at_a_time_are_floating_point(tmp_path, monkeypatch):
    """A head has a row for each token of the vocabulary, and the popular Q4_K_M has it in Q6_K."""
    config, expected, _ = write(
        tmp_path / "x.gguf", "qwen3moe", lambda name: "Q6_K" if name == "output.weight" else "F32", vocab_size=2500
    )
    rows = []
    original = gguf.dequantize

    def dequantize(data, kind):
        rows.append(len(data) if kind.name == "Q6_K" else 0)
        return original(data, kind)

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    model = read(tmp_path / "x.gguf", config)
    monkeypatch.undo()
    assert max(rows) == gguf_blocks.ROWS
    assert sum(rows) == 2 * 2500
    assert_holds(model, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_layers_are_rounded_on_request(dtype, tmp_path):
    config, wide, _ = write(tmp_path / "x.gguf", "qwen2moe", "Q8_0", num_hidden_layers=2)
    model = read(tmp_path / "x.gguf", config, PymoeConfig(format="stored", linear_bits=8), dtype=dtype)
    expected = read(tmp_path / "x.gguf", config, dtype=dtype)
    quantize_linears(wide.to(dtype), 8)
    for name, layer in wide.named_modules():
        if isinstance(layer, QuantizedDenseLinear):
            expected.set_submodule(name, layer)
    assert sum(isinstance(one, QuantizedDenseLinear) for one in model.modules()) == 15, "attention, shared, the head"
    assert_same_model(model, expected)
    model.save_pretrained(tmp_path / "packed")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), expected)


def test_a_tensor_may_have_a_dimension_of_1_more(tmp_path):
    config, expected, _ = write(tmp_path / "x.gguf", "qwen2moe", "Q5_K")

    def change(tensors, _):
        for name in ("blk.0.attn_k.weight", "output.weight"):
            data, kind = tensors[name]
            tensors[name] = data.reshape(128, 1, -1), kind

    assert_holds(read(rewritten(tmp_path / "x.gguf", change, "qwen2moe"), config), expected)


def test_a_head_that_is_tied_to_the_embedding_stays_tied(tmp_path):
    config, expected, _ = write(tmp_path / "x.gguf", "qwen3moe", "Q8_0")
    config.tie_word_embeddings = expected.config.tie_word_embeddings = True
    expected.lm_head.weight = expected.model.embed_tokens.weight
    path = rewritten(tmp_path / "x.gguf", lambda tensors, _: tensors.pop("output.weight") and None)
    model = read(path, config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert dense_layers(model).keys() == paths("qwen3moe") - {"lm_head"}
    assert_holds(model, expected)
    model.save_pretrained(tmp_path / "packed")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "packed"), model)


def with_infinite_scale(tensors, name):
    data, kind = tensors[name]
    data = data.copy()
    data[2, :2] = (0, 0x7C)
    tensors[name] = (data, kind)


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "output.weight"])
def test_a_scale_that_is_not_finite_is_refused(name, tmp_path):
    config, _, _ = write(tmp_path / "x.gguf", "qwen3moe", "Q4_K")
    path = rewritten(tmp_path / "x.gguf", lambda tensors, _: with_infinite_scale(tensors, name))
    with pytest.raises(ValueError, match=rf"^from_pretrained: .*got '{name}' for .*: expected scales .* \[2, 0\]"):
        read(path, config)


def test_a_file_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    config, _, _ = write(path, "qwen3moe", "Q4_K")
    whole = path.read_bytes()
    places = [int(one.data_offset) for one in gguf.GGUFReader(path).tensors]
    for size in [one + change for one in places for change in (0, 1)] + [len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"from_pretrained: expected a whole GGUF file, got .*x\.gguf"):
            read(path, config)


class Matrix(Rows):
    """A tensor of ``GGUFReader`` with random blocks, (N, 256) in the order of torch."""

    def __init__(self, name, outputs):
        super().__init__(name, outputs)
        self.name, self.shape, self.data = "blk.0.attn_k.weight", (256, outputs), self.data[0]

    def widened(self):
        return gguf.dequantize(self.data, self.tensor_type)


def of_llama(values, name):
    """Undo llama.cpp's order of rows of keys, of which two neighbours are a pair of rotary embeddings."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    return LlamaTensorProcessor({"num_attention_heads": 6, "num_key_value_heads": 3}).process(values, name).weights


def columns(size):
    return numpy.roll(numpy.arange(256).reshape(-1, size)[::-1], 1, axis=0).reshape(-1)


ORDERS = {
    "as it is": (lambda values, name: values, 256),
    "rows as llama has them": (of_llama, 256),
    "columns in groups of 32": (lambda values, name: values[:, columns(32)], 32),
    "columns in groups of 16": (lambda values, name: values[:, columns(16)], 16),
    "rows, and columns in groups of 64": (lambda values, name: of_llama(values, name)[:, columns(64)], 64),
    "columns in groups of 8": (lambda values, name: values[:, columns(8)], 8),
    "groups of columns that begin in the middle": (lambda values, name: numpy.roll(values, 16, axis=1), 16),
}
GROUPS = {("int", 4): 256, ("mxfp", 4): 32, ("affine", 8): 32, ("affine", 2): 16, ("symmetric", 8): 16}
"""Columns that share a scale."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", sorted(gguf_blocks.KEPT))
def test_rows_and_groups_of_columns_are_moved_in_few_bits(name, order):
    """Q4_K, whose scales have factors for 256 columns, becomes affine if such columns are parted.

    There are more rows than are packed at a time.
    """
    process, size = ORDERS[order]
    tensor = Matrix(name, 1152)
    weight = dense_weight(tensor, process, (1152, 256))
    format = gguf_blocks.KEPT[name]
    if format == ("int", 4) and size < 256:
        format = ("affine", 8)
    if size < GROUPS[format]:
        assert weight is None
        return
    assert weight.format == format
    layer = QuantizedDenseLinear(256, 1152, bias=False, bits=format[1], format=format[0])
    layer.packed = weight.packed("x", layer)
    expected = process(tensor.widened(), tensor.name)
    assert torch.equal(ops.dequantize_weight(layer.quantized_weight)[0], torch.from_numpy(expected.copy()))


@pytest.mark.parametrize(
    "process",
    [
        lambda values, name: values - 1,
        lambda values, name: values * 2,
        lambda values, name: -values,
        lambda values, name: abs(values),
        lambda values, name: 255 - values,
        lambda values, name: values[:96],
        lambda values, name: values.T,
        lambda values, name: values + numpy.eye(*values.shape, dtype=int),
        lambda values, name: values[numpy.zeros(256, int)],
        lambda values, name: values[:, numpy.zeros(256, int)],
        lambda values, name: numpy.where(numpy.arange(256) % 2, values, values[::-1]),
    ],
)
def test_a_layer_that_is_changed_otherwise_is_widened(process):
    assert dense_weight(Matrix("Q8_0", 256), process, (256, 256)) is None
