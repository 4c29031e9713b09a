"""Calls of a layer on four ranks: what they read and send, in which order, and the torch modes they work under."""

import calls
import pytest

CLONES, PADDED, ONCE = {"clones": 1}, calls.PADDED, calls.ONCE
WAYS = pytest.mark.parametrize("way", [{}, CLONES, PADDED, ONCE], ids=["plain", "clones", "padded", "deduplicated"])


@WAYS
@pytest.mark.parametrize("scope", ["rank", "group"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_host_reads_once_a_call_or_never_and_never_in_a_backward_pass(ranks, chunks, scope, way):
    reads = 0 if way is PADDED else 1
    assert ranks.run(calls.host_reads, chunks=chunks, scope=scope, **way) == [[reads, 0]] * 4


@pytest.mark.parametrize("chunks", [1, 2])
def test_rows_sent_are_those_of_the_choices(ranks, chunks):
    for forward, both, rows, expected in ranks.run(calls.sent, chunks=chunks):
        assert (forward, both) == (2 * chunks, 4 * chunks)
        assert rows == expected


@WAYS
def test_second_derivatives_are_those_of_one_process(ranks, way):
    for error, is_there in ranks.run(calls.second_derivative, **way):
        assert error < 1e-9
        assert is_there


@WAYS
@pytest.mark.parametrize("chunks", [1, 2])
def test_activation_checkpointing_changes_no_bit(ranks, chunks, way):
    assert ranks.run(calls.checkpointed, chunks=chunks, **way) == [[]] * 4


@WAYS
def test_a_graph_can_be_run_twice(ranks, way):
    assert ranks.run(calls.twice_backward, **way) == [[]] * 4


@pytest.mark.parametrize(("way", "more"), [({}, []), (CLONES, []), (PADDED, ["int32"]), (ONCE, ["float32", "int32"])])
def test_in_autocast_rows_travel_in_its_dtype_and_bits_are_those_of_one_process(ranks, way, more):
    assert ranks.run(calls.autocast, **way) == [[[], ["bfloat16", *more]]] * 4


@pytest.mark.parametrize(("way", "exchanges"), [({}, 4), (CLONES, 7), (PADDED, 6), (ONCE, 8)])
def test_without_gradients_outputs_are_the_same(ranks, way, exchanges):
    assert ranks.run(calls.without_gradients, **way) == [[True, exchanges]] * 4


@WAYS
@pytest.mark.parametrize("frozen", [["x"], ["experts"], ["x", "router"], ["x", "router", "shared"], ["x", "experts"]])
def test_what_needs_no_gradient_may_differ_from_layer_to_layer(ranks, frozen, way):
    assert ranks.run(calls.partly_frozen, frozen=frozen, **way) == [[]] * 4


def test_a_call_runs_few_functions_of_python(ranks):
    """A forward ran 366 of them, and both passes 449: half checked tensors that the layer itself had made."""
    for forward, both in ranks.run(calls.functions):
        assert len(forward) <= 180, f"{len(forward)} functions: {forward}"
        assert len(both) <= 250, f"{len(both)} functions: {both}"
        for passes in (forward, both):
            files = sorted({module for module, _ in passes})
            assert len(files) <= 20, files
        # Options of the gate and scores of the losses are attributes, which anybody may have set since the last call.
        checks = [
            name for _, name in forward if name.startswith("check_") or name.endswith(("_in_range", "networks_fit"))
        ]
        of_parts = ["check_mode", "check_place", "check_gate_topk", "check_choice", "check_kind", "check_parameters"]
        assert checks == [*of_parts, "networks_fit", "check_router_losses"]


def test_chunks_travel_while_others_compute(ranks):
    for forward, backward in ranks.run(calls.order_of_events):
        assert forward == [
            *("start 0", "start 1", "start 2", "shared"),
            *("finish 0", "compute 0", "start 0"),
            *("finish 1", "compute 1", "start 1"),
            *("finish 2", "compute 2", "start 2"),
            *("finish 0", "finish 1", "finish 2"),
        ]
        without_weights = [event for event in backward if event not in ("weights", "shared")]
        assert without_weights == [
            *("start 2", "start 1", "start 0"),
            *("finish 2", "start 2", "finish 1", "start 1", "finish 0", "start 0"),
            *("finish 0", "finish 1", "finish 2"),
        ]
        assert backward.index("shared") > backward.index("finish 2")


@WAYS
def test_a_compiled_model_has_the_same_bits(ranks, way):
    assert all(ranks.run(calls.compiled, **way))


@WAYS
def test_a_copy_of_a_layer_is_on_the_same_ranks(ranks, way):
    assert all(ranks.run(calls.copied, **way))


def test_a_layer_is_initialised_as_in_one_process(ranks):
    assert all(ranks.run(calls.reset))


def test_names_statistics_and_text_of_a_layer(ranks):
    for found in ranks.run(calls.seen_from_outside):
        assert all(found.values()), found


def test_experts_shared_between_layers_stay_shared(ranks):
    assert all(ranks.run(calls.shared_between_layers))


def test_two_groups_compute_side_by_side(ranks):
    assert all(ranks.run(calls.groups_side_by_side))


def test_a_layer_is_spread_before_it_has_memory(ranks):
    assert all(ranks.run(calls.made_on_meta))
