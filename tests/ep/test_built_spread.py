"""``MoE(..., expert_parallel=...)`` is the layer that ``shard`` would make, and never holds all experts."""

import built
import pytest


@pytest.mark.parametrize(("dtype", "by"), [("float32", "mesh"), ("bfloat16", "group"), ("float64", "mesh")])
def test_a_layer_built_spread_is_one_that_is_spread_afterwards(ranks, dtype, by):
    for found in ranks.run(built.as_one_process, dtype=dtype, by=by):
        assert found.pop("kind") == "ShardedMoE"
        assert found.pop("values") == []
        assert all(found.values()), found


def test_a_rank_never_holds_all_experts(ranks):
    for most, of_an_expert in ranks.run(built.largest):
        assert most <= 2 * of_an_expert  # this rank's two of six experts


def test_models_of_such_layers_have_the_gradients_of_one_process(ranks):
    assert all(ranks.run(built.several))


def test_a_layer_on_the_meta_device_waits_for_its_memory(ranks):
    assert all(ranks.run(built.on_meta))


def test_what_is_no_mesh_is_refused(ranks):
    assert ranks.run(built.refused) == ["shard: mesh must be a DeviceMesh or a ProcessGroup, got str"] * 4
