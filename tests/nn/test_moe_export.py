"""MoE goes through torch.export and later stages; an exported program keeps no statistics and changes nothing."""

import copy
import io

import pytest
import torch
from moe_layers import OPTIONS, SCORED_BEFORE, make_input, make_layer

from pymoe.nn import Stats

pytestmark = pytest.mark.only_on("cpu")
CHOSEN = {name: OPTIONS[name] for name in ("plain", "capacity above the mean", "everything")} | SCORED_BEFORE
by_options = pytest.mark.parametrize("options", CHOSEN.values(), ids=CHOSEN)


def layer_and_input(options, tokens=7):
    return make_layer(dtype=torch.float32, **options).eval(), make_input(tokens, dtype=torch.float32).detach()


def exported(layer, x, **options):
    return torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("tokens")},), **options)


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@by_options
def test_a_program_is_saved_and_loaded_for_any_number_of_tokens(options):
    layer, x = layer_and_input(options)
    program = saved_and_loaded(exported(layer, x)).module()
    for tokens in (7, 2, 31):
        x = make_input(tokens, dtype=torch.float32).detach()
        assert torch.equal(program(x), layer(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_strict_or_not_in_training_or_evaluation(strict, training):
    layer, x = layer_and_input({"bias_update_rate": 0.1, "aux_loss_coef": 0.1})
    layer.train(training)
    program = saved_and_loaded(exported(layer, x, strict=strict)).module()
    assert torch.equal(program(x), layer(x))


@by_options
def test_a_program_is_decomposed(options):
    layer, x = layer_and_input(options)
    program = torch.export.export(layer, (x,)).run_decompositions()
    assert torch.equal(program.module()(x), layer(x))


def test_neither_the_export_nor_the_program_touches_the_layer():
    layer, x = layer_and_input(OPTIONS["everything"])
    layer(x)
    before = copy.deepcopy(layer)
    program = exported(layer, x)
    program.module()(make_input(31, dtype=torch.float32).detach())
    assert not program.graph_signature.buffers_to_mutate
    for field, old, new in zip(Stats._fields, before.stats, layer.stats, strict=True):
        assert torch.equal(old, new), field
    assert torch.equal(before.router.counted["load"], layer.router.counted["load"])


@pytest.mark.exhaustive
def test_a_program_is_compiled_ahead_of_time(tmp_path):
    layer, x = layer_and_input(OPTIONS["everything"])
    file = torch._inductor.aoti_compile_and_package(exported(layer, x), package_path=str(tmp_path / "layer.pt2"))
    program = torch._inductor.aoti_load_package(file)
    for tokens in (7, 2, 31):
        x = make_input(tokens, dtype=torch.float32).detach()
        torch.testing.assert_close(program(x), layer(x), rtol=1e-5, atol=1e-6)


def test_an_exported_graph_holds_operators_that_pipelines_and_compilers_know():
    """The graph holds the separate operators, not the single native call, which has no gradient: code that runs the
    graph may need gradients.
    """
    layer, x = layer_and_input({})
    with torch.no_grad():
        graph = exported(layer, x).graph
    names = {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("pymoe.")}
    assert names >= {"build_routing", "dispatch", "grouped_linear", "expert_activation", "combine"}
    assert "apply_experts" not in names
