"""Tests that grouped products are handed to DeepGEMM and QuACK as these document, and that all else is refused.

The packages are stand-ins (stand_in_packages.py), and the CPU is taken for the GPU whose products are handed over.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from stand_in_packages import DeepGemm, installed, taken_for_a_gpu
from torch.utils.flop_counter import FlopCounterMode

from pymoe import ops, reference
from pymoe.nn import MoE, apply_experts
from pymoe.ops import package_products

pytestmark = pytest.mark.only_on("cpu")
OFFSETS = ([0, 3, 3, 8], [0, 0, 0, 0], [0, 5, 6, 20], [0, 17, 20, 20], [0, 0, 16, 16])
ROWS = 20


@pytest.fixture
def machine(monkeypatch):
    """Take the CPU for a Hopper GPU; ``capability`` may be changed."""
    with taken_for_a_gpu(monkeypatch) as one:
        yield one


def operands(transposed=False, rows=ROWS, hidden=16, outputs=24, experts=3):
    """Return x and a weight of small integers, whose products are exact, with gradients."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (rows, hidden), generator=drawn).bfloat16().requires_grad_()
    shape = (experts, hidden, outputs) if transposed else (experts, outputs, hidden)
    weight = torch.randint(-3, 4, shape, generator=drawn).bfloat16().requires_grad_()
    return x, weight, weight.transpose(1, 2) if transposed else weight


def everything(function, transposed, offsets):
    """Return y and the gradients of x and weight of a function like grouped_linear."""
    x, weight, used = operands(transposed)
    y = function(x, used, torch.tensor(offsets, dtype=torch.int32))
    grad = torch.randint(-2, 3, y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return y, *torch.autograd.grad(y, (x, weight), grad)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("package", "capability", "alignment"),
    [
        ("deep_gemm", (9, 0), 128),
        ("deep_gemm", (9, 0), 4),
        ("deep_gemm", (10, 0), 128),
        ("deep_gemm", (10, 3), 4),
        ("quack", (9, 0), 0),
    ],
)
def test_products_and_gradients_equal_the_reference(
    monkeypatch, machine, package, capability, alignment, transposed, offsets
):
    module = installed(monkeypatch, package, alignment)
    machine.capability = capability
    for got, wanted in zip(
        everything(ops.grouped_linear, transposed, offsets),
        everything(reference.grouped_linear, transposed, offsets),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    if package == "deep_gemm":  # the gradient of x is the product with the weight as it is stored, the other way round
        kinds = ["nn", "nt"] if transposed else ["nt", "nn"]
        assert module.calls == [(kind, capability[0] == 10) for kind in kinds]
    else:
        assert module.calls == [False, False]


@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_the_layout_has_every_expert_at_a_multiple_of_the_alignment(offsets, alignment):
    layout = package_products.contiguous_layout(torch.tensor(offsets, dtype=torch.int32), ROWS, alignment)
    experts, place = layout.experts.tolist(), layout.place.tolist()
    expected, begin = [-1] * len(experts), 0
    for expert, (first, last) in enumerate(pairwise(offsets)):
        assert place[first:last] == list(range(begin, begin + last - first))
        end = begin + -(-(last - first) // alignment) * alignment
        assert layout.ends[expert] == end
        expected[begin:end] = [expert] * (end - begin)
        begin = end
    assert experts == expected
    assert place[offsets[-1] :] == list(range(begin, begin + ROWS - offsets[-1]))  # skipped: they belong to no expert
    assert len(experts) % alignment == 0
    assert (layout.place.dtype, layout.experts.dtype, layout.ends.dtype) == (torch.int64, torch.int32, torch.int32)


@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
@pytest.mark.parametrize("offsets", [[0, 9, 4, 30], [5, -3, 7, 8], [0, 99, 99, 99]])
def test_offsets_out_of_range_are_brought_into_range(monkeypatch, machine, package, offsets):
    """On a GPU the values of offsets are not checked; a package must not read beyond the rows for that."""
    installed(monkeypatch, package, 4)
    x, _, weight = operands()
    y = package_products.product(package, x.detach(), weight.detach(), torch.tensor(offsets).int(), None, None)
    bounds = [0, *torch.tensor(offsets[1:]).clamp(0, ROWS).cummax(0).values.tolist()]
    assert torch.equal(y, reference.grouped_linear(x, weight, torch.tensor(bounds).int()))


@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_layer_and_apply_experts_hand_both_products_over(monkeypatch, machine, package, recorded):
    torch.manual_seed(0)
    layer = MoE(16, 24, 4, 2, dtype=torch.bfloat16).eval()
    x = torch.randn(9, 16, dtype=torch.bfloat16)
    gate = layer.router(x.detach())[0]
    weights, chosen = gate.weights.detach(), gate.experts
    experts = layer.experts

    def outputs():
        y = apply_experts(x, chosen, weights, experts.w_in, experts.w_out)
        results = [layer(x), y]
        if recorded:
            results += torch.autograd.grad(results[0].float().sum() + y.float().sum(), (experts.w_in, experts.w_out))
        return results

    with torch.set_grad_enabled(recorded):
        expected = outputs()
        module = installed(monkeypatch, package)
        got = outputs()
    assert len(module.calls) == (6 if recorded else 4)  # with gradients, one more a layer, for the rows in the middle
    for one, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=2e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
def test_a_compiled_layer_hands_its_products_over(monkeypatch, machine, package):
    torch.manual_seed(0)
    layer = MoE(16, 24, 4, 2, dtype=torch.bfloat16)
    x = torch.randn(9, 16, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(compiled(x).float().sum(), x)
    module = installed(monkeypatch, package)
    got = torch.autograd.grad(compiled(x).float().sum(), x)
    assert len(module.calls) == 4
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-3)
    ops.use_products_of(None)
    compiled(x)
    assert len(module.calls) == 4


def test_what_is_not_on_the_gpu_is_not_handed_over(monkeypatch, machine):
    module = installed(monkeypatch, "quack")
    monkeypatch.setattr(package_products, "DEVICE", "cuda")
    x, _, weight = operands()
    assert torch.equal(
        ops.grouped_linear(x, weight, torch.tensor(OFFSETS[0]).int()),
        reference.grouped_linear(x, weight, torch.tensor(OFFSETS[0]).int()),
    )
    layer = MoE(16, 24, 4, 2)
    with torch.no_grad():
        layer(torch.randn(9, 16))
    assert module.calls == []


@pytest.mark.parametrize(("rows", "hidden", "outputs"), [(0, 16, 8), (4, 0, 8), (4, 16, 0)])
def test_an_empty_product_needs_no_package(monkeypatch, machine, rows, hidden, outputs):
    module = installed(monkeypatch, "deep_gemm")
    x, weight = torch.ones(rows, hidden).bfloat16(), torch.ones(3, outputs, hidden).bfloat16()
    y = ops.grouped_linear(x, weight, torch.tensor([0, rows, rows, rows]).int())
    assert torch.equal(y, torch.zeros(rows, outputs).bfloat16())
    assert module.calls == []


def test_flops_are_counted(monkeypatch, machine):
    installed(monkeypatch, "quack")
    x, _, weight = operands()
    with FlopCounterMode(display=False) as counter:
        ops.grouped_linear(x.detach(), weight.detach(), torch.tensor(OFFSETS[0]).int())
    assert counter.get_total_flops() == 2 * ROWS * 16 * 24


def of(**options):
    """Return the arguments of a product, changed by ``options``."""
    x, _, weight = operands(hidden=options.pop("hidden", 16), outputs=options.pop("outputs", 24))
    given = {"x": x.detach(), "weight": weight.detach(), "offsets": torch.tensor(OFFSETS[0]).int()}
    return {**given, **{name: value(given) if callable(value) else value for name, value in options.items()}}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            of(x=lambda one: one["x"].float(), weight=lambda one: one["weight"].float()),
            TypeError,
            "x must have dtype bfloat16 for products of {}, got torch.float32",
        ),
        (of(bias=torch.ones(3, 24).bfloat16()), ValueError, "bias must be None for products of {}, got a tensor"),
        (of(order=torch.arange(ROWS).int()), ValueError, "order must be None for products of {}, got a tensor"),
        (of(hidden=12), ValueError, "H must be a multiple of 8 for products of {}, got 12"),
        (of(outputs=20), ValueError, "N must be a multiple of 8 for products of {}, got 20"),
        (
            of(weight=lambda one: one["weight"].repeat(1, 2, 1)[:, ::2]),
            ValueError,
            "weight must be contiguous, or a transposed view .* for products of {}, got strides",
        ),
        (
            of(weight=lambda one: torch.ones(one["weight"].numel() + 1).bfloat16()[1:].view_as(one["weight"])),
            ValueError,
            "weight must be contiguous, .* aligned to 16 bytes for products of {}",
        ),
    ],
)
@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
def test_what_a_package_does_not_take_is_refused(monkeypatch, machine, package, arguments, error, message):
    module = installed(monkeypatch, package)
    with pytest.raises(error, match="grouped_linear: " + message.format(package)):
        ops.grouped_linear(**arguments)
    assert module.calls == []


@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0), (12, 0)])
def test_other_gpus_are_refused(monkeypatch, machine, package, capability):
    module = installed(monkeypatch, package)
    machine.capability = capability
    message = f"products of {package} need a GPU of compute capability 9 or 10, got {capability[0]}.{capability[1]}"
    with pytest.raises(RuntimeError, match=message):
        ops.grouped_linear(**of())
    assert module.calls == []


def test_a_second_gpu_is_refused_to_deep_gemm(monkeypatch, machine):
    """Its kernels belong to the context of one device, and compute nonsense on another (transformers 5.23)."""
    module = installed(monkeypatch, "deep_gemm")
    ops.grouped_linear(**of())
    ops.grouped_linear(**of())
    assert len(module.calls) == 2
    package_products._device_of_deep_gemm[:] = [torch.device("cuda", 1)]
    with pytest.raises(RuntimeError, match=r"x must be on cuda:1, where DeepGEMM's first product .*, got cpu"):
        ops.grouped_linear(**of())
    assert len(module.calls) == 2


@pytest.mark.parametrize("package", ["deep_gemm", "quack"])
@pytest.mark.parametrize(
    "x", [torch.ones(ROWS * 16 + 1).bfloat16()[1:].view(ROWS, 16), torch.ones(ROWS, 24).bfloat16()[:, 8:]]
)
def test_rows_that_are_not_aligned_or_contiguous_are_copied(monkeypatch, machine, package, x):
    installed(monkeypatch, package)
    assert x.data_ptr() % 16 or not x.is_contiguous()
    arguments = {**of(), "x": x}
    assert torch.equal(ops.grouped_linear(**arguments), reference.grouped_linear(**arguments))


@pytest.mark.parametrize(
    ("package", "error", "message"),
    [
        ("sonicmoe", ValueError, "got 'sonicmoe', which has functions for whole layers but no grouped product"),
        ("cutlass", ValueError, "package must be one of 'deep_gemm', 'quack', got 'cutlass'"),
        (1, TypeError, "package must be a string, got int"),
        ("quack", ImportError, "QuACK cannot be imported: pip install quack-kernels"),
        ("deep_gemm", ImportError, "neither the module deep_gemm nor the package kernels can be imported"),
    ],
)
def test_a_package_that_is_not_there_is_refused_and_the_choice_stays(monkeypatch, machine, package, error, message):
    module = installed(monkeypatch, "quack")
    for name in ("quack", "quack.gemm_interface", "deep_gemm", "kernels"):
        monkeypatch.setitem(sys.modules, name, None)  # which makes its import fail
    with pytest.raises(error, match=f"^use_products_of: .*{message}"):
        ops.use_products_of(package)
    ops.grouped_linear(**of())
    assert module.calls == [False]


def test_as_a_context_manager_it_restores_the_former_choice(monkeypatch, machine):
    module = installed(monkeypatch, "quack")
    with ops.use_products_of(None):
        assert package_products.chosen is None
        with ops.use_products_of("quack"):
            ops.grouped_linear(**of())
        with pytest.raises(ZeroDivisionError), ops.use_products_of("quack"):
            raise ZeroDivisionError
        ops.grouped_linear(**of())
    assert len(module.calls) == 1
    assert package_products.chosen == "quack"


def test_a_version_without_the_products_is_refused(monkeypatch, machine):
    """DeepGEMM 1.0.0, which the package index has, knows products of float8 alone."""
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    with pytest.raises(ImportError, match="the installed deep_gemm has no m_grouped_bf16_gemm_nt_contiguous"):
        ops.use_products_of("deep_gemm")
    assert package_products.chosen is None


def test_kernels_fetches_deep_gemm_if_it_is_not_installed(monkeypatch, machine):
    fetched, asked = DeepGemm(), []

    def get_kernel(name, *, version):
        asked.append((name, version))
        return fetched

    kernels = ModuleType("kernels")
    kernels.get_kernel = get_kernel
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    ops.use_products_of("deep_gemm")
    ops.grouped_linear(**of())
    assert asked == [("kernels-community/deep-gemm", 2)]
    assert fetched.calls == [("nt", False)]
