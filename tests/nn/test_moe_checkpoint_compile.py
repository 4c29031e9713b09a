"""Activation checkpointing and torch.compile change neither gradients nor what is counted."""

import copy

import pytest
import torch
from moe_layers import BACKENDS, OPTIONS, assert_same, make_input, make_layer, run
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.only_on("cpu", "cuda")  # checkpointing and compilation know no other device


def everything(**options):
    return make_layer(**{**OPTIONS["everything"], **options})


def state(layer):
    return [*layer.stats, layer.router.counted["load"].clone()]


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BEFORE = pytest.mark.parametrize("before", [False, True], ids=["scores after experts", "scores before experts"])


@BEFORE
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointing_leaves_the_same_bits(backend, use_reentrant, before):
    layer = everything(backend=backend, dtype=torch.float32, score_before_experts=before)
    twin = copy.deepcopy(layer)
    x = make_input(3, 9, dtype=torch.float32)
    y, expected = run(layer, x)
    checkpointed_y, found = run(twin, x, lambda x: checkpoint(twin, x, use_reentrant=use_reentrant))
    assert torch.equal(checkpointed_y, y)
    assert_same(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(state(twin), state(layer), strict=True))


COMPILED = {
    "plain": lambda layer: layer,
    "around a checkpoint": lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
}


@BEFORE
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("form", COMPILED.values(), ids=COMPILED)
def test_compiles_into_one_graph_and_counts_once(form, before):
    layer = everything(dtype=torch.float32, score_before_experts=before)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(form(twin), fullgraph=True, backend="aot_eager")
    x = make_input(21, dtype=torch.float32)
    for _ in range(2):
        y, expected = run(layer, x)
        compiled_y, found = run(twin, x, compiled)
        torch.testing.assert_close(compiled_y, y, rtol=1e-5, atol=1e-6)
        assert_same(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(twin.router.counted["load"], layer.router.counted["load"])
    assert torch.equal(twin.stats.load, layer.stats.load)
    assert torch.equal(twin.stats.dropped, layer.stats.dropped)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_checkpoint_around_a_compiled_layer_counts_once():
    layer = everything(dtype=torch.float32)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = make_input(21, dtype=torch.float32)
    for use_reentrant in (False, True):
        _, expected = run(layer, x)
        _, found = run(twin, x, lambda x, mode=use_reentrant: checkpoint(compiled, x, use_reentrant=mode))
        assert_same(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(twin.router.counted["load"], layer.router.counted["load"])


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_with_generated_code(monkeypatch):
    # For a narrower capability than the processor's, torch 2.13 generates code that no compiler takes (at::vec without
    # its header). The capability still holds for the layer that is not compiled.
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    layer = everything(dtype=torch.float32)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True)
    x = make_input(21, dtype=torch.float32)
    y, expected = run(layer, x)
    compiled_y, found = run(twin, x, compiled)
    torch.testing.assert_close(compiled_y, y, rtol=1e-4, atol=1e-5)
    assert_same(found, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(twin.router.counted["load"], layer.router.counted["load"])


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.slow
def test_compiles_for_any_number_of_tokens():
    layer = everything(dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (21, 34, 5):
        x = make_input(tokens, dtype=torch.float32)
        y, expected = run(layer, x)
        compiled_y, found = run(layer, x, compiled)
        torch.testing.assert_close(compiled_y, y, rtol=1e-5, atol=1e-6)
        assert_same(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiles_inside_autocast(device):
    layer = everything(dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = make_input(21, dtype=torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y, compiled_y = layer(x), compiled(x)
    assert compiled_y.dtype == torch.bfloat16
    torch.testing.assert_close(compiled_y, y, rtol=0.02, atol=0.02)
    compiled_y.float().sum().backward()
    assert x.grad.isfinite().all()
