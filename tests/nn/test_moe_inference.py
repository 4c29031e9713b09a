"""Without gradients MoE makes one native call for all experts, unless something intercepts the calls of its experts."""

import copy
import pickle

import pytest
import torch
from moe_layers import OPTIONS, make_input, make_layer, one_by_one, with_backend
from torch import nn
from torch.nn.utils import parametrize

from pymoe import ops, reference
from pymoe.nn import Experts
from pymoe.ops import raw


def assert_same(found, expected):
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def dispatches(monkeypatch):
    """Count the calls of dispatch, which the single native call does not make."""
    count = [0]
    for module in (ops, raw):

        def counted(*args, dispatch=module.dispatch):
            count[0] += 1
            return dispatch(*args)

        monkeypatch.setattr(module, "dispatch", counted)
    return count


INFERENCE_MODE = pytest.mark.only_on("cpu", "cuda")  # the pretended device does not support inference mode


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=INFERENCE_MODE)])
@pytest.mark.parametrize("tokens", [0, 1, 21])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_and_statistics_are_those_of_training(options, tokens, mode, dispatches):
    layer = make_layer(**options).eval()
    x = make_input(tokens)
    with one_by_one():
        y = layer(x)
    stats = layer.stats
    assert dispatches == [1]
    layer.last.zero_()
    with mode():
        assert torch.equal(layer(x), y.detach())
        found = layer.stats
    assert_same(found, stats)
    assert [value.dtype for value in found] == [torch.int32, torch.int32, torch.float32, torch.float32]
    assert dispatches == [1]


def add_hook(layer):
    return layer.experts.register_forward_hook(lambda module, args, output: 2 * output)


def add_hook_before(layer):
    return layer.experts.register_forward_pre_hook(lambda module, args: (args[0] * 2, args[1]))


def add_hook_everywhere(layer):
    return nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 2 * output if module is layer.experts else None
    )


def replace_forward(layer):
    forward = layer.experts.forward
    layer.experts.forward = lambda rows, offsets: 2 * forward(rows, offsets)


def replace_experts(layer):
    class Doubled(Experts):
        def forward(self, rows, offsets):
            return 2 * super().forward(rows, offsets)

    layer.experts.__class__ = Doubled


def add_parametrization(layer):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(layer.experts, "w_out", Double())


CHANGES = (add_hook, add_hook_before, add_hook_everywhere, replace_forward, replace_experts, add_parametrization)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_stands_before_the_experts_runs(change):
    layer = make_layer(activation="relu")
    x = make_input(5)
    with torch.no_grad():
        y = layer(x)
        handle = change(layer)
        try:
            torch.testing.assert_close(layer(x), 2 * y)
        finally:
            if handle is not None:
                handle.remove()


def test_the_reference_backend_stays_the_reference(dispatches):
    layer = make_layer()
    x = make_input(5)
    with torch.no_grad():
        y = with_backend(layer, "reference")(x)
        torch.testing.assert_close(layer(x), y)


def test_experts_run_the_backend_that_they_were_built_with(dispatches, monkeypatch, device):
    layer = make_layer()
    layer.experts = Experts(12, 10, 8, backend="reference", dtype=torch.float64).to(device)
    products = []
    grouped_linear = reference.grouped_linear
    monkeypatch.setattr(reference, "grouped_linear", lambda *args: products.append(1) or grouped_linear(*args))
    x = make_input(5)
    y = layer(x).detach()
    assert len(products) == 2
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    assert len(products) == 4
    assert dispatches == [2]


@pytest.mark.parametrize("number", [1, 7, 9])
def test_another_number_of_experts_is_refused_alike_with_and_without_gradients(number, device):
    layer = make_layer()
    layer.experts = Experts(12, 10, number, dtype=torch.float64).to(device)
    x = make_input(21)
    words = rf"MoE: experts\.w_in must have shape \(8, 20, 12\), got \({number}, 20, 12\)"
    with pytest.raises(ValueError, match=words) as recorded:
        layer(x)
    with torch.no_grad(), pytest.raises(ValueError, match=words) as fused:
        layer(x)
    assert str(fused.value) == str(recorded.value)


def test_statistics_do_not_change_with_the_next_call():
    layer = make_layer()
    with torch.no_grad():
        layer(make_input(5))
        first = layer.stats
        kept = copy.deepcopy(first)
        layer(make_input(50))
    assert_same(first, kept)
    assert layer.stats.load.sum() == 100


@INFERENCE_MODE
def test_statistics_of_inference_mode_hold_outside_of_it_and_can_be_copied_moved_and_reset():
    layer = make_layer()
    with torch.inference_mode():
        layer(make_input(5))
    stats = layer.stats
    assert stats.load.sum() == 10
    assert_same(copy.deepcopy(layer).stats, stats)
    assert_same(pickle.loads(pickle.dumps(layer)).stats, stats)
    assert_same(layer.to(torch.float32).stats, stats)
    layer.reset_parameters()
    assert layer.stats.load.sum() == 0
    layer(make_input(7, dtype=torch.float32)).sum().backward()
    assert layer.stats.load.sum() == 14


@INFERENCE_MODE
@pytest.mark.parametrize("called", [False, True])
def test_a_layer_moved_in_inference_mode_keeps_statistics_that_can_change_outside_of_it(called):
    layer = make_layer()
    with torch.inference_mode():
        if called:
            layer(make_input(5))
        layer.to(layer.router.weight.device).double()
        assert layer.stats.load.sum() == 10 * called
    compiled = torch.compile(layer, backend="eager")
    compiled(make_input(7))
    assert layer.stats.load.sum() == 14
    layer.reset_parameters()
    assert layer.stats.load.sum() == 0


@INFERENCE_MODE
def test_a_layer_off_the_meta_device_whose_first_call_is_in_inference_mode_can_be_called_outside_of_it():
    layer = make_layer(device="meta")
    layer.load_state_dict(make_layer().state_dict(), assign=True)
    compiled = torch.compile(layer, backend="eager")
    with torch.inference_mode():
        compiled(make_input(5))
    compiled(make_input(7))
    assert layer.stats.load.sum() == 14


@INFERENCE_MODE
def test_a_forward_without_gradients_between_forward_and_backward_changes_nothing():
    """A statistic's tensor may be saved for a backward pass."""
    layer = make_layer(**OPTIONS["everything"])
    x = make_input(9)
    loss = layer(x).sum()
    expected = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)
    with torch.inference_mode():
        layer(make_input(30))
    layer.last.zero_()
    assert_same(torch.autograd.grad(loss, list(layer.parameters())), expected)
