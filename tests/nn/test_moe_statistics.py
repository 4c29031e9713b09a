"""Statistics are computed only when asked for: tests of what a layer holds until then, and that values are the same."""

import copy
import io
import pickle

import pytest
import torch
from moe_layers import make_input, make_layer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pymoe import ops
from pymoe.nn import moe
from pymoe.nn.local_tensors import LastCall


@pytest.fixture
def computed(monkeypatch):
    """Count the calls of router_losses."""
    seen, router_losses = [], ops.router_losses

    def counted(*args, **options):
        seen.append(1)
        return router_losses(*args, **options)

    monkeypatch.setattr(ops, "router_losses", counted)
    return seen


def expected(layer, x):
    """Return the statistics of ``layer(x)``, computed from the router's logits."""
    gate, logits = layer.router(x.detach())
    losses = ops.router_losses(logits.detach(), gate.load, score=layer.losses.score)
    capacity = layer._capacity(x.shape[0], layer.top_k)
    dropped = gate.load.new_zeros(()) if capacity is None else (gate.load - capacity).clamp(min=0).sum()
    return gate.load, dropped, losses.load_balancing, losses.z


def same(stats, wanted):
    return all(torch.equal(value, other.to(value.dtype)) for value, other in zip(stats, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid", "capacity_factor": 0.5}, {"aux_loss_coef": 0.1}], ids=str)
@pytest.mark.parametrize("recorded", [True, False])
def test_they_are_those_of_the_last_forward(options, recorded):
    layer, first, last = make_layer(**options), make_input(9), make_input(20, seed=2)
    with torch.set_grad_enabled(recorded):
        layer(first)
        layer(last)
    assert same(layer.stats, expected(layer, last))


def test_losses_that_nobody_asks_for_are_not_computed(computed):
    layer, x = make_layer(), make_input(9)
    layer(x).sum().backward()
    with torch.no_grad():
        layer(x)
    assert not computed
    first, second = layer.stats, layer.stats
    assert len(computed) == 1
    assert same(first, second)


def test_a_coefficient_has_them_computed_once(computed):
    layer, x = make_layer(z_loss_coef=0.1), make_input(9)
    layer(x).sum().backward()
    layer.stats  # noqa: B018
    assert len(computed) == 1


def test_the_losses_of_many_logits_are_computed_at_once(computed, monkeypatch):
    monkeypatch.setattr(moe, "MOST_HELD_LOGITS", 9 * 8 * 8)
    layer = make_layer()
    for tokens, recorded, at_once in ((9, False, 0), (10, False, 1), (9, True, 0), (10, True, 1)):
        computed.clear()
        x = make_input(tokens)
        with torch.set_grad_enabled(recorded):
            layer(x)
        assert len(computed) == at_once
        assert same(layer.stats, expected(layer, x))


class Product(TorchDispatchMode):
    """Keeps hold of the memory of the last matrix product, the router's, without keeping it alive."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.memory = StorageWeakRef(result.untyped_storage())
        return result


@pytest.mark.only_on("cpu", "cuda")  # a pretended tensor is a wrapper, whose own storage is empty
def test_logits_outlive_a_step_only_where_they_are_few_and_nobody_asked(monkeypatch):
    """After the backward pass, logits are kept only if they are small and the statistics were not read before it.

    A layer used to keep the logits of its last training step until its next forward, whatever their size.
    """
    layer = make_layer()
    monkeypatch.setattr(moe, "MOST_HELD_LOGITS", 10 * 8 * 8)
    for tokens, asked, gone in ((11, False, True), (11, True, True), (10, False, False), (10, True, True)):
        x = make_input(tokens)
        with Product() as product:
            y = layer(x)
        assert not product.memory.expired(), "the backward pass needs them"
        if asked:
            layer.stats  # noqa: B018
        y.sum().backward()
        del y
        assert product.memory.expired() == gone
        assert same(layer.stats, expected(layer, x))
        assert product.memory.expired()


def test_what_they_are_computed_from_is_let_go():
    layer, x = make_layer(), make_input(9)
    layer(x)
    assert layer.last.pending is not None
    layer.stats  # noqa: B018
    assert layer.last.pending is None
    layer(x)
    layer.last.zero_()
    assert layer.last.pending is None
    assert not any(bool(value.any()) for value in layer.stats)


# The pretended device's tensors cannot be unpickled.
BY_PICKLE = pytest.param(lambda layer: pickle.loads(pickle.dumps(layer)), marks=pytest.mark.only_on("cpu", "cuda"))


@pytest.mark.parametrize("other", [copy.deepcopy, BY_PICKLE], ids=["copy", "pickle"])
def test_copies_take_the_numbers_along_and_not_what_they_come_from(other):
    layer, x = make_layer(), make_input(9)
    layer(x)
    twin = other(layer)
    assert twin.last.pending is None
    assert same(twin.stats, layer.stats)
    assert same(layer.stats, expected(layer, x))


@pytest.mark.only_on("cpu", "cuda")  # there are no inference tensors on the pretended device
def test_they_survive_a_move_and_inference_mode():
    layer, x = make_layer(), make_input(9)
    with torch.inference_mode():
        layer(x.detach())
    wanted = expected(layer, x)
    assert same(layer.stats, wanted)
    with torch.inference_mode():
        layer(x.detach())
    layer.to(torch.float64)
    assert same(layer.stats, wanted)
    layer(x).sum().backward()


@pytest.mark.only_on("cpu", "cuda")
def test_a_layer_that_moved_in_inference_mode_can_forget_them_outside():
    layer, x = make_layer(), make_input(9)
    with torch.inference_mode():
        layer(x.detach())
        layer.last.to(x.device)
    layer.last.zero_()
    assert not any(bool(value.any()) for value in layer.stats)


def test_a_saved_layer_does_not_grow_with_its_tokens():
    layer, sizes = make_layer(), []
    for tokens in (1, 5000):
        layer(make_input(tokens))
        file = io.BytesIO()
        torch.save(layer, file)
        sizes.append(len(file.getvalue()))
    assert sizes[1] < 1.1 * sizes[0]


def test_two_that_ask_at_once_get_the_same():
    """If two threads asked at the same time, the second got the record's initial zeros while the first was
    computing.
    """
    last, other = LastCall(load=torch.zeros(1)), []

    def compute():
        if not other:
            other.append(None)
            other[0] = last["load"]  # as another thread would
        return {"load": torch.ones(1)}

    last.keep_pending(compute, torch.ones(1))
    assert last["load"] == other[0] == 1
    assert last.pending is None


def test_what_cannot_be_computed_now_can_be_later():
    last = LastCall(load=torch.zeros(1))
    outcomes = [RuntimeError("no memory"), {"load": torch.ones(1)}]

    def compute():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    last.keep_pending(compute, torch.ones(1))
    with pytest.raises(RuntimeError, match="no memory"):
        last["load"]
    assert last["load"] == 1
