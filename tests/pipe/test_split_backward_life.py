"""Split backward passes with hooks, memory, failures, and nodes of other code in the graph."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from split_graphs import Case, Scaled, begin
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pymoe.autograd.graph_nodes import edge_of
from pymoe.parallel import map_with_parallel_backward
from pymoe.pipe import split_backward
from pymoe.pipe.split_backward import SplitBackward

pytestmark = pytest.mark.usefixtures("doubles")


def test_a_checkpointed_part_runs_its_forward_once_more_and_not_twice():
    layer, runs = nn.Linear(3, 3), []

    def part(x):
        runs.append(1)
        return layer(x).sin()

    case = Case(lambda x: layer(checkpoint(part, layer(x), use_reentrant=False)), torch.randn(4, 3))
    case.check()
    runs.clear()
    case.parts()
    assert len(runs) == 2


def test_saved_tensors_that_others_pack_are_unpacked_once():
    layer, unpacked = nn.Linear(3, 3), []

    def unpack(tensor):
        unpacked.append(1)
        return tensor

    def build(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            return layer(layer(x).sin())

    case = Case(build, torch.randn(4, 3))
    case.whole()
    whole = len(unpacked)
    unpacked.clear()
    case.parts()
    assert len(unpacked) == whole
    case.check()


def test_calls_in_parallel_within_a_stage():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def build(x):
        (one,), (two,) = map_with_parallel_backward(lambda layer, h: layer(h), (layers[0], x), (layers[1], x))
        return layers[0](one + two)

    case = Case(build, torch.randn(4, 3))
    whole, *_ = case.whole()
    parts, *_ = case.parts()
    for expected, got in zip(whole, parts, strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=1e-12)


def test_other_precisions_under_autocast():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).float()

    def build(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    Case(build, torch.randn(6, 4).float()).check()


def test_hooks_of_tensors_run_once_and_change_what_comes_after_them():
    layer, seen = nn.Linear(3, 3), Counter()

    def build(x):
        def hook(name, factor):
            def run(grad):
                seen[name] += 1
                return grad * factor

            return run

        h = layer(x)
        h.register_hook(hook("linear", 2.0))
        g = h.sin()
        g.register_hook(hook("sin", 3.0))
        y = layer(g)
        y.register_hook(hook("root", 0.5))
        y.retain_grad()
        kept.append(y)
        weight = layer.weight.t()
        weight.register_hook(hook("weight", 5.0))
        return y @ weight

    kept = []
    case = Case(build, torch.randn(4, 3))
    case.check()
    assert seen == {"linear": 2, "sin": 2, "root": 2, "weight": 2}
    assert torch.equal(kept[0].grad, kept[1].grad)


def test_hooks_of_leaves_do_not_run_and_nothing_is_accumulated():
    layer, seen = nn.Linear(3, 3), []
    layer.weight.register_hook(lambda grad: seen.append("hook"))
    layer.bias.register_hook(lambda grad: seen.append("hook"))
    layer.bias.register_post_accumulate_grad_hook(lambda leaf: seen.append("post"))
    Case(lambda x: layer(x), torch.randn(4, 3)).parts()
    assert seen == []
    assert layer.weight.grad is None
    layer(torch.ones(1, 3)).sum().backward()
    assert sorted(seen) == ["hook", "hook", "post"]


def test_what_only_the_first_part_needs_is_let_go_after_it():
    layer = nn.Linear(100, 100)
    (alias,), edges = begin(torch.randn(100, 100))
    h = layer(alias)
    dead = h.sigmoid()
    needed = dead * 2
    root = edge_of(layer(needed))
    memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in (dead, needed)]
    del dead, needed, h
    assert [weak.expired() for weak in memory] == [False, False]
    split = SplitBackward([root], [torch.ones(100, 100)], edges, [layer.weight, layer.bias], False)
    del root
    assert [weak.expired() for weak in memory] == [True, False]
    split.weight_gradients()
    assert [weak.expired() for weak in memory] == [True, True]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("here")


@pytest.mark.parametrize("part", [1, 2])
def test_a_failure_passes_and_leaves_nothing_behind(part):
    layer = nn.Linear(30, 30)
    seen = []
    layer.weight.register_hook(lambda grad: seen.append(1))
    (alias,), edges = begin(torch.randn(4, 30))
    h = layer(alias).sin()
    weight = Fails.apply(layer.weight) if part == 2 else layer.weight
    y = F.linear(h if part == 2 else Fails.apply(h), weight)
    memory = StorageWeakRef(h.untyped_storage())
    roots = [edge_of(y)]
    del h, y, weight, alias
    made = []

    def both_parts():
        made.append(SplitBackward(roots, [torch.ones(4, 30)], edges, [layer.weight, layer.bias], False))
        roots.clear()
        made[0].weight_gradients()

    with pytest.raises(KeyError, match="here"):
        both_parts()
    roots.clear()
    edges.clear()
    gc.collect()
    assert memory.expired()
    assert len(made) == part - 1
    for split in made:
        with pytest.raises(RuntimeError, match="once"):
            split.weight_gradients()
    layer(torch.ones(1, 30)).sum().backward()
    assert seen == [1]


def test_an_edit_between_the_parts_is_noticed():
    layer = nn.Linear(3, 3)
    (alias,), edges = begin(torch.randn(4, 3))
    h = alias.sin()
    split = SplitBackward([edge_of(layer(h))], [torch.ones(4, 3)], edges, [layer.weight, layer.bias], False)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        split.weight_gradients()


def test_a_graph_of_weights_that_others_need_too_is_kept():
    scale, layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)
    shared = (layer.weight * scale).exp()
    case = Case(lambda x: F.linear(x.sin(), shared), torch.randn(4, 3))
    case.check()
    case.check()
    shared.sum().backward()


def test_no_cycles_keep_the_graph():
    layer = nn.Linear(3, 3)
    (alias,), edges = begin(torch.randn(4, 3))
    root = edge_of(Scaled.apply(layer(alias), layer.bias))
    weak = weakref.ref(root.node)
    gc.collect()
    gc.disable()
    try:
        split = SplitBackward([root], [torch.ones(4, 3)], edges, [layer.weight, layer.bias], False)
        del root
        split.weight_gradients()
        assert weak() is None
    finally:
        gc.enable()


def test_tensors_of_a_mode_are_not_kept_for_later():
    layer = nn.Linear(3, 3, dtype=torch.float16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        (alias,), edges = begin(torch.randn(4, 3, dtype=torch.float16))
        grads = [torch.ones(4, 3, dtype=torch.float16)]
        split = SplitBackward([edge_of(layer(alias))], grads, edges, [layer.weight, layer.bias], False)
        split.weight_gradients()
    assert all(type(zero) is torch.Tensor for zero in split_backward._zeros.values())
