"""QuantizedExperts and quantize_experts: a layer with quantised weights computes exactly with those weights."""

import copy
import pickle

import pytest
import torch
from moe_layers import BACKENDS, make_layer, quantize_layer
from safetensors.torch import load_file, save_file
from specs.comparison import assert_same_bits
from specs.quantized_weight import EVERY_FORMAT, STORED, in_format
from torch import nn
from torch.nn.utils import parametrize

import pymoe
from pymoe import reference
from pymoe.nn import Experts, MoE, QuantizedExperts, QuantizedLinear, apply_experts, quantize_experts, quantized_experts
from pymoe.ops import ClampedSwiglu

pytestmark = pytest.mark.only_on("cpu")
BITS = pytest.mark.parametrize("bits", [8, 4])
FORMS = pytest.mark.parametrize("form", EVERY_FORMAT.values(), ids=EVERY_FORMAT)
OPTIONS = {
    "plain": {},
    "gelu": {"activation": "gelu"},
    "relu and bias": {"activation": "relu", "bias": True},
    "bias and capacity": {"bias": True, "capacity_factor": 0.5},
    "shared": {"num_shared_experts": 1, "shared_gate": True, "router_bias": True},
    "scored before": {"score_before_experts": True, "bias": True},
    "clamped": {"activation": ClampedSwiglu(0.25, alpha=1.702, up_offset=1.0, interleaved=True)},
}


def layer(backend="native", dtype=torch.float32, **options):
    return make_layer(hidden_size=40, ffn_size=36, dtype=dtype, backend=backend, **options).eval()


def with_rounded_weights(moe, *form):
    """Return a copy whose experts have the weights that the quantised experts represent."""
    rounded = copy.deepcopy(moe)
    with torch.no_grad():
        for weight in (rounded.experts.w_in, rounded.experts.w_out):
            weight.copy_(pymoe.ops.dequantize_weight(in_format(weight, *form)))
    return rounded


def relative(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@torch.no_grad()
@FORMS
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_layer_computes_with_its_rounded_weights(options, backend, form):
    moe = layer(backend, **options)
    expected = with_rounded_weights(moe, *form)
    quantize_layer(moe, *form)
    x = torch.randn(30, 40)
    assert relative(moe(x), expected(x)) < 3e-4
    assert_same_bits(moe.stats.load, expected.stats.load, "load")


@torch.no_grad()
@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_native_call_returns_the_bits_of_six(dtype, form):
    moe = layer(dtype=dtype, bias=True)
    quantize_layer(moe, *form)
    x = torch.randn(30, 40).to(dtype)
    expected = copy.deepcopy(moe)
    expected.experts.register_forward_hook(lambda *_: None)  # an expert with a hook is called
    assert_same_bits(moe(x), expected(x), "y")
    reference = copy.deepcopy(moe)
    for part in reference.modules():
        if hasattr(part, "backend"):
            part.backend = "reference"
    assert relative(moe(x), reference(x)) < 1e-2


@FORMS
@pytest.mark.parametrize("bias", [False, True])
def test_the_router_and_what_precedes_it_get_the_gradients_of_dequantised_experts(form, bias):
    moe = layer(bias=bias)
    plain = with_rounded_weights(moe, *form)
    quantize_layer(moe, *form)
    before, grad_y = torch.nn.Linear(9, 40), torch.randn(30, 40)
    rows = torch.randn(30, 9)
    found, expected = (
        torch.autograd.grad(model(before(rows)), [*before.parameters(), model.router.weight], grad_y)
        for model in (moe, plain)
    )
    for got, wanted in zip(found, expected, strict=True):
        assert relative(got, wanted) < 1e-3
    assert_same_bits(moe(before(rows)).detach(), moe.requires_grad_(False)(before(rows).detach()), "y")


@torch.no_grad()
@FORMS
@pytest.mark.parametrize("bias", [False, True])
def test_state_goes_through_safetensors_and_the_meta_device(form, bias, tmp_path):
    moe = layer(bias=bias)
    quantize_layer(moe, *form)
    state = moe.state_dict()
    biases = {"experts.b_in", "experts.b_out"} if bias else set()
    weights = {f"experts.{weight}.{key}" for weight in ("w_in", "w_out") for key in ("packed", "sizes")}
    assert state.keys() == {"router.weight", *weights, *biases}
    save_file(state, tmp_path / "state")
    with torch.device("meta"):
        other = MoE(40, 36, 8, 2, bias=bias).eval()
    quantize_experts(other, *form)
    assert other.experts.w_in.packed.is_meta
    other.load_state_dict(load_file(tmp_path / "state"), assign=True)
    # Tensors loaded by safetensors start at other alignments than torch's, so the router's F.linear may round
    # otherwise.
    moe.router.row_invariant = other.router.row_invariant = True
    x = torch.randn(30, 40)
    assert_same_bits(other(x), moe(x), "y")


@torch.no_grad()
@BITS
def test_a_built_layer_takes_the_state_of_a_quantised_one(bits):
    experts = Experts(40, 36, 3, bias=True)
    quantized = QuantizedExperts.from_experts(experts, bits)
    built = QuantizedExperts(40, 36, 3, bits=bits, bias=True)
    rows, offsets = torch.randn(9, 40), torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    assert_same_bits(built(rows, offsets), torch.zeros(9, 40), "before")
    built.load_state_dict(quantized.state_dict())
    assert_same_bits(built(rows, offsets), quantized(rows, offsets), "after")
    assert relative(quantized(rows, offsets), experts(rows, offsets)) < (0.02 if bits == 8 else 0.2)
    with pytest.raises(RuntimeError, match="size mismatch"):
        QuantizedExperts(40, 36, 3, bits=12 - bits, bias=True).load_state_dict(quantized.state_dict())


@torch.no_grad()
@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_leaves_the_packed_bytes_as_they_are(dtype, bits):
    moe = layer(bias=True)
    quantize_experts(moe, bits)
    before = {name: one.clone() for name, one in moe.state_dict().items() if name.endswith("packed")}
    moe.to(dtype)
    for name, packed in before.items():
        assert_same_bits(moe.state_dict()[name], packed, name)
    assert moe(torch.randn(5, 40).to(dtype)).dtype == dtype
    with pytest.raises(TypeError, match="x must have the dtype of the parameters"):
        moe(torch.randn(5, 40).double())


@torch.no_grad()
@FORMS
def test_apply_experts_takes_quantised_weights(form):
    experts = Experts(40, 36, 6, bias=True)
    w_in, w_out = (in_format(weight, *form) for weight in (experts.w_in, experts.w_out))
    x, chosen, weights = torch.randn(9, 40), torch.randint(0, 8, (9, 2)), torch.rand(9, 2)
    options = {"b_in": experts.b_in, "b_out": experts.b_out, "foreign_experts": True}
    y = apply_experts(x, chosen, weights, w_in, w_out, **options)
    by_function = apply_experts(
        *(x, chosen, weights, w_in, w_out),
        activation=lambda rows: pymoe.ops.expert_activation(rows, "swiglu"),
        **options,
    )
    assert_same_bits(y, by_function, "y")
    plain = (pymoe.ops.dequantize_weight(weight) for weight in (w_in, w_out))
    assert relative(y, apply_experts(x, chosen, weights, *plain, **options)) < 3e-4


@pytest.mark.parametrize("activation", ["relu_squared", torch.relu])
@pytest.mark.parametrize("capacity", [None, 2])
def test_apply_experts_differentiates_all_but_the_quantised_weights(capacity, activation):
    packed = [pymoe.ops.quantize_weight(torch.randn(*shape), 8) for shape in ((3, 8, 6), (3, 6, 8))]
    plain = [pymoe.ops.dequantize_weight(weight) for weight in packed]
    chosen, grad = torch.randint(0, 3, (5, 2)), torch.randn(5, 6)
    x, weights, b_in, b_out = (torch.randn(*shape, requires_grad=True) for shape in ((5, 6), (5, 2), (3, 8), (3, 6)))
    found, expected = (
        torch.autograd.grad(
            apply_experts(x, chosen, weights, *both, b_in=b_in, b_out=b_out, activation=activation, capacity=capacity),
            (x, weights, b_in, b_out),
            grad,
        )
        for both in (packed, plain)
    )
    for got, wanted in zip(found, expected, strict=True):
        assert relative(got, wanted) < 1e-3


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"w_out": torch.randn(3, 6, 4)}, TypeError, "w_out must be a QuantizedWeight, got Tensor"),
        ({"w_in": torch.randn(3, 8, 6)}, TypeError, "w_in must be a QuantizedWeight, got Tensor"),
        ({"x": torch.randn(5, 7)}, ValueError, r"x must have size 6 \(w_in.input_features\)"),
        ({"x": torch.randn(5, 6).double()}, TypeError, "x must have dtype float32 or bfloat16 or float16"),
        ({"activation": "gelu"}, ValueError, r"w_in must have shape \(E, F, H\) with the F of w_out"),
        ({"b_in": torch.randn(3, 4)}, ValueError, r"b_in must have shape \(3, 8\), got \(3, 4\)"),
        ({"experts": torch.full((5, 2), 3)}, IndexError, "experts must lie in"),
        ({"capacity": -1}, ValueError, "capacity must be None or at least 0"),
    ],
)
def test_apply_experts_refuses_what_does_not_fit(changes, error, match):
    w_in, w_out = (pymoe.ops.quantize_weight(torch.randn(*shape), 8) for shape in ((3, 8, 6), (3, 6, 4)))
    arguments = {"x": torch.randn(5, 6), "experts": torch.zeros(5, 2).long(), "weights": torch.rand(5, 2)}
    with pytest.raises(error, match=match):
        apply_experts(**{**arguments, "w_in": w_in, "w_out": w_out, **changes})


@BITS
def test_the_summary_counts_layers_and_bytes(bits):
    model = torch.nn.Sequential(MoE(256, 256, 4, 2), torch.nn.Linear(256, 256), MoE(256, 256, 2, 1)).eval()
    model.append(model[0])  # the layer is used twice and quantised once
    done = quantize_experts(model, bits)
    assert done.layers == 2
    assert done.bytes_before == 4 * 6 * 3 * 256 * 256
    assert done.ratio == pytest.approx({8: 3.94, 4: 7.06}[bits], rel=0.01)
    assert model[3] is model[0]
    assert all(isinstance(model[i].experts, QuantizedExperts) for i in (0, 2))
    assert not any(name.startswith(("0.experts", "2.experts")) for name, _ in model.named_parameters())
    with torch.no_grad():
        assert model(torch.randn(3, 256)).shape == (3, 256)


def test_experts_that_two_layers_share_stay_shared():
    model = torch.nn.ModuleList([layer(), layer()])
    model[1].experts = model[0].experts
    assert quantize_experts(model).layers == 1
    assert model[1].experts is model[0].experts


@pytest.mark.parametrize(
    ("make", "bits", "error", "match"),
    [
        (lambda: layer(), 3, ValueError, "bits must be 8 or 4, got 3"),
        (lambda: layer(), 16, ValueError, "bits must be 8 or 4, got 16"),
        (lambda: layer(), "8", TypeError, "bits must be an int, got str"),
        (lambda: torch.randn(3), 8, TypeError, "model must be a torch.nn.Module, got Tensor"),
        (lambda: layer(dtype=torch.float64), 8, TypeError, "model must have weights in .* got float64 in 'experts'"),
        (lambda: torch.nn.Linear(3, 3), 8, ValueError, "model must hold experts that are not quantised yet, got none"),
        (lambda: Experts(4, 4, 2), 8, ValueError, "use QuantizedExperts.from_experts"),
        (lambda: layer().train(), 8, ValueError, "got 'experts' in training mode .* call model.eval"),
    ],
)
def test_quantize_experts_refuses(make, bits, error, match):
    with pytest.raises(error, match=f"^quantize_experts: {match}" if error is TypeError else match):
        quantize_experts(make(), bits)


def test_a_refused_model_is_left_as_it_was():
    model = torch.nn.Sequential(layer(), layer().train())
    with pytest.raises(ValueError, match=r"'1\.experts' in training mode"):
        quantize_experts(model)
    assert all(isinstance(part.experts, Experts) for part in model)
    quantize_experts(model.requires_grad_(False))  # nothing to train


def test_a_weight_that_is_not_finite_is_refused():
    moe = layer()
    with torch.no_grad():
        moe.experts.w_out[3, 2, 1] = torch.inf
    with pytest.raises(ValueError, match=r"quantize_weight: weight must be finite .* not at \[3, 2, 1\]"):
        quantize_experts(moe)


class TwoWeights(torch.nn.Module):
    """A module as a handler finds it, which runs with either kind of weights."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(2, 8, 6))
        self.second = torch.nn.Parameter(torch.randn(2, 6, 8))


def test_a_layer_with_a_weight_that_is_not_finite_stays_as_it_was(monkeypatch):
    def weights(module):
        return dict(module.named_parameters(recurse=False)) if isinstance(module, TwoWeights) else None

    monkeypatch.setattr(quantized_experts, "handlers", [weights])
    model = torch.nn.Sequential(TwoWeights(), TwoWeights()).eval()
    with torch.no_grad():
        model[1].second[0, 1, 2] = torch.nan
    for _ in range(2):  # trying again does not pass over the layer
        with pytest.raises(ValueError, match=r"weight must be finite .* not at \[0, 1, 2\]"):
            quantize_experts(model)
        assert isinstance(model[0].first, QuantizedLinear)
        assert isinstance(model[0].second, QuantizedLinear)
        assert model[1]._parameters.keys() == {"first", "second"}
    with torch.no_grad():
        model[1].second.zero_()
    assert quantize_experts(model).layers == 1


def watch(experts, hook):
    getattr(experts, hook)(lambda *_: None)


def replace_forward(experts, _):
    experts.forward = experts.forward


def replace_class(experts, _):
    class Other(Experts):
        def forward(self, rows, offsets):
            return super().forward(rows, offsets)

    experts.__class__ = Other


def replace_call(experts, _):
    experts.__class__ = type("Other", (Experts,), {"__call__": lambda self, *args: 2 * Experts.__call__(self, *args)})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (watch, "register_forward_hook"),
        (watch, "register_forward_pre_hook"),
        (watch, "register_full_backward_hook"),
        (watch, "register_full_backward_pre_hook"),
        (replace_forward, "a forward"),
        (replace_class, "a forward"),
        (replace_call, "a forward"),
    ],
)
def test_experts_whose_hooks_or_forward_would_be_lost_are_refused(change, what):
    model = torch.nn.Sequential(layer(), layer())
    change(model[1].experts, what)
    got = "a forward of its own" if what == "a forward" else "hooks"
    with pytest.raises(ValueError, match=rf"^quantize_experts: model .* got '1\.experts' with {got}"):
        quantize_experts(model)
    assert isinstance(model[0].experts, Experts)


@torch.no_grad()
@pytest.mark.parametrize("name", ["w_in", "w_out"])
def test_whatever_stands_before_quantised_weights_runs(name):
    moe = layer(activation="relu")
    quantize_experts(moe)
    x = torch.randn(5, 40)
    y = moe(x)
    part = getattr(moe.experts, name)
    handle = part.register_forward_hook(lambda module, args, output: 2 * output)
    torch.testing.assert_close(moe(x), 2 * y)
    handle.remove()

    class Adapter(torch.nn.Module):
        weight = property(lambda self: part.weight)
        forward = staticmethod(lambda *args: 2 * part(*args))

    setattr(moe.experts, name, Adapter())
    torch.testing.assert_close(moe(x), 2 * y)


@torch.no_grad()
def test_quantised_experts_run_the_backend_that_they_were_built_with(monkeypatch):
    moe = layer()
    moe.experts = QuantizedExperts(40, 36, 8, backend="reference")
    products = []
    product = reference.quantized_linear
    monkeypatch.setattr(reference, "quantized_linear", lambda *args: products.append(1) or product(*args))
    moe(torch.randn(5, 40))
    assert len(products) == 2
    moe.experts = QuantizedExperts(40, 36, 8)
    moe.experts.w_out = QuantizedLinear(36, 40, 8, backend="reference")
    moe(torch.randn(5, 40))
    assert len(products) == 3


@torch.no_grad()
@BITS
@pytest.mark.parametrize("sizes", [(40, 36, 1), (40, 36, 7), (40, 36, 9), (39, 36, 8), (40, 35, 8)])
def test_quantised_experts_that_do_not_fit_are_refused_alike_by_one_call_and_by_six(sizes, bits):
    """In the last two cases, the weights have as many bytes as weights that fit."""
    moe = layer()
    moe.experts = QuantizedExperts(*sizes, bits=bits)
    if sizes[1] != 36:
        moe.experts.w_in = QuantizedLinear(40, 72, 8, bits=bits)
    with pytest.raises(ValueError, match=r"quantized_linear: (offsets|x) must have size") as fused:
        moe(torch.randn(21, 40))
    moe.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"quantized_linear: (offsets|x) must have size") as called:
        moe(torch.randn(21, 40))
    assert str(fused.value) == str(called.value)


def test_a_quantised_model_has_nothing_left_to_quantise():
    moe = layer()
    quantize_experts(moe, 8)
    with pytest.raises(ValueError, match="got 2 weights of experts that are quantised already, and no others"):
        quantize_experts(moe, 4)


def test_packed_weights_cannot_be_indexed():
    with pytest.raises(TypeError, match="packed and cannot be indexed"):
        QuantizedLinear(4, 4, 2)[0]


@torch.no_grad()
@FORMS
def test_compiles_whole(form):
    torch._dynamo.reset()  # other tests of this process have compiled the same code
    moe = layer()
    quantize_layer(moe, *form)
    x = torch.randn(6, 40)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), moe(x), "y")


@BITS
@pytest.mark.parametrize("assign", [False, True])
def test_the_state_of_a_layer_of_another_size_is_refused(bits, assign):
    """Weights are padded to whole tiles: weights of 48 inner features had the shape of weights of 64, and were
    accepted.
    """
    small, large = (MoE(64, ffn, 4, 2).eval() for ffn in (48, 64))
    for one in (small, large):
        quantize_experts(one, bits)
    assert small.experts.w_out.packed.shape == large.experts.w_out.packed.shape
    before = large.experts.w_in.packed.clone()
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"size mismatch for experts.w_in.packed: expected bits, output and input"
        ):
            large.load_state_dict(small.state_dict(), assign=assign, strict=strict)
    assert torch.equal(large.experts.w_in.packed, before)


def test_states_without_sizes_and_with_other_keys():
    """States saved before the sizes were added still load; missing or unknown entries are still reported."""
    moe, other = layer(), layer()
    for one in (moe, other):
        quantize_experts(one, 8)
    state = moe.state_dict()
    old = {key: value for key, value in state.items() if not key.endswith("sizes")}
    other.load_state_dict(old)
    with pytest.raises(RuntimeError, match=r"Missing key.*w_in.packed"):
        other.load_state_dict({key: value for key, value in state.items() if key != "experts.w_in.packed"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*w_in.shape"):
        other.load_state_dict({**state, "experts.w_in.shape": torch.zeros(1)})


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.25))

    def forward(self, weight):
        return weight + self.by


@torch.no_grad()
@BITS
def test_parametrized_weights_are_rounded_as_they_are_used(bits):
    """The error said that 'w_in' was no Parameter."""
    moe, plain, x = layer(), layer(), torch.randn(9, 40)
    parametrize.register_parametrization(moe.experts, "w_in", Shifted())
    plain.experts.w_in += 0.25
    assert quantize_experts(moe, bits) == quantize_experts(plain, bits)
    assert_same_bits(moe(x), plain(x), "y")


class Adapter(nn.Module):
    """A wrapper like the one PEFT puts around a module whose parameter it adapts."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args):
        return self.base_layer(*args)


def test_experts_that_an_adapter_reads_are_refused():
    """The experts were replaced under the adapter, which asked the packed weights for their dtype in the next call."""
    moe = layer()
    moe.experts = Adapter(moe.experts)
    with pytest.raises(ValueError, match=r"got 'experts' with an adapter.*merge it first"):
        quantize_experts(moe)
    assert type(moe.experts.base_layer) is Experts


def test_experts_that_torch_compile_has_wrapped_are_refused():
    """The compiled wrapper kept using its original weights, while the state dict had the rounded ones."""
    moe, x = layer(), torch.randn(5, 40)
    moe.experts = torch.compile(moe.experts, backend="eager")
    with pytest.raises(ValueError, match=r"got 'experts', which would run the weights .* compile then"):
        quantize_experts(moe)
    moe.experts = moe.experts._orig_mod
    with torch.no_grad():
        compiled = torch.compile(moe, backend="eager")
        before = compiled(x)
        quantize_experts(compiled)  # nothing has wrapped the experts of their own
        assert torch.equal(compiled(x), moe(x))
        assert not torch.equal(moe(x), before)
    torch._dynamo.reset()


def test_weights_that_are_spread_over_ranks_are_refused():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(layer())
        dist.fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"got '0\.experts' with weights that are spread over ranks"):
            quantize_experts(model)
    finally:
        dist.destroy_process_group()


def test_a_class_that_was_patched_is_not_replaced(monkeypatch):
    forward = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda *args: 2 * forward(*args))
    with pytest.raises(ValueError, match="a forward of its own"):
        quantize_experts(layer())


def stored(format, experts, outputs, inputs):
    """Return codes and scales of ordinary sizes, as a checkpoint stores them."""
    if format == "fp":
        codes = torch.randn(experts, outputs, inputs).to(torch.float8_e4m3fn)
        return codes, torch.rand(experts, -(-outputs // 128), -(-inputs // 128)) / 30
    codes = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    return codes, torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("bits", "format", "error"), [(4, "mxfp", 3e-4), (8, "fp", 1e-6)], ids=["mxfp4", "fp8"])
def test_a_layer_takes_the_weights_of_a_checkpoint_as_they_are_stored(backend, bits, format, error):
    moe = make_layer(hidden_size=64, ffn_size=96, dtype=torch.float32, backend=backend).eval()
    plain = copy.deepcopy(moe)
    experts = QuantizedExperts(64, 96, 8, bits=bits, format=format, backend=backend)
    for name, sizes in (("w_in", (8, 192, 64)), ("w_out", (8, 64, 96))):
        weight = pymoe.ops.pack_weight(*stored(format, *sizes))
        setattr(experts, name, QuantizedLinear.from_quantized(weight, backend))
        getattr(plain.experts, name).copy_(pymoe.ops.dequantize_weight(weight))
    moe.experts = experts
    x = torch.randn(30, 64)
    assert relative(moe(x), plain(x)) < error
    again = copy.deepcopy(moe)
    assert_same_bits(again(x), moe(x), "y of a copy")
    built = QuantizedExperts(64, 96, 8, bits=bits, format=format, backend=backend)
    built.load_state_dict(experts.state_dict())
    moe.experts = built
    assert_same_bits(moe(x), again(x), "y of a loaded state")


def test_the_format_of_experts_is_shown():
    mxfp, integers = (QuantizedExperts(4, 6, 2, bits=4, format=one) for one in ("mxfp", "int"))
    assert "bits=4, format='mxfp', activation='swiglu'" in repr(mxfp)
    assert "format='mxfp'" in repr(mxfp.w_in)
    assert "format" not in repr(integers)


@pytest.mark.parametrize("assign", [False, True])
def test_the_state_of_another_format_is_refused(assign):
    mxfp = QuantizedExperts(40, 36, 3, bits=4, format="mxfp")
    for other in (QuantizedExperts(40, 36, 3, bits=4), QuantizedExperts(40, 36, 3, bits=8)):
        for one, state in ((other, mxfp.state_dict()), (mxfp, other.state_dict())):
            with pytest.raises(RuntimeError, match=r"size mismatch for w_in.packed: expected bits, output and input"):
                one.load_state_dict(state, assign=assign)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"bits": 8, "format": "mxfp"}, ValueError, "bits must be 4 for format 'mxfp', got 8"),
        ({"format": "mxfp"}, ValueError, "bits must be 4 for format 'mxfp', got 8"),
        ({"format": "gguf"}, ValueError, "format must be 'int', 'mxfp', 'fp', 'affine' or 'symmetric', got 'gguf'"),
        ({"format": 4}, TypeError, "format must be a str, got int"),
    ],
)
def test_formats_that_do_not_exist_are_refused(options, error, match):
    for make in (
        lambda: QuantizedLinear(4, 4, 2, **options),
        lambda: QuantizedExperts(4, 4, 2, **options),
        lambda: quantize_experts(layer(), **options),
    ):
        with pytest.raises(error, match=match):
            make()


@pytest.mark.parametrize("form", STORED.values(), ids=STORED)
def test_experts_are_not_rounded_to_the_formats_of_others_and_stay_as_they_were(form):
    moe = layer()
    with pytest.raises(ValueError, match=f"experts: format must be one to which weights are rounded, got {form[1]!r}"):
        quantize_experts(moe, *form)
    assert type(moe.experts) is Experts


@torch.no_grad()
@BITS
def test_modules_that_were_pickled_before_there_were_formats_hold_integers(bits):
    moe = layer(bias=True)
    quantize_experts(moe, bits)
    x = torch.randn(9, 40)
    expected = moe(x)
    for part in (moe.experts, moe.experts.w_in, moe.experts.w_out):
        del part.__dict__["format"]
    loaded = pickle.loads(pickle.dumps(moe))
    assert loaded.experts.format == loaded.experts.w_in.format == "int"
    assert_same_bits(loaded(x), expected, "y")
    assert_same_bits(copy.deepcopy(loaded)(x), expected, "y of a copy")
    new = layer(bias=True)
    quantize_experts(new, bits)
    new.load_state_dict(loaded.state_dict())
    assert_same_bits(new(x), expected, "y of a state")
    assert "format" not in repr(loaded)


@torch.no_grad()
@BITS
def test_tuples_that_were_pickled_before_there_were_formats_hold_integers(bits):
    weight = pymoe.ops.quantize_weight(torch.randn(2, 8, 40), bits)
    old = pickle.dumps(tuple(weight)[:4])
    assert_same_bits(pymoe.ops.dequantize_weight(pickle.loads(old)), pymoe.ops.dequantize_weight(weight), "weights")


def test_a_number_in_a_state_that_names_no_format_is_refused():
    experts = QuantizedExperts(40, 36, 3, bits=4, format="mxfp")
    state = experts.state_dict()
    state["w_in.sizes"] = torch.tensor([24, 72, 40])
    with pytest.raises(
        RuntimeError, match=r"expected bits, output and input features \[14, 72, 40\], got \[24, 72, 40\]"
    ):
        experts.load_state_dict(state)


def test_the_state_of_integers_is_not_taken_for_fp8():
    """With at most 128 inputs both have equally many bytes: only ``sizes`` tells them apart."""
    integers, codes = (QuantizedLinear.from_weight(torch.randn(2, 70, 100), 8, format=one) for one in ("int", "fp"))
    assert integers.packed.shape == codes.packed.shape
    for one, other in ((integers, codes), (codes, integers)):
        with pytest.raises(RuntimeError, match="size mismatch for packed: expected bits, output and input features"):
            one.load_state_dict(other.state_dict())
    old = integers.state_dict()
    del old["sizes"]
    with pytest.raises(RuntimeError, match=r"expected bits, output and input features \[18, 70, 100\], got None"):
        codes.load_state_dict(old)


def test_a_state_without_sizes_holds_integers():
    """With these sizes, integers and MXFP4 have equally many bytes: only ``sizes`` tells them apart."""
    integers = QuantizedLinear.from_weight(torch.randn(2, 64, 512), 4)
    codes = QuantizedLinear.from_weight(torch.randn(2, 64, 544), 4, format="mxfp")
    old = integers.state_dict()
    assert old["packed"].shape == codes.packed.shape
    del old["sizes"]
    integers.load_state_dict(old)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"expected bits, output and input features \[14, 64, 544\], got None"):
            codes.load_state_dict(old, strict=strict)


@pytest.mark.parametrize("inputs", [32, 256, 300, 544, 2048])
def test_a_state_with_4_bits_in_the_layout_of_earlier_versions_is_refused(inputs):
    """A group of 32 inputs had a scale and a minimum in bfloat16.

    A tile had an even multiple of 64 bytes, and now has an odd one: no weight has the size of an old one.
    """
    layer = QuantizedLinear.from_weight(torch.randn(2, 64, inputs), 4)
    state = layer.state_dict()
    state["packed"] = torch.zeros(2, 1, 64 * 20 * ((inputs + 31) // 32), dtype=torch.uint8)
    for some in (state, {"packed": state["packed"]}):
        with pytest.raises(RuntimeError, match="size mismatch for packed"):
            layer.load_state_dict(some)
    assert layer.packed.shape[2] // 64 % 2 == 1
    weight = layer.quantized_weight._replace(packed=state["packed"])
    with pytest.raises(ValueError, match=r"weight.packed must have size"):
        pymoe.ops.quantized_linear(torch.zeros(1, inputs), weight, torch.tensor([0, 1, 1], dtype=torch.int32))


@pytest.mark.parametrize("place", ["b_in", "b_out"])
def test_biases_that_have_become_parameters_are_added(place):
    torch.manual_seed(0)
    model = nn.Sequential(MoE(64, 48, 4, 2, bias=True)).eval()
    quantize_experts(model, 8)
    x, experts = torch.randn(5, 64), model[0].experts
    bias = torch.randn_like(getattr(experts, place))
    setattr(experts, place, bias)
    with torch.no_grad():
        expected = model(x)
        delattr(experts, place)
        experts.register_parameter(place, nn.Parameter(bias))
        assert torch.equal(model(x), expected)
