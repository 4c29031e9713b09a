"""The two parts of a backward pass make up the whole: the same sums, the same work, and everything once."""

import pytest
import torch
from split_graphs import Case, Halves, InParts, Scaled, begin, calls
from torch import nn
from torch.nn import functional as F

from pymoe.autograd.graph_nodes import edge_of
from pymoe.pipe.split_backward import SplitBackward

pytestmark = pytest.mark.usefixtures("doubles")


def test_a_perceptron_does_half_of_the_matrix_products_in_each_part():
    model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    first, second = Case(model, torch.randn(6, 3)).check()
    assert first == {"aten.mm": 3, "aten.native_layer_norm_backward": 1}
    assert second == {"aten.mm": 3, "aten.native_layer_norm_backward": 2}


def test_convolutions_and_norms_compute_each_output_in_one_part():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()
    )
    first, second = Case(model, torch.randn(3, 2, 8, 8)).check()
    assert first["aten.convolution_backward"] == 2
    assert second["aten.convolution_backward"] == 4  # weight and bias of both


def test_embeddings_beside_the_inputs_wait_for_the_second_part():
    positions = nn.Embedding(7, 3)
    layer = nn.Linear(3, 3)
    first, second = Case(lambda x: layer(x + positions(torch.arange(5))), torch.randn(5, 3)).check()
    assert "aten.embedding_dense_backward" not in first
    assert second["aten.embedding_dense_backward"] == 1


def test_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    first, second = Case(layer, torch.randn(2, 5, 8)).check()
    assert first["aten.mm"] == second["aten.mm"]


def test_a_python_function_runs_once_and_its_weight_in_the_first_part():
    layer, weight = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
    Case(lambda x: layer(Scaled.apply(layer(x), weight)), torch.randn(4, 3)).check()
    assert calls == {"Scaled": 1}


def test_a_python_function_on_the_side_of_a_weight_runs_once():
    layer, scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
    case = Case(lambda x: F.linear(x, Scaled.apply(layer.weight, scale)).sin(), torch.randn(4, 3))
    first, second = case.check()
    assert calls == {"Scaled": 1}
    assert first == second == {"aten.mm": 1}


def test_a_function_of_both_a_weight_and_what_is_made_of_it_runs_everything_once():
    layer, scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def build(x):
        weight = Scaled.apply(layer.weight, scale)
        return Scaled.apply(F.linear(F.linear(x, weight), layer.weight), scale) + weight[0]

    Case(build, torch.randn(4, 3)).check(exact=False)
    assert calls == {"Scaled": 2}


def test_a_function_that_can_be_run_in_parts_is():
    weight = nn.Parameter(torch.randn(3, 3))
    scale = nn.Parameter(torch.randn(3))
    case = Case(lambda x: InParts.apply("a", Scaled.apply(x, scale).sin(), weight).cos(), torch.randn(4, 3))
    first, second = case.check()
    assert first == second == {"aten.mm": 1}
    assert calls == {"Scaled": 1, "InParts.x": 1, "InParts.w": 1}


def test_a_function_in_parts_with_a_derived_weight_and_a_second_use_of_it():
    weight = nn.Parameter(torch.randn(3, 3))

    def build(x):
        return InParts.apply("a", InParts.apply("b", x, weight.t()), weight)

    first, second = Case(build, torch.randn(4, 3)).check()
    assert first == second == {"aten.mm": 2}


def test_tied_weights_compute_nothing_twice():
    layer = nn.Linear(4, 4)
    first, second = Case(lambda x: layer(layer(layer(x).relu()).relu()) @ layer.weight, torch.randn(5, 4)).check()
    assert first == second == {"aten.mm": 4}


def test_gradients_that_are_missing_in_a_function_of_several_outputs():
    weight, layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 3)
    Case(lambda x: layer(Halves.apply(2, x, weight)[0]), torch.randn(4, 3)).check()
    Case(lambda x: layer(x) + Halves.apply(2, x, weight)[1], torch.randn(4, 3)).check()
    assert calls == {"Halves": 1}


def test_no_inputs_leave_everything_to_the_second_part():
    layer, scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))
    case = Case(lambda: Scaled.apply(layer(torch.ones(2, 3)), scale))
    first, second = case.check()
    assert not first
    assert second


def test_frozen_weights_leave_nothing_to_the_second_part():
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)).requires_grad_(False)
    first, second = Case(model, torch.randn(4, 3)).check()
    assert first == {"aten.mm": 2}
    assert not second


def test_some_frozen_weights():
    model = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    Case(model, torch.randn(4, 3)).check()


def test_an_output_that_is_an_input_and_one_that_depends_on_weights_alone():
    layer, scale = nn.Linear(3, 3), nn.Parameter(torch.randn(3))

    def build(x, y):
        return x, layer(y), (scale * scale).sum(), Scaled.apply(layer.weight, scale)

    Case(build, torch.randn(4, 3), torch.randn(2, 3)).check()
    assert calls == {"Scaled": 1}


def test_an_output_of_weights_that_belong_to_the_first_part_is_not_run_twice():
    scale = nn.Parameter(torch.randn(3))

    def build(x):
        derived = Scaled.apply(scale, scale)
        return Scaled.apply(x, derived), derived * 2

    Case(build, torch.randn(4, 3)).check()
    assert calls == {"Scaled": 2}


def test_outputs_without_gradients():
    layer = nn.Linear(3, 3)
    aliases, edges = begin(torch.randn(4, 3), torch.randn(4, 3))
    roots = [edge_of(layer(aliases[0])), edge_of(layer(aliases[1]))]
    split = SplitBackward(roots, [torch.ones(4, 3), None], edges, [layer.weight, layer.bias], False)
    first, second = split.input_gradients
    assert first is not None
    assert second is None
    assert torch.equal(split.weight_gradients()[1], torch.full((3,), 4.0))
    nothing = SplitBackward(roots, [None, None], edges, [layer.weight, layer.bias], False)
    assert nothing.input_gradients == (None, None)
    assert nothing.weight_gradients() == (None, None)


def test_views_and_changes_in_place():
    layer, bias = nn.Linear(4, 4), nn.Parameter(torch.randn(2))

    def build(x):
        h = layer(x)
        h[:, :2].add_(bias)
        h[:, 2:].mul_(bias.sin())
        return layer(h.tanh_())

    Case(build, torch.randn(3, 4)).check(exact=False)


def test_a_node_that_computes_all_of_its_gradients_at_once_runs_once():
    layer = nn.Linear(4, 4)
    first, second = Case(lambda x: layer(F.prelu(layer(x), layer.bias)), torch.randn(5, 4)).check()
    assert first["aten._prelu_kernel_backward"] == 1
    assert "aten._prelu_kernel_backward" not in second
