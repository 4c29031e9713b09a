"""QuantizedDenseLinear and quantize_linears: a layer that is called as nn.Linear and computes with rounded weights."""

import copy
import pickle
import weakref

import pytest
import torch
from called import Operators, functions_of
from moe_layers import BACKENDS
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from specs.quantized_weight import EVERY_FORMAT, in_format
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize

from pymoe import ops, reference
from pymoe.nn import MoE, QuantizedDenseLinear, QuantizedLinear, quantize_experts, quantize_linears
from pymoe.nn.quantized_dense import is_dense

pytestmark = pytest.mark.only_on("cpu")
BITS = pytest.mark.parametrize("bits", [8, 4])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
SHAPES = [(70,), (1, 70), (5, 70), (2, 3, 70), (2, 1, 3, 70), (0, 70), (2, 0, 70)]


def linear(bias=True, dtype=torch.float32, inputs=70, outputs=130):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).eval()


class Block(nn.Module):
    """Dense layers under the names of transformers, between others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64, bias=False)
        self.other = nn.Linear(64, 64)
        self.router = nn.Module()
        self.router.up_proj = nn.Linear(64, 64)

    def forward(self, x):
        return self.other(self.down_proj(self.q_proj(x)))


@torch.no_grad()
@BITS
@DTYPES
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_operator_of_the_reference_bit_for_bit(shape, bias, backend, dtype, bits):
    plain = linear(bias, dtype)
    layer = QuantizedDenseLinear.from_linear(plain, bits, backend)
    x = torch.randn(shape).to(dtype)
    y = layer(x)
    assert y.shape == (*shape[:-1], 130)
    assert y.dtype == dtype
    rows = x.reshape(-1, 70)
    offsets = torch.tensor([0, len(rows)], dtype=torch.int32)
    weight = reference.quantize_weight(plain.weight[None], bits)
    b = None if plain.bias is None else plain.bias[None]
    assert_same_bits(y, reference.quantized_linear(rows, weight, offsets, b).view_as(y), "y")
    if rows.numel():
        rounded = ops.dequantize_weight(ops.quantize_weight(plain.weight[None], bits))[0].double()
        expected = nn.functional.linear(x.double(), rounded, None if b is None else b[0].double())
        error = (y.double() - expected).norm() / expected.norm()
        assert error < {torch.float32: 3e-4, torch.bfloat16: 4e-3, torch.float16: 1e-3}[dtype]


@torch.no_grad()
@pytest.mark.parametrize("form", EVERY_FORMAT)
def test_a_call_is_one_native_call_with_the_bits_of_the_reference(form):
    plain = linear()
    weight = in_format(plain.weight.detach()[None], *EVERY_FORMAT[form])
    layer = QuantizedDenseLinear.from_quantized(weight, bias=plain.bias)
    whole = torch.randn(3, 140, 2)
    for x in (whole[:, :70, 0], whole[0, 70:, 1], whole[:, ::2].transpose(1, 2)):  # of any strides
        with Operators() as operators:
            y = layer(x)
        assert [name for name in operators.names if name.startswith("pymoe")] == ["pymoe.quantized_linear.default"]
        expected = reference.quantized_linear(x, layer.quantized_weight, None, layer.bias[None])
        assert_same_bits(y, expected, str(x.shape))


@torch.no_grad()
def test_the_reference_backend_makes_no_native_call():
    layer = QuantizedDenseLinear.from_linear(linear(), 8, "reference")
    with Operators() as operators:
        layer(torch.randn(3, 70))
    assert not [name for name in operators.names if name.startswith("pymoe")]


@torch.no_grad()
def test_packed_bytes_may_have_any_strides():
    layer, x = QuantizedDenseLinear.from_linear(linear(), 4), torch.randn(3, 70)
    expected = layer(x)
    layer.packed = layer.packed.repeat_interleave(2, dim=2)[..., ::2]
    assert not layer.packed.is_contiguous()
    assert_same_bits(layer(x), expected, "y")


@torch.no_grad()
def test_a_call_runs_few_functions_of_python():
    """A call ran 20 of them in 14 µs, and nn.Linear, which has one, takes 4."""
    layer, x = QuantizedDenseLinear.from_linear(linear(bias=False), 4), torch.randn(2, 1, 70)
    names = [name for module, name in functions_of(lambda: layer(x)) if module.startswith("pymoe")]
    assert len(names) <= 6, names


@torch.no_grad()
@BITS
def test_a_row_has_the_same_bits_alone_and_among_others(bits):
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    x = torch.randn(9, 70)
    assert_same_bits(torch.stack([layer(row) for row in x]), layer(x), "y")
    strided = torch.randn(70, 9).T
    assert_same_bits(layer(strided), layer(strided.contiguous()), "strides")


@torch.no_grad()
@BITS
def test_autocast_casts_rows_and_bias_as_a_linear_does(bits):
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    x = torch.randn(3, 70)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    expected = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert_same_bits(y, expected, "y")


@torch.no_grad()
@BITS
def test_a_cast_changes_the_bias_alone(bits):
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    before = layer.packed.clone()
    layer.to(torch.bfloat16)
    assert layer.bias.dtype == torch.bfloat16
    assert_same_bits(layer.packed, before, "packed")
    assert layer(torch.randn(2, 70)).dtype == torch.float32, "rows decide, as for experts"


@torch.no_grad()
@BITS
@pytest.mark.parametrize("bias", [True, False])
def test_state_copies_and_pickles(bits, bias, tmp_path):
    layer = QuantizedDenseLinear.from_linear(linear(bias), bits)
    x = torch.randn(4, 70)
    expected = layer(x)
    state = layer.state_dict()
    assert list(state) == ["packed", *["bias"] * bias, "sizes"]
    save_file(state, tmp_path / "state")
    built = QuantizedDenseLinear(70, 130, bias, bits=bits)
    assert not built(x).any()
    built.load_state_dict(load_file(tmp_path / "state"))
    for other in (built, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x), expected, "y")
        assert not list(other.parameters())
    with torch.device("meta"):
        meta = QuantizedDenseLinear(70, 130, bias, bits=bits)
    meta.load_state_dict(load_file(tmp_path / "state"), assign=True)
    assert_same_bits(meta(x), expected, "y")
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantizedDenseLinear(69, 130, bias, bits=bits).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantizedDenseLinear(70, 130, bias, bits=12 - bits).load_state_dict(state)


@BITS
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_without_a_break(bits, dynamic):
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with torch.no_grad():
        for shape in SHAPES:
            x = torch.randn(shape)
            assert_same_bits(compiled(x), layer(x), str(shape))


@BITS
def test_it_describes_itself_and_has_no_weight(bits):
    layer = QuantizedDenseLinear.from_linear(linear(False), bits)
    assert repr(layer) == f"QuantizedDenseLinear(in_features=70, out_features=130, bias=False, bits={bits})"
    assert (layer.in_features, layer.out_features, layer.bias) == (70, 130, None)
    assert not hasattr(layer, "weight")
    with pytest.raises(AttributeError, match=r"no tensor called 'weight', as its weights are packed; call the layer"):
        layer.weight.dtype  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'wieght'"):
        layer.wieght  # noqa: B018
    assert ops.dequantize_weight(layer.quantized_weight).shape == (1, 130, 70)


@BITS
def test_inputs_get_the_gradients_of_the_dequantised_weights(bits):
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    wide = ops.dequantize_weight(layer.quantized_weight)[0]
    for shape in ((70,), (3, 70), (2, 0, 70), (2, 5, 70)):
        x, grad = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 130)
        (found,) = torch.autograd.grad(layer(x), x, grad)
        torch.testing.assert_close(found, grad @ wide)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert not layer(x.detach()).requires_grad


@BITS
@pytest.mark.parametrize("backend", BACKENDS)
def test_tangents_of_forward_mode_are_refused_not_dropped(backend, bits):
    layer = QuantizedDenseLinear.from_linear(linear(), bits, backend)
    x = torch.randn(3, 70)
    expected = layer(x)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(layer, (x,), (x,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jacfwd(layer)(x)
    with forward_ad.dual_level():
        assert_same_bits(layer(x), expected, "without a tangent")
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(forward_ad.make_dual(x, x))


@BITS
def test_vmap_inside_forward_mode_computes_without_tangents_and_refuses_them(bits):
    """A look at the tangent of a tensor inside vmap raised torch's own error, even where there was none."""
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    x = torch.randn(3, 70)
    with forward_ad.dual_level():
        assert_same_bits(torch.vmap(layer)(x), layer(x), "without a tangent")
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(torch.vmap(layer), (x,), (x,))


@BITS
@pytest.mark.parametrize("operators", [ops, reference])
def test_a_tangent_of_the_bias_alone_is_refused(operators, bits):
    weight = ops.quantize_weight(torch.randn(1, 130, 70), bits)
    x, offsets, bias = torch.randn(3, 70), torch.tensor([0, 3], dtype=torch.int32), torch.randn(1, 130)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda b: operators.quantized_linear(x, weight, offsets, b), (bias,), (bias,))


@torch.no_grad()
@BITS
def test_a_traced_layer_computes_any_number_of_rows(bits):
    """A trace that holds the number of rows of its example computed zeros for all rows after them."""
    layer = QuantizedDenseLinear.from_linear(linear(), bits)
    traced = torch.jit.trace(layer, torch.randn(3, 70))
    for count in (0, 1, 3, 6):
        x = torch.randn(count, 70)
        assert_same_bits(traced(x), layer(x), f"{count} rows")
    x = torch.randn(2, 4, 70)
    assert_same_bits(torch.jit.trace(layer, x[:1])(x), layer(x), "three dimensions")


@torch.no_grad()
@BITS
def test_autocast_rounds_the_bias_once(bits):
    """Two roundings, into the rows' dtype and then into autocast's, lose bits of a bias in float32."""
    bias = 1 + 2.0**-10
    dense = QuantizedDenseLinear.from_weight(torch.zeros(64, 64), bits, bias=torch.full((64,), bias))
    experts = QuantizedLinear.from_weight(torch.zeros(1, 64, 64), bits)
    rows = torch.zeros(2, 64, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.float16):
        for y in (dense(rows), experts(rows, torch.tensor([0, 2], dtype=torch.int32), torch.full((1, 64), bias))):
            assert y.dtype == torch.float16
            assert y.eq(bias).all()


@pytest.mark.parametrize(("bits", "format"), [(4, "mxfp"), (8, "fp")], ids=["mxfp4", "fp8"])
def test_a_layer_of_another_format_is_the_operator(bits, format):
    plain = linear()
    with pytest.raises(ValueError, match=f"bits must be {bits} for format '{format}', got {12 - bits}"):
        QuantizedDenseLinear.from_linear(plain, 12 - bits, format=format)
    layer = QuantizedDenseLinear.from_linear(plain, bits, format=format)
    assert repr(layer).endswith(f"bits={bits}, format='{format}')")
    x = torch.randn(3, 70)
    weight = ops.quantize_weight(plain.weight.detach()[None], bits, format)
    with torch.no_grad():
        expected = ops.quantized_linear(x, weight, torch.tensor([0, 3], dtype=torch.int32), plain.bias[None])
    assert_same_bits(layer(x), expected, "y")
    built = QuantizedDenseLinear(70, 130, bits=bits, format=format)
    built.load_state_dict(layer.state_dict())
    assert_same_bits(built(x), expected, "after loading")
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantizedDenseLinear(70, 130, bits=bits).load_state_dict(layer.state_dict())


def test_weights_and_biases_that_do_not_fit_are_refused():
    weight = ops.quantize_weight(torch.randn(2, 64, 32), 8)
    with pytest.raises(ValueError, match="weight must be of one expert, got 2 of them"):
        QuantizedDenseLinear.from_quantized(weight)
    with pytest.raises(ValueError, match=r"bias must be \(64,\), got \(1, 64\)"):
        QuantizedDenseLinear.from_weight(torch.randn(64, 32), 8, bias=torch.zeros(1, 64))


@pytest.mark.parametrize(
    ("x", "error", "match"),
    [
        (torch.randn(3, 69), ValueError, r"x must have size 70 \(weight.input_features\)"),
        (torch.randn(3, 2, 69), ValueError, r"x must have size 70 \(weight.input_features\)"),
        (torch.randn(3, 0), ValueError, "x must have size 70"),
        (torch.tensor(1.0), ValueError, "x must have shape"),
        (torch.randn(3, 70).double(), TypeError, "x must have dtype float32 or bfloat16 or float16"),
        (torch.zeros(3, 70, dtype=torch.int32), TypeError, "x must have dtype"),
    ],
    ids=["inputs", "inputs of three dimensions", "no inputs", "a number", "float64", "integers"],
)
def test_what_is_no_row_is_refused(x, error, match):
    with pytest.raises(error, match=match):
        QuantizedDenseLinear.from_linear(linear(), 8)(x)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"bits": 5}, ValueError, "bits must be 8 or 4, got 5"),
        ({"bias": 1}, TypeError, "bias must be a bool"),
        ({"in_features": 0}, ValueError, "input_features must be at least 1"),
        ({"backend": "cuda"}, ValueError, "backend must be"),
    ],
)
def test_other_options_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        QuantizedDenseLinear(**{"in_features": 4, "out_features": 4, **arguments})


@torch.no_grad()
@BITS
def test_a_model_computes_with_its_rounded_weights(bits):
    model = Block().eval()
    rounded = copy.deepcopy(model)
    for layer in (rounded.q_proj, rounded.down_proj):
        layer.weight.copy_(ops.dequantize_weight(ops.quantize_weight(layer.weight[None], bits))[0])
    done = quantize_linears(model, bits)
    assert (done.layers, done.bytes_before, done.kept) == (2, 4 * 2 * 64 * 96, ("other", "router.up_proj"))
    assert done.bytes_after == model.q_proj.packed.nbytes + model.down_proj.packed.nbytes
    assert done.ratio > 3
    x = torch.randn(3, 64)
    assert float((model(x) - rounded(x)).norm() / rounded(x).norm()) < 1e-3
    with pytest.raises(ValueError, match="dense linear layers that are not quantised yet"):
        quantize_linears(model, bits)


def test_select_chooses_in_place_of_names_and_sizes():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with pytest.raises(ValueError, match="select=lambda name, layer: True takes all others"):
        quantize_linears(model)
    seen = []
    quantize_linears(model, 4, select=lambda name, layer: seen.append((name, layer)) or name == "2")
    assert [name for name, _ in seen] == ["0", "2"]
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, QuantizedDenseLinear]


@pytest.mark.parametrize(
    ("name", "rounded"),
    [
        *((f"model.layers.0.self_attn.{own}", True) for own in ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")),
        *((f"layers.1.self_attn.{own}", True) for own in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")),
        *((f"layers.1.self_attn.{own}", True) for own in ("kv_proj", "o_b_proj", "out_proj")),
        *((f"layers.2.linear_attn.{own}", True) for own in ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "out_proj")),
        *((f"mlp.shared_experts.{own}", True) for own in ("gate_proj", "up_proj", "gate_up_proj", "down_proj")),
        *((f"mlp.{own}", True) for own in ("input_linear", "output_linear", "fc1", "fc2", "w1", "w2", "w3")),
        ("lm_head", True),
        ("q_proj", True),
        ("model.embed_tokens", False),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.gate.down_proj", False),
        ("model.layers.0.mlp.router.fc1", False),
        ("model.layers.0.self_attn.indexer.q_b_proj", False),
        ("model.layers.0.self_attn.compressor.kv_proj", False),
        ("model.layers.0.mlp.shared_expert_gate", False),
        ("model.layers.0.mixer.in_proj", False),
        ("model.layers.0.mixer.out_proj", False),
        ("model.layers.0.self_attn.in_proj_a", False),
        ("score", False),
        ("my_lm_head", False),
    ],
)
def test_names_that_are_rounded_by_default(name, rounded):
    assert is_dense(name, nn.Linear(64, 64)) == rounded


@pytest.mark.parametrize("sharing", ["a new parameter", "a buffer", "a loaded state"])
def test_a_weight_that_shares_memory_under_another_parameter_stays(sharing):
    model = nn.Module()
    model.embed = nn.Embedding(64, 64)
    model.lm_head = nn.Linear(64, 64, bias=False)
    model.o_proj = nn.Linear(64, 64)
    if sharing == "a new parameter":
        model.lm_head.weight = nn.Parameter(model.embed.weight.data)
    elif sharing == "a buffer":
        model.register_buffer("kept", model.lm_head.weight.data)
    else:
        model.lm_head.weight = model.embed.weight
        model.load_state_dict(model.state_dict(), assign=True)
        assert model.lm_head.weight is not model.embed.weight
    assert quantize_linears(model.eval(), 8).kept == ("lm_head",)


def test_small_layers_subclasses_and_shared_weights_stay():
    class Own(nn.Linear):
        pass

    model = nn.Module()
    model.q_proj = nn.Linear(31, 64)
    model.k_proj = nn.Linear(64, 31)
    model.v_proj = Own(64, 64)
    model.embed = nn.Embedding(64, 64)
    model.lm_head = nn.Linear(64, 64, bias=False)
    model.lm_head.weight = model.embed.weight
    model.o_proj = nn.Linear(32, 32)
    done = quantize_linears(model.eval(), 8)
    assert done.kept == ("q_proj", "k_proj", "v_proj", "lm_head")
    assert type(model.o_proj) is QuantizedDenseLinear
    assert model.lm_head.weight is model.embed.weight
    with pytest.raises(ValueError, match="got none"):
        quantize_linears(model, 8, select=lambda name, _: name in ("v_proj", "lm_head"))


@pytest.mark.parametrize(
    "where", ["itself", "in a function inside", "behind a decorator", "in its base", "in a property"]
)
def test_a_layer_whose_weight_its_parent_reads_stays(where):
    """Heads of several models cast their input to the dtype of their weight; the quantised one has none to ask."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(64, 64)
            self.o_proj = nn.Linear(64, 64)

    class Itself(Plain):
        def forward(self, x):
            return self.lm_head(self.o_proj(x).to(self.lm_head.weight.dtype))

    class Inside(Plain):
        def forward(self, x):
            return (lambda y: self.lm_head(y.to(self.lm_head.weight.dtype)))(self.o_proj(x))

    class Decorated(Plain):
        @torch.no_grad()
        def forward(self, x):
            return self.lm_head(self.o_proj(x).to(self.lm_head.weight.dtype))

    class Derived(Itself):
        pass

    class Asked(Plain):
        @property
        def dtype(self):
            return self.lm_head.weight.dtype

        def forward(self, x):
            return self.lm_head(self.o_proj(x).to(self.dtype))

    kinds = {
        "in a property": Asked,
        "itself": Itself,
        "in a function inside": Inside,
        "behind a decorator": Decorated,
        "in its base": Derived,
    }
    model = kinds[where]().eval()
    assert quantize_linears(model, 8).kept == ("lm_head",)
    with torch.no_grad():
        assert model(torch.randn(2, 64)).shape == (2, 64)
    assert quantize_linears(Plain().eval(), 8).layers == 2


def test_a_parent_that_only_initialises_the_weight_does_not_keep_it():
    """Models of transformers read weights in _init_weights, which is not called for a quantised layer."""

    class Initialising(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(64, 64)

        def _init_weights(self, _):
            self.lm_head.weight.data.zero_()

    assert quantize_linears(Initialising().eval(), 8).kept == ()


def test_layers_keep_the_mode_of_those_that_they_replace():
    model = Block().requires_grad_(False).train()
    model.down_proj.eval()
    quantize_linears(model, 8)
    assert model.q_proj.training
    assert not model.down_proj.training


def test_a_forward_that_somebody_gave_all_linear_layers_is_refused(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    with pytest.raises(ValueError, match="got 'q_proj' with a forward of its own"):
        quantize_linears(Block().eval(), 8)


def test_a_layer_in_two_places_is_rounded_once():
    model = Block()
    model.up_proj = model.q_proj
    done = quantize_linears(model.eval(), 8)
    assert done.layers == 2
    assert model.up_proj is model.q_proj
    assert type(model.q_proj) is QuantizedDenseLinear


def test_experts_and_dense_layers_are_independent():
    model = nn.Module()
    model.moe = MoE(64, 64, 4, 2)
    model.o_proj = nn.Linear(64, 64)
    model.eval()
    assert quantize_linears(model, 8).layers == 1
    assert quantize_experts(model, 4).layers == 1
    assert quantize_experts(MoE(8, 8, 2, 1).eval(), 8).kept == ()


def with_hook(model):
    model.q_proj.register_forward_hook(lambda *_: None)
    return "got 'q_proj' with hooks"


def with_forward(model):
    model.q_proj.forward = lambda x: x
    return "got 'q_proj' with a forward of its own"


def with_compiled_call(model):
    model.q_proj.compile()
    return "got 'q_proj' with a compiled call"


def with_parametrization(model):
    parametrizations.weight_norm(model.q_proj)
    return "without parametrizations, got 'q_proj' with one"


def with_adapter(model):
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base

    model.q_proj = Lora(model.q_proj)
    return r"nothing wraps, got 'q_proj' inside another module.*merge_and_unload"


def with_compiled_module(model):
    model.q_proj = torch.compile(model.q_proj)
    return r"nothing wraps, got 'q_proj' inside"


def in_training(model):
    model.train()
    return "be in evaluation mode, got 'q_proj'"


def with_a_bias_alone_in_training(model):
    model.train().requires_grad_(False)
    model.q_proj.bias.requires_grad_()
    return "be in evaluation mode, got 'q_proj' in training mode with a parameter that requires a gradient"


def with_a_flat_weight(model):
    """Flatten a weight, as FSDP does with the parameters of a module that it wraps."""
    model.q_proj.weight = nn.Parameter(model.q_proj.weight.detach().flatten())
    return "have whole weights, got 'q_proj' with weights that are spread over ranks"


def with_a_weight_of_ranks(model):
    """Make a weight look like one of fully_shard; only computing with it would need a process group."""

    class Sharded(nn.Parameter):
        def full_tensor(self):
            raise AssertionError

    model.q_proj.weight = Sharded(model.q_proj.weight.detach())
    return "have whole weights, got 'q_proj' with weights that are spread over ranks"


def offloaded(model):
    model.q_proj.to("meta").register_forward_pre_hook(lambda *_: None)
    return "load the model without offloading"


@pytest.mark.parametrize(
    "prepare",
    [
        with_hook,
        with_forward,
        with_compiled_call,
        with_parametrization,
        with_adapter,
        with_compiled_module,
        in_training,
        with_a_bias_alone_in_training,
        with_a_flat_weight,
        with_a_weight_of_ranks,
        offloaded,
    ],
)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(prepare):
    model = Block().eval()
    words = prepare(model)
    with pytest.raises(ValueError, match=f"^quantize_linears: model must .*{words}"):
        quantize_linears(model, 8)
    assert not any(isinstance(module, QuantizedDenseLinear) for module in model.modules())
    if prepare is with_parametrization:
        assert parametrize.is_parametrized(model.q_proj)


def with_fp8_at_the_end():
    """Return a model whose second layer cannot be rounded: the first must stay as it is."""
    model = Block().eval()
    model.down_proj.weight = nn.Parameter(model.down_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    return model


def test_other_arguments_are_refused():
    for arguments, error, match in (
        ((nn.Linear(64, 64), 8), ValueError, "QuantizedDenseLinear.from_linear"),
        ((3, 8), TypeError, "model must be a torch.nn.Module"),
        ((Block(), 5), ValueError, "bits must be 8 or 4"),
        ((Block().double().eval(), 8), TypeError, "got torch.float64 in 'q_proj'"),
        ((with_fp8_at_the_end(), 8), TypeError, "got torch.float8_e4m3fn in 'down_proj'"),
    ):
        with pytest.raises(error, match=match):
            quantize_linears(*arguments)
    with pytest.raises(TypeError, match="select must be None or a function, got str"):
        quantize_linears(Block(), 8, select="q_proj")


def test_a_weight_that_is_not_finite_is_refused():
    model = Block().eval()
    with torch.no_grad():
        model.down_proj.weight[3, 2] = float("inf")
    with pytest.raises(ValueError, match="must be finite"):
        quantize_linears(model, 8)
    assert type(model.q_proj) is QuantizedDenseLinear, "the one before it"
    assert type(model.down_proj) is nn.Linear


def test_a_weight_is_freed_before_the_next_layer_is_rounded(monkeypatch):
    model = Block().eval()
    weights = [weakref.ref(model.q_proj.weight), weakref.ref(model.down_proj.weight)]
    alive = []
    from_linear = QuantizedDenseLinear.from_linear

    def watched(*arguments):
        alive.append([weight() is not None for weight in weights])
        return from_linear(*arguments)

    monkeypatch.setattr(QuantizedDenseLinear, "from_linear", watched)
    quantize_linears(model, 8)
    assert alive == [[True, True], [False, True]]


def test_a_model_on_the_meta_device_takes_a_state():
    model = Block().eval()
    with torch.device("meta"):
        other = Block().eval()
    other.router = copy.deepcopy(model.router)
    for one in (model, other):
        quantize_linears(one, 8)
    assert other.q_proj.packed.is_meta
    other.load_state_dict(model.state_dict(), assign=True)
    with torch.no_grad():
        x = torch.randn(2, 64)
        assert_same_bits(other(x), model(x), "y")
